"""Templates of the English Wikipedia that carry text of the article. All others are left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from megatron_nb.search.dates import MONTHS

DISAMBIGUATIONS = {"disambig", "disambiguation", "dab", "disamb", "hndis", "geodis", "hospitaldis", "schooldis", "numberdis"}
BOXES = ("infobox", "taxobox", "speciesbox", "automatic taxobox", "geobox", "chembox", "drugbox")
FIELDS_LEFT_OUT = re.compile(
    r"^\d*$|image|caption|logo|map|pixels|size|(^|_)alt$|coord|signature|website|url|footnote|width|colou?r|^lat|^long|pushpin|"
    r"ref$|style|^title\d*$|audio|flag|seal|shield|emblem|coat_?(of|link)|module|embed|border|upright|symbol|^(full)?name$",
    re.IGNORECASE,
)
# Which of the unnamed arguments are text.
LAST = {"lang", "transl", "transliteration", "abbr", "abbrlink", "tooltip", "color", "font color", "script"}
FIRST = {
    *("nowrap", "nobold", "small", "smaller", "big", "larger", "em", "strong", "nobr", "nobreak", "center", "sc", "smallcaps"),
    *("bold", "italic", "noitalic", "midsize", "mono", "unicode", "polytonic", "ipa", "flag", "flagu", "flagcountry"),
    *("country", "ship", "quote", "cquote", "blockquote", "ill", "interlanguage link", "sic", "native name"),
    "visible anchor",
}
ALL = {"ubl", "unbulleted list", "plainlist", "plain list", "flatlist", "flat list", "hlist", "cslist", "bulleted list"}
DATES = re.compile(
    r"^(birth|death|start|end|film|release|launch|opening|disestablished|birth-date|death-date)[ -]date|^(dts|dob|bda|date)$"
)
SIGNS = {
    **dict.fromkeys(("en dash", "ndash"), "–"), **dict.fromkeys(("spaced ndash", "snd", "spnd"), " – "),
    **dict.fromkeys(("mdash", "em dash"), "—"), **dict.fromkeys(("spaces", "space", "nbsp"), " "),
    **dict.fromkeys(("-", "clear", "break"), "\n"), "dot": "·", "'": "’", "!": "|", "=": "=",
}  # fmt: skip


def name_of(node: Any) -> str:
    return " ".join(str(node.name).replace("_", " ").split()).lower()


def is_infobox(name: str) -> bool:
    return name.startswith(BOXES)


def text_parts(name: str, node: Any) -> Iterator[Any]:
    """The pieces of text a template stands for: strings, and arguments that are wikitext themselves."""
    if name in SIGNS:
        yield SIGNS[name]
        return
    unnamed = [param.value for param in node.params if not param.showkey or str(param.name).strip() == "1"]
    if not unnamed:
        return
    if DATES.match(name):
        yield _day([str(value).strip() for value in unnamed])
    elif name in ("convert", "cvt"):
        between = str(unnamed[1]).strip() if len(unnamed) > 1 else ""
        yield " ".join(str(value).strip() for value in unnamed[: 4 if between in ("to", "-", "and", "x") else 2])
    elif name in ("circa", "c.", "ca"):
        yield "c. "
        yield unnamed[0]
    elif name in ALL:
        for at, value in enumerate(unnamed):
            yield ", " if at else ""
            yield value
    elif name in FIRST:
        yield unnamed[0]
    elif name in LAST or name.startswith("lang-"):
        yield unnamed[-1]


def _day(words: list[str]) -> str:
    """12 March 1922 of ["1922", "3", "12", ...]; other words as they are."""
    numbers = [int(word) for word in words[:3] if word.isascii() and word.isdigit()]
    if not numbers:
        return words[0]
    if len(numbers) > 1 and not 1 <= numbers[1] <= 12:
        numbers = numbers[:1]
    day = [f"{numbers[2]} "] if len(numbers) > 2 else []
    month = [f"{MONTHS[numbers[1] - 1]} "] if len(numbers) > 1 else []
    return "".join([*day, *month, str(numbers[0])])
