"""Where sentences begin and end in a paragraph of running text."""

from __future__ import annotations

import re
from collections.abc import Iterator

# A full stop, question or exclamation mark (also of Arabic, Devanagari, Chinese), closing quotes, then a space and a
# beginning that is no lower-case letter.
END = re.compile(r"(?<=[.!?؟۔।。])[\"'”’»)\]]*\s+(?=[^\sa-zß-öø-ÿ])")
SHORT = re.compile(
    r"(?:\b(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Sts|Mt|Jr|Sr|Lt|Col|Gen|Capt|Sgt|Rev|Hon|vs|etc|e\.g|i\.e|c|ca|cf|fl|b|d|r|no|No|Vol|"
    r"vol|pp|p|Inc|Ltd|Co|Corp|approx|Fig|ed|eds|trans|lit|abbr|pron|born|al|Op|op|Nos|Jan|Feb|Mar|Apr|Aug|Sept|Sep|Oct|Nov|"
    r"Dec|U\.S|U\.K|Ph\.D|a\.k\.a))\.[\"'”’)\]]*\s+$"
)


def spans(paragraph: str) -> Iterator[tuple[int, int]]:
    """(start, stop) of each sentence, without the white space between."""
    start = 0
    for match in END.finditer(paragraph):
        if SHORT.search(paragraph, max(start, match.end() - 24), match.end()):
            continue
        stop = match.end() - len(match.group()) + len(match.group().rstrip())
        yield start, stop
        start = match.end()
    if start < len(paragraph):
        yield start, len(paragraph)


def sentences(text: str) -> list[str]:
    """Every sentence of a text whose paragraphs are parted by newlines, verbatim."""
    return [line[a:b] for line in filter(None, text.split("\n")) for a, b in spans(line)]
