"""Reader of prepared articles: a row of title and text per line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron_nb.search import sentences
from megatron_nb.search.dates import date_of
from megatron_nb.search.dump import Mark
from megatron_nb.search.graph import days_of
from megatron_nb.search.pages import KINDS, Link, Page, clean_title, kind_of_title

OPENERS = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
DAMAGED = (EOFError, OSError, lzma.LZMAError, zlib.error)  # what reading a compressed file may raise
FORM = (
    'a row is {"title": str, "text": str, "links"?: [title, or {"target", "kind"?, "sentence"?}], "categories"?: [str], '
    '"date"?, "revised"?, "kind"?}'
)
KIND_IN_TITLE = re.compile(r" \([^)]*\)$")


class Articles:
    """Rows of JSON, one a line (.jsonl; .gz, .xz, .bz2)."""

    def __init__(self, path: Path):
        self.path, self.size, self.at, self.broken = path, path.stat().st_size, 0, {}

    def rows(self, mark: Mark = Mark()) -> Iterator[tuple[Mark, Any]]:  # noqa: B008  frozen
        """ValueError at the first line that is no such row, and for a file that cannot be read."""
        opened = OPENERS.get(self.path.suffix.lower(), lambda file, mode: file)
        try:
            with open(self.path, "rb") as raw, opened(raw, "rb") as file:
                for number, line in enumerate(file, 1):
                    self.at = raw.tell()
                    if number > mark.skip and line.strip():
                        yield Mark(0, number), self._row(number, line)
        except DAMAGED as error:
            raise ValueError(f"{self.path} near byte {self.at}: {error}: the file is damaged; fetch it again") from error

    def _row(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair can be written nowhere
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.path}:{number}: {error}: {FORM}") from None
        if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("title", "text")):
            raise ValueError(f"{self.path}:{number}: found {str(row)[:80]!r}: {FORM}")
        if not clean_title(row["title"]):
            raise ValueError(f"{self.path}:{number}: title={row['title']!r} is empty: {FORM}")
        if row.get("kind") not in (None, *KINDS):
            raise ValueError(f"{self.path}:{number}: kind={row['kind']!r} must be one of {', '.join(KINDS)}")
        for name in ("date", "revised"):
            if row.get(name) and not _is_day(row[name]):
                raise ValueError(f"{self.path}:{number}: {name}={row[name]!r} must be a day such as 2021-05-30")
        for name, fits in (("links", _is_link), ("categories", lambda one: isinstance(one, str))):
            found = row[name] = row.get(name) or []
            if not isinstance(found, list) or not all(map(fits, found)):
                raise ValueError(f"{self.path}:{number}: {name}={str(found)[:80]} : {FORM}")
        links = [{"target": one} if isinstance(one, str) else one for one in row["links"]]
        row["links"] = [(clean_title(one["target"]), one.get("kind"), one.get("sentence")) for one in links]
        return row

    def parse(self) -> Callable[[dict[str, Any]], Page]:
        return prepared_page


def _is_day(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", value, re.ASCII) and days_of(value) == days_of(value)


def _is_link(value: Any) -> bool:
    """A title, or {"target", "kind"?, "sentence"?}."""
    if not isinstance(value, dict):
        return isinstance(value, str)
    told = all(isinstance(value.get(name), str | None) for name in ("kind", "sentence"))
    return told and isinstance(value.get("target"), str)


def prepared_page(row: dict[str, Any]) -> Page:
    """A row as a page. A link without a sentence gets the first one that names its target."""
    title, text = clean_title(row["title"]), row["text"].replace("\r\n", "\n").strip()
    categories, found = tuple(row.get("categories") or ()), _Mentions(text)
    links = []
    for target, kind, sentence in row["links"]:
        if not target:
            continue
        if not sentence or sentence not in text:
            sentence, place = found.first(target)
            kind = place if not kind or not sentence else kind
        links.append(Link(target, kind or "text", sentence))
    date = row.get("date") or date_of(found.lead, categories, row.get("revised"))
    return Page(title, text, tuple(links), categories, date, row.get("revised"), row.get("kind") or kind_of_title(title))


class _Mentions:
    """Finds where a text names titles."""

    def __init__(self, text: str):
        paragraphs = text.split("\n\n")
        heading = next((at for at, paragraph in enumerate(paragraphs) if at and is_heading(paragraph)), len(paragraphs))
        pieces = [(line[a:b], "lead" if at < heading else "text") for at, paragraph in enumerate(paragraphs)
                  for line in paragraph.split("\n") for a, b in sentences.spans(line)]  # fmt: skip
        self._text = "\n".join(piece for piece, _ in pieces)
        self._lower = self._text.lower()
        self._lower = self._lower if len(self._lower) == len(self._text) else self._text  # a few letters change their length
        self._pieces, self.lead = pieces, "\n\n".join(paragraphs[:heading])
        self._starts = list(accumulate((len(piece) + 1 for piece, _ in pieces), initial=0))

    def first(self, title: str) -> tuple[str, str]:
        """(first sentence that names the title, its kind of place); ("", "unplaced") when none does.

        The title's (kind) may be missing, the name may be in the plural, and in lower case where it stands nowhere as it is.
        """
        name = KIND_IN_TITLE.sub("", title)
        for text, word in ((self._text, name), (self._lower, name.lower())):
            at = text.find(word)
            while at >= 0:
                if _is_word(text, at, at + len(word)):
                    return self._pieces[bisect_right(self._starts, at) - 1]
                at = text.find(word, at + 1)
        return "", "unplaced"


def _is_word(text: str, start: int, stop: int) -> bool:
    if text[start - 1 : start].isalnum():
        return False
    return not re.match(r"(?!(?:s|es|'s)(?!\w))\w", text[stop : stop + 4])


def is_heading(paragraph: str) -> bool:
    """Whether a paragraph looks like one: short, one line, no sentence."""
    return len(paragraph) <= 60 and "\n" not in paragraph and paragraph[:1] != "-" and paragraph[-1:] not in ".!?:;,"
