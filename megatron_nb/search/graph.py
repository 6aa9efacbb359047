"""The graph of a corpus: who links to whom, with what kind of link, and each page's degree, date and kind. Numpy files, mapped.

Titles are compared by 64-bit hashes, so that a full Wikipedia's links (hundreds of millions) are resolved by sorting and
searching arrays, without a table of titles in memory. Two of 20 million titles meet with a probability of about 1e-5.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date as Day
from pathlib import Path

import numpy as np

from megatron_nb.search.pages import KINDS, LINK_KINDS, clean_title
from megatron_nb.search.store import FURTHEST, PageReader

SHARD = 100_000  # pages whose links are gathered at once
EPOCH = Day(1970, 1, 1).toordinal()


class Titles(Sequence):
    """Titles by page id, in a mapped file."""

    def __init__(self, folder: Path):
        self._offsets = np.load(folder / "title_offsets.npy", mmap_mode="r")
        self._bytes = np.memmap(folder / "titles.bin", mode="r") if self._offsets[-1] else np.zeros(0, np.uint8)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, page):
        if isinstance(page, slice):
            return [self[one] for one in range(*page.indices(len(self)))]
        page = range(len(self))[page]  # IndexError beyond the end
        return bytes(self._bytes[self._offsets[page] : self._offsets[page + 1]]).decode()


@dataclass(frozen=True)
class Out:
    """Links in compressed rows: those of page i are targets[offsets[i]:offsets[i + 1]], ascending, each target once."""

    offsets: np.ndarray  # int32 [n + 1]
    targets: np.ndarray  # int32 [links]
    types: np.ndarray  # uint8 [links], positions in LINK_KINDS: the first kind of place it stands in


class Graph:
    """Nodes are the pages of the corpus, by id."""

    def __init__(self, folder: Path):
        def load(name: str) -> np.ndarray:
            return np.load(folder / f"{name}.npy", mmap_mode="r")

        self.titles = Titles(folder)
        self.out = Out(load("offsets"), load("targets"), load("types"))
        self.degree = load("degree")  # int32 [n], links out and in
        self.date = load("date")  # float32 [n], days since 1970, nan when unknown
        self.kind = load("kind")  # uint8 [n], positions in KINDS
        self._hashes, self._pages = load("name_hashes"), load("name_pages")

    def __len__(self) -> int:
        return len(self.titles)

    def id_of(self, title: str) -> int | None:
        """The page that a title or redirect leads to."""
        key = hash_of(clean_title(title))
        at = int(np.searchsorted(self._hashes, key))
        return int(self._pages[at]) if at < len(self._hashes) and self._hashes[at] == key else None

    def neighbours(self, page: int) -> np.ndarray:
        """Pages that it links to, ascending."""
        return self.out.targets[self.out.offsets[page] : self.out.offsets[page + 1]]


def hash_of(title: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(title.encode("utf-8", "replace"), digest_size=8).digest(), "little"))


def build_graph(pages: PageReader, folder: Path, tick: Callable[[int, int], None]) -> dict[str, int]:
    """Write the graph's files; counts of links, redirects and what leads nowhere. Shards on disk are used again."""
    folder.mkdir(parents=True, exist_ok=True)
    total = len(pages)
    titles = _write_heads(pages, folder)
    sources, targets = _hashes(name for name, _ in pages.redirects()), _hashes(target for _, target in pages.redirects())
    names, ids, counts = _names(titles, sources, targets)
    np.save(folder / "name_hashes.npy", names)
    np.save(folder / "name_pages.npy", ids)
    rows, missing = [], 0
    for first in range(0, total, SHARD):
        shard = folder / f"links-{first}-{min(first + SHARD, total)}.npz"
        if not shard.exists():
            _write_shard(pages, first, min(first + SHARD, total), shard)
        with np.load(shard) as data:
            found = _look_up(names, ids, data["targets"])
            missing += int((found < 0).sum())
            rows.append(_distinct(data["sources"][found >= 0], found[found >= 0], data["types"][found >= 0]))
        stop = min(first + SHARD, total)
        tick(stop, stop - first)
    source, target, types = (np.concatenate(part) for part in zip(*rows))
    assert len(target) < 2**31, "offsets are int32"
    out = np.bincount(source, minlength=total)
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(out)]).astype(np.int32))
    np.save(folder / "targets.npy", target.astype(np.int32))
    np.save(folder / "types.npy", types.astype(np.uint8))
    np.save(folder / "degree.npy", (out + np.bincount(target, minlength=total)).astype(np.int32))
    for shard in folder.glob("links-*.npz"):
        shard.unlink()
    return {"links": len(target), "links_to_missing_pages": missing, **counts}


