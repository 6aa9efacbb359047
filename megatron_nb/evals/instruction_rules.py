"""The kinds of verifiable instructions of IFEval (arXiv 2311.07911), each a function (answer, settings) -> followed or not.

Names of kinds and settings are those of its data. Where its authors use NLTK (sentences, words in capitals), plain rules stand
here; languages are told by langdetect, as there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
ABBREVIATED = {
    *("mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "inc", "ltd", "co", "dept"),
    *("vs", "etc", "e.g", "i.e", "fig", "no", "vol", "approx", "p.s", "p.p.s"),
}
ENDS = re.compile(r"[.!?\u3002\uff01\uff1f]+[\"'\u201d\u2019)\]*_]*(?=\s|$)|[\u3002\uff01\uff1f]")
Settings = dict[str, Any]


def _holds(number: float, relation: str, bound: float) -> bool:
    """The relations of the data: "at least" and "less than"."""
    return number >= bound if relation == "at least" else number < bound


# ------------------------------------------------------------------ keywords
def existence(text: str, s: Settings) -> bool:
    return all(re.search(word, text, re.IGNORECASE) for word in s["keywords"])


def frequency(text: str, s: Settings) -> bool:
    return _holds(len(re.findall(s["keyword"], text, re.IGNORECASE)), s["relation"], s["frequency"])


def forbidden_words(text: str, s: Settings) -> bool:
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in s["forbidden_words"])


def letter_frequency(text: str, s: Settings) -> bool:
    return _holds(text.lower().count(s["letter"].lower()), s["let_relation"], s["let_frequency"])


# ------------------------------------------------------------------ length
def number_words(text: str, s: Settings) -> bool:
    return _holds(len(re.findall(r"\w+", text)), s["relation"], s["num_words"])


def number_sentences(text: str, s: Settings) -> bool:
    return _holds(count_sentences(text), s["relation"], s["num_sentences"])


def count_sentences(text: str) -> int:
    """Sentences end at . ! ? before white space; not after an abbreviation, an initial, or the number of a list."""
    count, begin = 0, 0
    for end in ENDS.finditer(text):
        said = text[begin : end.start()].split()
        after = text[end.end() :].lstrip()
        word = said[-1].lower().strip("\"'(*_[") if said else ""
        inside = end[0].startswith(".") and after and (
            word in ABBREVIATED or (len(word) == 1 and word.isalpha()) or (word.isdigit() and len(said) == 1)
            or after[0].islower()
        )  # fmt: skip
        if said and not inside:
            count, begin = count + 1, end.end()
    return count + bool(re.search(r"\w", text[begin:]))


def number_paragraphs(text: str, s: Settings) -> bool:
    """Paragraphs are separated by ***; an empty one may stand first or last only."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    if any(not part.strip() for part in parts[1:-1]):
        return False
    return sum(bool(part.strip()) for part in parts) == s["num_paragraphs"]


def nth_paragraph_first_word(text: str, s: Settings) -> bool:
    """Here paragraphs are separated by an empty line."""
    paragraphs, nth = text.split("\n\n"), s["nth_paragraph"]
    if sum(bool(one.strip()) for one in paragraphs) != s["num_paragraphs"] or nth > s["num_paragraphs"]:
        return False
    words = paragraphs[nth - 1].split()
    first = re.split(r"[.,?!'\"]", words[0].lstrip("'\""))[0].lower() if words else ""
    return first == s["first_word"].lower()


# ------------------------------------------------------------------ content and format
def number_placeholders(text: str, s: Settings) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= s["num_placeholders"]


def postscript(text: str, s: Settings) -> bool:
    marker = s["postscript_marker"]
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(known.get(marker, re.escape(marker.lower())), text.lower()) is not None


def number_bullet_lists(text: str, s: Settings) -> bool:
    stars, dashes = (re.findall(pattern, text, re.MULTILINE) for pattern in (r"^[^\S\n]*\*[^\*].*$", r"^[^\S\n]*-.*$"))
    return len(stars) + len(dashes) == s["num_bullets"]


def constrained_response(text: str, s: Settings) -> bool:
    return any(option in text for option in CONSTRAINED)


def number_highlighted_sections(text: str, s: Settings) -> bool:
    once, twice = re.findall(r"\*([^\n\*]*)\*", text), re.findall(r"\*\*([^\n\*]*)\*\*", text)
    return sum(bool(one.strip()) for one in [*once, *twice]) >= s["num_highlights"]


def multiple_sections(text: str, s: Settings) -> bool:
    return len(re.findall(rf"\s?{s['section_spliter']}\s?\d+\s?", text)) >= s["num_sections"]


def json_format(text: str, s: Settings) -> bool:
    said = re.sub(r"^```(?:json)?", "", text.strip(), flags=re.IGNORECASE).removesuffix("```").strip()
    try:
        json.loads(said)
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str, s: Settings) -> bool:
    return any(one.strip("<> \t") for one in re.findall(r"<<[^\n]+>>", text))


