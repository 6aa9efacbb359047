"""A corpus that was built: pages by title, search, and the graph of links. Read-only; usable from any thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_nb.search.build import FORM, finished
from megatron_nb.search.graph import Graph
from megatron_nb.search.index import Index, snippet_of
from megatron_nb.search.pages import Link, Page
from megatron_nb.search.store import PageReader

__all__ = ["Corpus", "Graph", "Hit", "Link", "Page"]


@dataclass(frozen=True)
class Hit:
    """A page that a search found."""

    title: str
    snippet: str  # sentences of its text, verbatim but for white space
    score: float  # higher is better; comparable within one search only


class Corpus:
    """See the head of the file."""

    def __init__(self, folder: Path):
        """ValueError when the folder holds no finished build."""
        facts = finished(folder) if folder.is_dir() else None
        if facts is None or facts["form"] != FORM:
            found = "holds no finished corpus" if facts is None else f"is of form {facts['form']}, not {FORM}"
            raise ValueError(f"{folder} {found}: build it with `python -m megatron_nb.search build SOURCE --out {folder}`")
        self.folder, self.facts = folder, facts
        self._pages, self._index = PageReader(folder / "pages.sqlite"), Index(folder / "index")

    @classmethod
    def open(cls, folder: Path | str) -> Corpus:
        return cls(Path(folder))

    def __len__(self) -> int:
        return self.facts["pages"]

    def titles(self) -> Sequence[str]:
        """Of all pages, by id."""
        return self.graph.titles

    def page(self, title: str) -> Page | None:
        """The page a title leads to, redirects followed; None when there is none."""
        return self._pages.page(title)

    def text(self, title: str) -> tuple[str, str] | None:
        """(title of the page, its text); cheaper than `page`."""
        return self._pages.text(title)

    def search(self, query: str, k: int = 10) -> list[Hit]:
        """The k best pages by BM25, best first; fewer when fewer hold a word of the query."""
        return [self.hit(page, score, query) for page, score in self.ranked(query, k)]

    def ranked(self, query: str, k: int) -> list[tuple[int, float]]:
        """(page id, score) of the k best."""
        return self._index.search(query, k)

    def hit(self, page: int, score: float, query: str) -> Hit:
        title, text = self._pages.by_id(page)
        return Hit(title, snippet_of(text, query), score)

    def texts(self, first: int = 0) -> Iterator[tuple[int, str, str]]:
        """(id, title, text) of all pages from id `first` on."""
        return self._pages.texts(first)

    @cached_property
    def graph(self) -> Graph:
        return Graph(self.folder / "graph")

    def info(self) -> dict[str, Any]:
        """What the build noted, and the disk it takes in MB."""
        size = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        return {**self.facts, "disk_mb": round(size / 2**20, 1)}