def _write_heads(pages: PageReader, folder: Path) -> np.ndarray:
    """Titles, dates and kinds; the titles' hashes, by id."""
    offsets, dates, kinds, hashes = [0], [], [], []
    with open(folder / "titles.bin", "wb") as file:
        for title, kind, date in pages.heads():
            offsets.append(offsets[-1] + file.write(title.encode()))
            dates.append(np.nan if date is None else days_of(date))
            kinds.append(KINDS.index(kind))
            hashes.append(hash_of(title))
    np.save(folder / "title_offsets.npy", np.array(offsets, np.int64))
    np.save(folder / "date.npy", np.array(dates, np.float32))
    np.save(folder / "kind.npy", np.array(kinds, np.uint8))
    return np.array(hashes, np.uint64)


def days_of(date: str) -> float:
    """Days from 1970 to an ISO day; the month's last where it has no such day; nan for what is no date."""
    year, month, day = (int(part) for part in date.split("-"))
    for shift in range(4):
        try:
            return float(Day(year, month, day - shift).toordinal() - EPOCH)
        except ValueError:
            continue
    return float("nan")


def _names(titles: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    """(hashes of all names that lead to a page, ascending; the pages; counts). A page's own title goes before a redirect."""
    order = np.argsort(titles, kind="stable")
    by_title, page_of = titles[order], order.astype(np.int32)
    pages = _look_up(by_title, page_of, targets)
    order = np.argsort(sources, kind="stable")
    places = order.astype(np.int32)
    onward = _look_up(sources[order], places, targets)  # the redirect that a redirect leads to, or -1
    for _ in range(FURTHEST.bit_length() - 1):  # each round follows twice as many
        stuck = (pages < 0) & (onward >= 0)
        if not stuck.any():
            break
        pages[stuck] = pages[onward[stuck]]
        onward[stuck] = onward[onward[stuck]]
    loops = int(((pages < 0) & (onward >= 0)).sum())
    good = (pages >= 0) & (_look_up(by_title, page_of, sources) < 0)
    names = np.concatenate([titles, sources[good]])
    ids = np.concatenate([np.arange(len(titles), dtype=np.int32), pages[good]])
    order = np.argsort(names, kind="stable")
    lost = int((pages < 0).sum()) - loops
    counts = {"redirects": len(sources), "redirects_in_loops": loops, "redirects_to_missing_pages": lost}
    return names[order], ids[order], counts


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """values of wanted keys (ascending keys), -1 for those that are not there."""
    if not len(keys):
        return np.full(len(wanted), -1, np.int32)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], -1).astype(np.int32)


def _hashes(names: Iterable[str]) -> np.ndarray:
    return np.fromiter(map(hash_of, names), np.uint64)


def _write_shard(pages: PageReader, first: int, stop: int, path: Path) -> None:
    def links() -> Iterator[tuple[int, np.uint64, int]]:
        for page, rows in pages.link_rows(first, stop):
            for target, kind, *_ in rows:
                place = kind.partition(":")[0]
                yield page, hash_of(target), LINK_KINDS.index(place if place in LINK_KINDS else "text")

    rows = np.fromiter(links(), [("sources", np.int32), ("targets", np.uint64), ("types", np.uint8)])
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        np.savez(file, **{name: rows[name] for name in rows.dtype.names})
    partial.replace(path)


def _distinct(source: np.ndarray, target: np.ndarray, types: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each link once, with its first kind, in the order of sources and targets, without links to itself."""
    keep = source != target
    source, target, types = source[keep], target[keep], types[keep]
    order = np.lexsort((types, target, source))
    source, target, types = source[order], target[order], types[order]
    first = np.ones(len(source), bool)
    first[1:] = (source[1:] != source[:-1]) | (target[1:] != target[:-1])
    return source[first], target[first], types[first]
