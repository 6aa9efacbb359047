"""What can be asked of a page: a year, a day, a number or a place that stands in one of its sentences, and nowhere differently.

A candidate becomes a gap in its sentence: "It was founded in ___ by a certain name". The sentence around the gap must fit one
value of the page only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_nb.search.dates import MONTH
from megatron_nb.search.sentences import sentences
from megatron_nb.synthesis.question_obscure import GAP, NAME, Kind, obscure, shortened, telling_words

UNITS = ("km²|km2|sq mi|km|kilometres|kilometers|kilometre|kilometer|metres|meters|m|miles|feet|people|inhabitants|residents|"
         "members|species|islands|languages|students|soldiers|seats|tonnes|tons|kg|percent|%|years|days|°C")  # fmt: skip
PATTERNS = {  # kind -> where its value stands in a sentence; the group is the answer
    "year": re.compile(r"\b(?:[Ii]n|[Ss]ince|[Uu]ntil|[Bb]y|[Ff]rom|founded|established)\s(1\d{3}|20[0-2]\d)\b(?![-–/])"),
    "day": re.compile(rf"\b(\d{{1,2}} (?:{MONTH}),? \d{{4}}|(?:{MONTH}) \d{{1,2}}, \d{{4}})\b"),
    "number": re.compile(rf"(?<![\w.,–-])(\d{{1,3}}(?:,\d{{3}})+(?:\.\d+)?|\d+(?:\.\d+)?)(?=\s?(?:{UNITS})(?!\w))"),
    "place": re.compile(rf"\b(?:born|died|buried|located|situated|based|founded|headquartered|built|educated|crowned|rises|"
                        rf"executed|signed|fought|held)\s(?:in|at|near)\s(?:the\s(?:city|town|village|state)\sof\s)?({NAME.pattern})"),
}  # fmt: skip
ASKED = {  # kind -> what is asked for
    "year": "Which year", "day": "Which day (with month and year)", "number": "Which number", "place": "Which place",
}  # fmt: skip
NO_PLACE = re.compile(rf"\d|\b(?:{MONTH})\b|\b(?:and|of)$")
SHORTEST, LONGEST = 40, 400  # characters of a sentence that can be asked about
TELLING = 4  # words around the gap that tell it from other sentences


@dataclass(frozen=True)
class Answer:
    """A value in a page and the sentence that says it."""

    text: str  # verbatim
    kind: str  # of PATTERNS
    evidence: str  # the sentence, verbatim
    clue: str  # the sentence with names hidden and a gap where the answer stood

    @property
    def aliases(self) -> list[str]:
        """Other ways to write it."""
        if self.kind == "number" and "," in self.text:
            return [self.text.replace(",", "")]
        if self.kind == "day":
            day, month, year = sorted(re.findall(r"\w+", self.text), key=lambda part: (len(part) > 2) + 2 * (len(part) == 4
                                      and part.isdigit()))  # fmt: skip
            return [form for form in (f"{day} {month} {year}", f"{month} {day}, {year}") if form != self.text]
        return []


def answers_in(title: str, text: str, longest: int, kind: Kind = lambda name: None) -> list[Answer]:
    """Everything that can be asked of a page. longest: characters of the clue."""
    found: list[tuple[str, str, str, int]] = []  # kind, value, sentence, where
    said = [sentence for sentence in dict.fromkeys(sentences(text)) if "\n" not in sentence]
    for sentence in said:
        for name, pattern in PATTERNS.items():
            found += [(name, match[1], sentence, match.start(1)) for match in pattern.finditer(sentence)]
    result: list[Answer] = []
    words_of = {sentence: telling_words(obscure(sentence, kind, title)) for sentence in {about for _, _, about, _ in found}}
    for name, value, sentence, start in found:
        if not SHORTEST <= len(sentence) <= LONGEST or len(value) > 60 or text.count(sentence) != 1:
            continue
        if sentence.count(value) > 1 or (name == "place" and NO_PLACE.search(value)):  # which of the two would be meant
            continue
        clue = _gap(sentence, start, start + len(value), longest, kind, title)
        words = telling_words(clue)
        if GAP not in clue or len(words) < TELLING:
            continue
        others = {other for same, other, about, _ in found if same == name and words <= words_of[about]}
        if others <= {value}:
            result.append(Answer(value, name, sentence, clue))
    return result


def _gap(sentence: str, start: int, stop: int, longest: int, kind: Kind, title: str) -> str:
    """The sentence with the gap, obscured, and at most `longest` characters of it around the gap."""
    said = obscure(sentence[:start] + GAP + sentence[stop:], kind, title)
    at = said.find(GAP)
    if at < 0 or len(said) <= longest:
        return said
    before, after = said[:at], said[at + len(GAP) :]
    room = longest - len(GAP) - 4
    kept = max(room // 2, room - len(after))
    if len(before) > kept:
        before = "…" + before[-kept:].partition(" ")[2]
    return f"{before}{GAP}{_tail(after, room - len(before))}"


def _tail(after: str, longest: int) -> str:
    return after if len(after) <= longest else " " + shortened(after, longest) + "…"
