"""Pages and redirects on disk: one SQLite file, written in transactions that also say how far the source was read."""

from __future__ import annotations

import json
import sqlite3
import threading
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_nb.search.pages import Link, Page, Redirect, clean_title

TABLES = """
CREATE TABLE IF NOT EXISTS pages(id INTEGER PRIMARY KEY, title TEXT NOT NULL UNIQUE, kind TEXT NOT NULL,
                                 date TEXT, revised TEXT, text BLOB NOT NULL, rest BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS redirects(title TEXT PRIMARY KEY, target TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS state(name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
FURTHEST = 16  # redirects that are followed one after another; a power of 2


class PageWriter:
    """Ids are 0, 1, 2, ... in the order of writing. Of several pages of one title the first stays."""

    def __init__(self, path: Path):
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(TABLES)
        self.count = self._db.execute("SELECT count(*) FROM pages").fetchone()[0]
        self.double = self.state("double", 0)  # pages and redirects whose title was there already

    def state(self, name: str, default: Any = None) -> Any:
        row = self._db.execute("SELECT value FROM state WHERE name = ?", (name,)).fetchone()
        return default if row is None else json.loads(row[0])

    def write(self, entries: Iterable[Page | Redirect], state: dict[str, Any]) -> None:
        """All entries and the state, or nothing."""
        self._db.execute("BEGIN")
        try:
            for entry in entries:
                self.double += not (self._redirect(entry) if isinstance(entry, Redirect) else self._page(entry))
            rows = [(name, json.dumps(value)) for name, value in {**state, "double": self.double}.items()]
            self._db.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", rows)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # where the disk is full, SQLite has rolled back itself
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Leave one file that can be read where nothing can be written."""
        self._db.execute("PRAGMA journal_mode=DELETE")
        self._db.close()

    def _redirect(self, redirect: Redirect) -> bool:
        row = (redirect.title, redirect.target)
        return self._db.execute("INSERT OR IGNORE INTO redirects VALUES (?, ?)", row).rowcount == 1

    def _page(self, page: Page) -> bool:
        links, at = [], 0
        for link in page.links:
            # Links come in the order of their sentences, mostly: look behind the last one first.
            found = page.text.find(link.sentence, at) if link.sentence else -1
            found = page.text.find(link.sentence) if found < 0 and link.sentence else found
            at = max(found, 0)
            links.append((link.target, link.kind, max(found, 0), max(found, 0) + (len(link.sentence) if found >= 0 else 0)))
        rest = json.dumps({"links": links, "categories": page.categories}, ensure_ascii=False, separators=(",", ":"))
        row = (self.count, page.title, page.kind, page.date, page.revised, _packed(page.text), _packed(rest))
        if self._db.execute("INSERT OR IGNORE INTO pages VALUES (?, ?, ?, ?, ?, ?, ?)", row).rowcount == 0:
            return False
        self.count += 1
        return True


class PageReader:
    """Read-only, for any number of threads."""

    def __init__(self, path: Path):
        self._path, self._local = path, threading.local()

    @property
    def _db(self) -> sqlite3.Connection:
        if not hasattr(self._local, "db"):
            self._local.db = sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)
        return self._local.db

    def __len__(self) -> int:
        return self._db.execute("SELECT coalesce(max(id) + 1, 0) FROM pages").fetchone()[0]

    def resolve(self, title: str) -> str | None:
        """The title of the page that a title leads to; None for a missing page or a loop of redirects."""
        title = clean_title(title)
        for _ in range(FURTHEST + 1):
            if self._db.execute("SELECT 1 FROM pages WHERE title = ?", (title,)).fetchone():
                return title
            row = self._db.execute("SELECT target FROM redirects WHERE title = ?", (title,)).fetchone()
            if row is None:
                return None
            title = row[0]
        return None

    def page(self, title: str) -> Page | None:
        """The page, redirects followed, also those of its links."""
        title = self.resolve(title)
        if title is None:
            return None
        query = "SELECT title, kind, date, revised, text, rest FROM pages WHERE title = ?"
        title, kind, date, revised, text, rest = self._db.execute(query, (title,)).fetchone()
        text, rest = _unpacked(text), json.loads(_unpacked(rest))
        names = {name: self.resolve(name) or name for name in {link[0] for link in rest["links"]}}
        links = tuple(Link(names[target], place, text[a:b]) for target, place, a, b in rest["links"])
        return Page(title, text, links, tuple(rest["categories"]), date, revised, kind)

    def text(self, title: str) -> tuple[str, str] | None:
        """(title, text) of the page, redirects followed; cheaper than `page`."""
        title = self.resolve(title)
        if title is None:
            return None
        return title, _unpacked(self._db.execute("SELECT text FROM pages WHERE title = ?", (title,)).fetchone()[0])

    def by_id(self, page: int) -> tuple[str, str]:
        """(title, text)"""
        title, text = self._db.execute("SELECT title, text FROM pages WHERE id = ?", (page,)).fetchone()
        return title, _unpacked(text)

    def texts(self, first: int) -> Iterator[tuple[int, str, str]]:
        """(id, title, text) of all pages from id `first` on."""
        for page, title, text in self._db.execute("SELECT id, title, text FROM pages WHERE id >= ? ORDER BY id", (first,)):
            yield page, title, _unpacked(text)

    def link_rows(self, first: int, stop: int) -> Iterator[tuple[int, list[list[Any]]]]:
        """(id, links as stored: target, kind, start, stop) of pages first..stop."""
        query = "SELECT id, rest FROM pages WHERE id >= ? AND id < ? ORDER BY id"
        for page, rest in self._db.execute(query, (first, stop)):
            yield page, json.loads(_unpacked(rest))["links"]

    def heads(self) -> Iterator[tuple[str, str, str | None]]:
        """(title, kind, date) of all pages, by id."""
        yield from self._db.execute("SELECT title, kind, date FROM pages ORDER BY id")

    def redirects(self) -> Iterator[tuple[str, str]]:
        yield from self._db.execute("SELECT title, target FROM redirects")

    def state(self, name: str) -> Any:
        row = self._db.execute("SELECT value FROM state WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])


def _packed(text: str) -> bytes:
    return zlib.compress(text.encode("utf-8", "replace"), 6)


def _unpacked(data: bytes) -> str:
    return zlib.decompress(data).decode()