# ------------------------------------------------------------------ the rest
def two_responses(text: str, s: Settings) -> bool:
    parts = text.split("******")
    said = [part.strip() for part in parts if part.strip()]
    return all(part.strip() for part in parts[1:-1]) and len(said) == 2 and said[0] != said[1]


def repeat_prompt(text: str, s: Settings) -> bool:
    return text.strip().lower().startswith(s["prompt_to_repeat"].strip().lower())


def end_checker(text: str, s: Settings) -> bool:
    return text.strip().strip('"').lower().endswith(s["end_phrase"].strip().lower())


def quotation(text: str, s: Settings) -> bool:
    said = text.strip()
    return len(said) > 1 and said[0] == said[-1] == '"'


def capital_word_frequency(text: str, s: Settings) -> bool:
    words = [word for word in re.findall(r"\w[\w'\u2019-]*", text) if word.isupper()]
    return _holds(len(words), s["capital_relation"], s["capital_frequency"])


def english_capital(text: str, s: Settings) -> bool:
    return text.isupper() and _is_language(text, "en")


def english_lowercase(text: str, s: Settings) -> bool:
    return text.islower() and _is_language(text, "en")


def no_comma(text: str, s: Settings) -> bool:
    return "," not in text


def response_language(text: str, s: Settings) -> bool:
    return _is_language(text, s["language"])


def _is_language(text: str, code: str) -> bool:
    """As IFEval has it: a text without a letter to tell a language by is given the benefit of the doubt."""
    import langdetect

    langdetect.DetectorFactory.seed = 0  # its draws would differ from run to run
    try:
        return langdetect.detect(text) == code
    except langdetect.LangDetectException:
        return True


KINDS: dict[str, tuple[Callable[[str, Settings], bool], tuple[str, ...]]] = {  # kind -> (rule, settings it needs)
    "keywords:existence": (existence, ("keywords",)),
    "keywords:frequency": (frequency, ("keyword", "relation", "frequency")),
    "keywords:forbidden_words": (forbidden_words, ("forbidden_words",)),
    "keywords:letter_frequency": (letter_frequency, ("letter", "let_relation", "let_frequency")),
    "language:response_language": (response_language, ("language",)),
    "length_constraints:number_sentences": (number_sentences, ("relation", "num_sentences")),
    "length_constraints:number_paragraphs": (number_paragraphs, ("num_paragraphs",)),
    "length_constraints:number_words": (number_words, ("relation", "num_words")),
    "length_constraints:nth_paragraph_first_word": (
        nth_paragraph_first_word, ("num_paragraphs", "nth_paragraph", "first_word"),
    ),
    "detectable_content:number_placeholders": (number_placeholders, ("num_placeholders",)),
    "detectable_content:postscript": (postscript, ("postscript_marker",)),
    "detectable_format:number_bullet_lists": (number_bullet_lists, ("num_bullets",)),
    "detectable_format:constrained_response": (constrained_response, ()),
    "detectable_format:number_highlighted_sections": (number_highlighted_sections, ("num_highlights",)),
    "detectable_format:multiple_sections": (multiple_sections, ("section_spliter", "num_sections")),
    "detectable_format:json_format": (json_format, ()),
    "detectable_format:title": (title, ()),
    "combination:two_responses": (two_responses, ()),
    "combination:repeat_prompt": (repeat_prompt, ("prompt_to_repeat",)),
    "startend:end_checker": (end_checker, ("end_phrase",)),
    "startend:quotation": (quotation, ()),
    "change_case:capital_word_frequency": (capital_word_frequency, ("capital_relation", "capital_frequency")),
    "change_case:english_capital": (english_capital, ()),
    "change_case:english_lowercase": (english_lowercase, ()),
    "punctuation:no_comma": (no_comma, ()),
}  # fmt: skip


def check(kind: str, settings: Settings) -> None:
    """ValueError for a kind that is not known, or one whose settings are not all there."""
    if kind not in KINDS:
        raise ValueError(f"the instruction {kind!r} is not known; there are {', '.join(KINDS)}")
    if lacks := [name for name in KINDS[kind][1] if settings.get(name) is None]:
        raise ValueError(f"the instruction {kind!r} lacks {', '.join(lacks)}")


def follows(kind: str, text: str, settings: Settings) -> bool:
    """Whether the answer as it is follows the instruction; nothing never does."""
    return bool(text.strip()) and KINDS[kind][0](text, settings)


def follows_loosely(kind: str, text: str, settings: Settings) -> bool:
    """Whether it does so without asterisks, without its first line, its last line, or any of these together."""
    lines = text.split("\n")
    variants = [text, *("\n".join(lines[cut]).strip() for cut in (slice(1, None), slice(-1), slice(1, -1)))]
    return any(map(partial(follows, kind, settings=settings), [*variants, *(one.replace("*", "") for one in variants)]))
