"""A MediaWiki XML dump, read as a stream: .xml, .xml.gz, .xml.bz2, multistream too.

The bytes are cut into <page> elements (inside a text these letters are escaped), and each is parsed on its own: one page with
broken XML costs that page, not the dump. Memory is bounded by the largest page; a page longer than MAX_PAGE is left out.
"""

from __future__ import annotations

import bz2
import logging
import re
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_nb.search.dates import date_of
from megatron_nb.search.pages import Link, Page, Redirect, Unread, clean_title, kind_of_title
from megatron_nb.search.wikitext import Namespaces, plain

CHUNK = 1 << 20  # bytes of the file read at once
MAX_PAGE = 64 << 20  # bytes of XML
START, END = b"<page>", b"</page>"
FILES, CATEGORIES, ARTICLES = (-2, 6), 14, 0  # keys of namespaces

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mark:
    """Where reading may begin again: a byte of the file at which a compressed stream begins, and the pages to skip after it."""

    offset: int = 0
    skip: int = 0


@dataclass(frozen=True)
class RawPage:
    title: str
    wikitext: str
    redirect: str | None
    revised: str | None


class Dump:
    """The pages of namespace 0, in order. `broken` counts what could not be read, by reason; each is named in the log."""

    def __init__(self, path: Path):
        """ValueError when the file is not a MediaWiki dump."""
        self.path, self.size = path, path.stat().st_size
        self.broken: dict[str, int] = {}
        self.at = 0  # bytes of the file read so far
        head = b""
        for _, piece in self._pieces(0):
            head += piece
            if START in head or len(head) > CHUNK:
                break
        if b"<mediawiki" not in head:
            raise ValueError(f"{path} begins with {head[:40]!r}: a MediaWiki XML dump begins with <mediawiki; check the file")
        self.namespaces = _namespaces(head.partition(START)[0].decode(errors="replace"))

    def rows(self, mark: Mark = Mark()) -> Iterator[tuple[Mark, RawPage]]:  # noqa: B008  frozen
        """(mark after the page, page) for every readable page of namespace 0."""
        skip = mark.skip
        for after, element in self._elements(mark.offset):
            if skip:
                skip -= 1
                continue
            page = self._page(element)
            if page is not None:
                yield after, page

    def parse(self) -> Callable[[RawPage], Page | Redirect | Unread]:
        """What makes a page of a raw one; picklable, for other processes."""
        return Parser(self.namespaces)

    # ------------------------------------------------------------------ bytes
    def _pieces(self, offset: int) -> Iterator[tuple[int, bytes]]:
        """(the offset of the compressed stream, or 0, bytes of XML)"""
        kind = {".bz2": bz2.BZ2Decompressor, ".gz": lambda: zlib.decompressobj(31)}.get(self.path.suffix.lower())
        with open(self.path, "rb") as file:
            file.seek(offset)
            stream, opener, rest, whole = offset, kind and kind(), b"", False
            while chunk := rest or file.read(CHUNK):
                rest = b""
                self.at = file.tell()
                if opener is None:
                    yield 0, chunk
                    continue
                try:
                    yield stream, opener.decompress(chunk)
                except (OSError, zlib.error) as error:
                    where = f"near byte {self.at}"
                    raise ValueError(f"{self.path} {where}: {error}: the file is damaged; fetch it again") from error
                if opener.eof:
                    rest = opener.unused_data
                    stream, opener, whole = file.tell() - len(rest), kind(), True
                else:
                    whole = False
            if opener is not None and not whole:
                self._broke("ends early", "the compressed data stop in the middle: what came before is kept")

    def _elements(self, offset: int) -> Iterator[tuple[Mark, bytes]]:
        """(mark after it, bytes) of every <page> element."""
        buffer, stream, count = b"", offset, 0
        for where, piece in self._pieces(offset):
            if where != stream and START not in buffer and buffer.rstrip()[-1:] in (b"", b">"):
                stream, count = where, 0  # a part of a multistream begins between two pages: reading may begin here
            buffer += piece
            position = 0
            while True:
                start = buffer.find(START, position)
                end = buffer.find(END, start) if start >= 0 else -1
                if end < 0:
                    break
                again = buffer.rfind(START, start + len(START), end)
                if again >= 0:
                    self._broke("page not closed", f"another <page> begins in it: {_named(buffer[start:again])}")
                    start = again
                position = end + len(END)
                count += 1
                yield Mark(stream, count), buffer[start:position]
            buffer = buffer[start if start >= 0 else max(position, len(buffer) - len(START)) :]
            if len(buffer) > MAX_PAGE:
                self._broke("page too long", f"more than {MAX_PAGE} bytes: {_named(buffer)}")
                buffer = b""
        if START in buffer:
            self._broke("page not closed", f"the file ends in it: {_named(buffer)}")

    def _page(self, element: bytes) -> RawPage | None:
        try:
            tree = ElementTree.fromstring(element)
        except ElementTree.ParseError as error:
            self._broke("XML", f"{error}: {_named(element)}")
            return None
        title = clean_title(tree.findtext("title") or "")
        if (tree.findtext("ns") or "0").strip() != str(ARTICLES):
            return None
        revision = tree.find("revision")
        text = None if revision is None else revision.findtext("text")
        if not title or text is None:
            self._broke("no title" if not title else "no text", _named(element))
            return None
        redirect = tree.find("redirect")
        target = None if redirect is None else clean_title(redirect.get("title") or "")
        stamp = (revision.findtext("timestamp") or "").strip()
        return RawPage(title, text, target, stamp[:10] if re.match(r"\d{4}-\d\d-\d\dT", stamp) else None)

    def unread(self, page: Unread) -> None:
        """Count and name a page that the parser failed on."""
        self._broke("wikitext", f"{page.why}: title {page.title!r}")

    def _broke(self, reason: str, what: str) -> None:
        self.broken[reason] = self.broken.get(reason, 0) + 1
        if self.broken[reason] <= 20:
            log.warning("%s, near byte %d: %s: %s", self.path, self.at, reason, what)


@dataclass(frozen=True)
class Parser:
    namespaces: Namespaces

    def __call__(self, raw: RawPage) -> Page | Redirect | Unread:
        """Plain text, links and dates of a page."""
        if raw.redirect:
            return Redirect(raw.title, raw.redirect)
        try:
            page = plain(raw.wikitext, self.namespaces)
        except Exception as error:  # of the wikitext parser's own faults: one page may not end a build of hours
            return Unread(raw.title, f"{type(error).__name__}: {error}")
        links = tuple(Link(target, kind, page.text[a:b]) for target, kind, a, b in page.links)
        kind = "disambiguation" if page.is_disambiguation else kind_of_title(raw.title)
        date = date_of(page.lead, page.categories, raw.revised)
        return Page(raw.title, page.text, links, tuple(page.categories), date, raw.revised, kind)


def _namespaces(head: str) -> Namespaces:
    """English names, and those of the dump's language."""
    default = Namespaces()
    found = [(int(key), name.strip().lower()) for key, name in re.findall(r'<namespace key="(-?\d+)"[^>/]*>([^<]+)<', head)]
    return Namespaces(
        default.others | {name for key, name in found if key != ARTICLES},
        default.files | {name for key, name in found if key in FILES},
        default.categories | {name for key, name in found if key == CATEGORIES},
    )


def _named(element: bytes) -> str:
    """The title in a broken element, for a message."""
    title = re.search(rb"<title>(.{0,200}?)</title>", element, re.S)
    return f"title {title[1].decode(errors='replace')!r}" if title else f"{element[:60]!r}"
