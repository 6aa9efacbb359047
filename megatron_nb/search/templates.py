"""Templates of the English Wikipedia that carry text of the article. All others are left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from megatron_nb.search.dates import MONTHS

DISAMBIGUATIONS = {"disambig", "disambiguation", "dab", "disamb", "hndis", "geodis", "hospitaldis", "schooldis", "numberdis", "mathdab",
                   "letter-number combination disambiguation", "human name disambiguation", "place name disambiguation"}  # fmt: skip
BOXES = ("infobox", "taxobox", "speciesbox", "automatic taxobox", "geobox", "chembox", "drugbox")
FIELDS_LEFT_OUT = re.compile(
    r"^\d*$|image|caption|logo|map|size|(^|_)alt$|coord|signature|website|url|footnote|width|colou?r|^lat|^long|pushpin|ref$|style|"
    r"^title\d*$|audio|flag|seal|shield|blank_emblem|module|embed|border|upright|symbol", re.I)  # fmt: skip
LAST, FIRST, ALL = "the last", "the first", "all"
# Which of the unnamed arguments are shown.
SHOWN = {
    **dict.fromkeys(("lang", "transl", "transliteration", "abbr", "abbrlink", "tooltip", "color", "font color", "script"), LAST),
    **dict.fromkeys(("nowrap", "nobold", "small", "smaller", "big", "larger", "em", "strong", "nbsp", "nobr", "nobreak", "center", "sc",
                     "smallcaps", "bold", "italic", "flag", "flagu", "flagcountry", "flagicon and name", "country", "ship", "gbr",
                     "quote", "cquote", "blockquote", "native name", "illm", "ill", "interlanguage link", "sic", "visible anchor",
                     "midsize", "noitalic", "mono", "unicode", "polytonic", "iw2", "sortname"), FIRST),
    **dict.fromkeys(("unbulleted list", "ubl", "plainlist", "plain list", "flatlist", "hlist", "flat list", "bulleted list",
                     "collapsible list", "cslist"), ALL),
    **{name: LAST for code in ("fr", "de", "la", "es", "it", "el", "ru", "ar", "he", "ja", "zh", "pt", "nl", "grc")
       for name in (f"lang-{code}", f"icon {code}")},
}  # fmt: skip
DATES = re.compile(r"^(birth|death|start|end|film|release|launch|opening|disestablished|birth-date|death-date)[ -]date|^(dts|dob|bda|date)$")
SINGLE = {"en dash": "–", "ndash": "–", "spaced ndash": " – ", "snd": " – ", "spnd": " – ", "mdash": "—", "em dash": "—", "dot": "·",
          "spaces": " ", "space": " ", "'": "’", "!": "|", "=": "=", "-": "\n", "clear": "\n", "break": "\n"}  # fmt: skip


def name_of(node: Any) -> str:
    return " ".join(str(node.name).replace("_", " ").split()).lower()


def is_infobox(name: str) -> bool:
    return name.startswith(BOXES)


def text_parts(name: str, node: Any) -> Iterator[Any]:
    """The pieces of text a template stands for: strings, and arguments that are wikitext themselves."""
    if name in SINGLE:
        yield SINGLE[name]
        return
    unnamed = [param.value for param in node.params if not param.showkey or str(param.name).strip() == "1"]
    if not unnamed:
        return
    if DATES.match(name):
        yield _day([str(value).strip() for value in unnamed])
    elif name in ("convert", "cvt"):
        yield " ".join(str(value).strip() for value in unnamed[: 4 if str(unnamed[1:2]).strip("[']") in ("to", "-", "and") else 2])
    elif name in ("circa", "c.", "ca"):
        yield "c. "
        yield unnamed[0]
    elif name in ("url", "official website"):
        return
    elif SHOWN.get(name) == ALL:
        for at, value in enumerate(unnamed):
            yield ", " if at else ""
            yield value
    elif SHOWN.get(name) == FIRST:
        yield unnamed[0]
    elif SHOWN.get(name) == LAST or name.startswith("lang-"):
        yield unnamed[-1]


def _day(words: list[str]) -> str:
    """12 March 1922 of ["1922", "3", "12", ...]; a birth after a death is left out."""
    numbers = [int(word) for word in words[:3] if word.isascii() and word.isdigit()]
    if not numbers:
        return words[0]
    if len(numbers) > 1 and not 1 <= numbers[1] <= 12:
        numbers = numbers[:1]
    day = [f"{numbers[2]} "] if len(numbers) > 2 else []
    month = [f"{MONTHS[numbers[1] - 1]} "] if len(numbers) > 1 else []
    return "".join([*day, *month, str(numbers[0])])
