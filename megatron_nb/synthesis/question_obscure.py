"""Says what a page is about without saying its name: dates become decades, numbers round, names what they are names of.

English only, by rules; nothing here asks a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import floor, log10

from megatron_nb.search.dates import MONTH
from megatron_nb.search.sentences import sentences

GAP = "___"  # stands for the answer; obscuring leaves it alone
LEAD_SENTENCES = 12  # among which a page says what it is
NOUN_LETTERS = 3  # of a word that says something
CAPITAL = "A-ZÀ-ÖØ-ÞĀĂĄĆĈĊČĎĐĒĔĖĘĚĜĞĠĢĤĦĨĪĬĮİĴĶĹĻĽĿŁŃŅŇŊŌŎŐŒŔŖŘŚŜŞŠŢŤŦŨŪŬŮŰŲŴŶŸŹŻŽΑ-ΩА-Я"
WORD = rf"(?:[{CAPITAL}]\.)+|[{CAPITAL}][\w’'-]*"
JOINED = r"of the|of|the|de|de la|del|la|le|du|des|von|van|van der|di|da|el|al|bin|ibn|and|&"
NAME = re.compile(rf"(?:(?<=\s)|(?<=^)|(?<=[(\"“‘—–/-]))(?:{WORD})(?:[ \-](?:(?:{JOINED}) )?(?:{WORD}|[IVX]+\b|\d+\b))*")
FUNCTION = frozenset(re.findall(r"\w+", """
    a an the of in on at by to from for with and or but as is was are were be been being has have had who which that whose
    where when while after before during until since between among against under over into onto through across near than
    then also it its he his him she her they their them this these those there not no nor so such both either about around
    within without along behind below above upon called named known"""))  # fmt: skip
OPENERS = frozenset(re.findall(r"\w+", """
    although another other others some many most several however because if despite unlike all each every one two three here
    today now later early only even once much more less few any what how though thus therefore instead finally again often
    sometimes usually generally according due following including like our we you its"""))  # fmt: skip
EMPTY = FUNCTION | {"certain", "place", "name", "some", "day", "month", "year", "about"}
PLACED = re.compile(r"\b(?:in|at|near|from|through|across|around|throughout|into|to)$", re.I)
DATE = re.compile(rf"\b(?:\d{{1,2}} (?:{MONTH}),? (\d{{4}})|(?:{MONTH}) \d{{1,2}},? (\d{{4}}))\b")
MONTH_YEAR = re.compile(rf"\b(?:{MONTH}),? (\d{{4}})\b")
DAY = re.compile(rf"\b(?:\d{{1,2}} (?:{MONTH})|(?:{MONTH}) \d{{1,2}}|{MONTH})\b")
YEAR = re.compile(r"(?<![\w,.])(1\d{3}|20\d\d)(?![\w]|,\d|\.\d)")
NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?![\w]|,\d|\.\d)")
COPULA = re.compile(r"\b(?:is|was|are|were)(?: (?:also|now|still|once|\w+ly))? (?:one of (?=the\b))?((?:an?|the)\s[^.;:]+)")
CUT = re.compile(r",? (?:which|who|that|where|when|whose|but|although|though|because|while|since)\b|,? and\b| [-–—] |, | ?\(")
BROKEN = re.compile(r"\([^()]*\)|\[[^\[\]]*\]")

Kind = Callable[[str], str | None]  # a name -> the noun of what it names (city, river), None when unknown


def said_of(title: str, text: str) -> str | None:
    """What the page says its subject is, verbatim but for parentheses ("a king of Dál Riata"); None when it does not say."""
    own = [word.lower() for word in re.findall(r"\w{3,}", plain_title(title))] or [title.lower()]
    for sentence in sentences(text[:6000])[:LEAD_SENTENCES]:
        sentence = " ".join(BROKEN.sub("", sentence).split())
        found = COPULA.search(sentence)
        if found and any(word in sentence[: found.start()].lower() for word in own):
            phrase = _first_part(found[1])
            if noun_of(phrase):
                return phrase
    return None


def _first_part(phrase: str) -> str:
    """Up to the first comma or clause, but for commas and `and` between adjectives: "a large, shallow lake, fed by rivers"."""
    for cut in CUT.finditer(phrase):
        if cut.start() and (len(phrase[: cut.start()].split()) > 2 or not cut[0].startswith((",", " and"))):
            return phrase[: cut.start()]
    return phrase.strip(" ,")


def plain_title(title: str) -> str:
    """Without the parenthesis that tells it from others: Mercury (planet)."""
    return re.sub(r"\s*\([^()]*\)$", "", title)


def noun_of(phrase: str) -> str | None:
    """The noun a description turns on: "a large port city in the north" -> city; None when there is none."""
    words = re.split(r"[^\w'’-]+", re.sub(r"^(an?|the)\s+", "", phrase, flags=re.I))
    first = next((at for at, word in enumerate(words) if word in FUNCTION or word.endswith("ing") and at), len(words))
    noun = words[first - 1] if first else ""
    if len(noun) < NOUN_LETTERS or not noun.isalpha() or not noun.islower():
        return None
    return noun


def obscure(text: str, kind: Kind = lambda name: None, own: str = "") -> str:
    """The text with dates, numbers and names hidden. own: the name of what it is about, which becomes `it`."""
    text = " ".join(BROKEN.sub("", text).replace('"', "").split()).replace(" ,", ",")
    text = DATE.sub(lambda m: f"a day of the {decade(m[1] or m[2])}", text)
    text = MONTH_YEAR.sub(lambda m: f"a month of the {decade(m[1])}", text)
    text = re.sub(r"\b(?:on|in) (?=a day of)", "on ", DAY.sub("a day of the year", text))
    text = YEAR.sub(lambda m: f"the {decade(m[1])}", text)
    text = re.sub(r"\b(about|around|some|approximately|over|nearly|roughly) about\b", r"\1", NUMBER.sub(_rounded, text))
    return _without_names(text, kind, own)


def decade(year: str) -> str:
    return f"{year[:3]}0s"


def _rounded(found: re.Match) -> str:
    value = float(found[0].replace(",", ""))
    if value < 10:
        return "some"
    return f"about {round(value, -floor(log10(value))):,.0f}"


def _without_names(text: str, kind: Kind, own: str) -> str:
    own_words = set(plain_title(own).lower().split()) - FUNCTION

    def hidden(found: re.Match) -> str:
        name, before, after = found[0], text[: found.start()], text[found.end() :]
        words = name.split()
        if not before.strip(" \"“‘(") and len(words) == 1 and name.lower() in FUNCTION | OPENERS:
            return name.lower()
        named = set(re.sub(r"['’]s\b", "", name.lower()).split()) - FUNCTION
        noun = kind(re.sub(r"['’]s$", "", name))
        if named and own_words and (own_words <= named or (named <= own_words and not noun)):
            return "its" if name.endswith(("'s", "’s")) else "it"
        follows = re.match(r" ([\wß-ÿ'’-]+)", after)
        adjective = follows and follows[1].islower() and follows[1] not in FUNCTION and not follows[1].endswith(("ed", "s"))
        if adjective and before.strip():
            return "\0"  # an adjective is left out: a German composer -> a composer
        possessive = "'s" if name.endswith(("'s", "’s")) else ""
        return f"a certain {noun or ('place' if PLACED.search(before.rstrip(' the').rstrip()) else 'name')}{possessive}"

    text = NAME.sub(hidden, text)
    text = re.sub(r"\b(?:[Aa]n?|[Tt]he) (a certain|its?\b)", r"\1", text)
    text = re.sub(r"\b(a certain \w+)(?:(?:, and|,| and| or) a certain \w+)+", r"\1", text)
    text = re.sub(r"\0 ?", "", text)
    text = re.sub(r"\b([Aa])n? (?=(\w+))", lambda m: m[1] + ("n " if _vowel(m[2]) else " "), text)
    return " ".join(text.split()).replace(" ,", ",").replace(" .", ".")


def _vowel(word: str) -> bool:
    word = word.lower()
    if re.match(r"uni[^nm]|us[eu]|eu|one\b|once|ur[aeio]", word):
        return False
    return word[0] in "aeiou" or re.match(r"hour|heir|honou?r", word) is not None


def shortened(text: str, longest: int) -> str:
    """At most `longest` characters, ending at a word that something can end with."""
    text = text.strip(" ,.;:")
    if len(text) > longest:
        text = text[: longest + 1].rpartition(" ")[0]
    words = text.split(" ")
    while words and (words[-1].strip(",;:") in FUNCTION - {"it"} or words[-1] == "certain"):
        words.pop()
    return " ".join(words).strip(" ,;:")


def telling_words(text: str) -> set[str]:
    """The words by which one description is told from another."""
    return {word for word in re.findall(r"[^\W\d_]{3,}|\d{3}0s", text.lower()) if word not in EMPTY}
