"""What the readers make of an article, and what the corpus gives back: pages with typed links, and redirects."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

KINDS = ("article", "disambiguation", "list")  # of pages; the graph holds their positions here
# Where a link stands; the graph keeps the first of them. unplaced: the source does not say where, nor is the target named.
LINK_KINDS = ("infobox", "lead", "text", "list", "table", "unplaced")
SPACES = re.compile(r"[\s_]+")


@dataclass(frozen=True)
class Link:
    """A link of a page to another."""

    target: str  # title of the page it leads to, redirects followed; the corpus may lack that page
    kind: str  # where it stands: infobox:FIELD or one of LINK_KINDS
    sentence: str  # verbatim from the page's text; "" of an unplaced link


@dataclass(frozen=True)
class Page:
    """A page as plain text."""

    title: str
    text: str  # paragraphs, headings and lists, parted by an empty line
    links: tuple[Link, ...]
    categories: tuple[str, ...]
    date: str | None  # ISO day of the thing: the latest that lead or categories name; else of the revision
    revised: str | None  # ISO day
    kind: str = "article"  # one of KINDS


@dataclass(frozen=True)
class Redirect:
    """Another name of a page."""

    title: str
    target: str


@dataclass(frozen=True)
class Unread:
    """A page that the parser failed on."""

    title: str
    why: str


def clean_title(title: str) -> str:
    """A title as the corpus spells it: composed letters, single spaces, first letter upper case, no #section.

    Idempotent. "" when nothing is left.
    """
    title = title.encode("utf-8", "replace").decode()  # half a surrogate pair is no letter
    title = SPACES.sub(" ", unicodedata.normalize("NFC", title).partition("#")[0]).strip().removeprefix(":").strip()
    first = title[:1].upper()
    return (first if len(first) == 1 else title[:1]) + title[1:]  # the German sharp s would become two letters


def kind_of_title(title: str) -> str:
    """What a title says of its page's kind (English conventions)."""
    if title.endswith("(disambiguation)"):
        return "disambiguation"
    if re.match(r"(Lists? of|Index of|Outline of|Timeline of|Comparison of) ", title):
        return "list"
    return "article"
