"""From a source to a folder that can be searched: pages, then index, then graph. Killed anywhere, the same call goes on.

Memory does not grow with the source: pages pass through a bounded window of parser processes into SQLite, the index is written
in segments, the graph from sorted shards. A full English Wikipedia needs the graph's arrays in memory once (about 6 GB).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from megatron_nb.run import write_atomic
from megatron_nb.search.articles import Articles
from megatron_nb.search.dump import Dump, Mark
from megatron_nb.search.graph import build_graph
from megatron_nb.search.index import build_index
from megatron_nb.search.pages import Unread
from megatron_nb.search.progress import Progress, peak_mb
from megatron_nb.search.store import PageReader, PageWriter
from megatron_nb.search.wikispeedia import Wikispeedia

FORM = 1  # of the folder; another form is built again
BATCH, BATCH_CHARACTERS = 200, 2_000_000  # raw pages handed to a parser at once
WINDOW = 4  # batches under way, per parser

log = logging.getLogger(__name__)


def build(source: Path, folder: Path, workers: int | None = None) -> dict[str, Any]:
    """Build `folder` from a dump, rows or a wikispeedia folder; what build.json then says.

    ValueError: no such source, a folder begun from another source, a bad row, a source without a page. OSError: a full disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        done = finished(folder)
        reader = source_of(source)
        print_of = fingerprint(source)
        if done and done["fingerprint"] == print_of:
            log.info("%s is complete: %d pages", folder, done["pages"])
            return done
        if done:
            raise ValueError(f"{folder} holds a corpus of {done['source']}: name another folder for {source}, or remove it")
        try:
            facts, seconds = _read(reader, source, folder, print_of, workers or os.cpu_count() or 1)
            pages = PageReader(folder / "pages.sqlite")
            total = len(pages)
            seconds["index"] = _phase("index", total, lambda tick: build_index(pages.texts, folder / "index", tick))
            seconds["graph"] = _phase("graph", total, lambda tick: facts.update(build_graph(pages, folder / "graph", tick)))
        except sqlite3.Error as error:
            told = f"{folder / 'pages.sqlite'}: {error}: see to the disk, then the same command goes on"
            raise OSError(told) from error
        cpu = round(sum(os.times()[:4]), 2)  # of this process so far, and of its parsers
        facts |= {"form": FORM, "seconds": {k: round(v, 2) for k, v in seconds.items()}, "cpu_s": cpu, "peak_mb": peak_mb()}
        write_atomic(folder / "build.json", json.dumps(facts, indent=1) + "\n")
        return facts


def source_of(path: Path) -> Dump | Articles | Wikispeedia:
    """The reader of a file or folder by its name. ValueError for what none reads."""
    if not path.exists():
        forms = "a dump (.xml, .xml.bz2, .xml.gz), rows (.jsonl) or a folder of wikispeedia"
        raise ValueError(f"{path} does not exist: name {forms}")
    if path.is_dir():
        return Wikispeedia(path)
    name = path.name.lower().removesuffix(".gz").removesuffix(".xz").removesuffix(".bz2")
    return Articles(path) if name.endswith(".jsonl") else Dump(path)


def finished(folder: Path) -> dict[str, Any] | None:
    """What build.json says; None while the build is not complete."""
    path = folder / "build.json"
    return json.loads(path.read_text()) if path.exists() else None


def fingerprint(source: Path) -> str:
    """Of names, sizes and beginnings: a source that differs is told from one that was only moved."""
    files = sorted(path for path in source.iterdir() if path.is_file()) if source.is_dir() else [source]
    told = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            told.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(1 << 16))
    return told.hexdigest()


def _phase(name: str, total: int, work: Callable[[Callable[[int, int], None]], Any]) -> float:
    progress = Progress(name, total)
    work(progress.at)
    return progress.end()


def _read(reader: Any, source: Path, folder: Path, print_of: str, workers: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Fill pages.sqlite; (facts, seconds of the attempts)."""
    writer = PageWriter(folder / "pages.sqlite")
    begun = writer.state("fingerprint")
    if begun not in (None, print_of):
        raise ValueError(f"{folder} was begun from {writer.state('source')}: name another folder for {source}, or remove it")
    writer.write([], {"fingerprint": print_of, "source": str(source)})
    facts = writer.state("facts", {"broken": {}})
    if not writer.state("read"):
        begin = Mark(*writer.state("mark", (0, 0)))
        if begin != Mark():
            log.info("%s holds %d pages already; reading on from there", folder, writer.count)
        progress = Progress("pages", reader.size)
        before = facts["broken"]
        for mark, entries in _parsed(reader, begin, workers):
            for entry in entries:
                if isinstance(entry, Unread):
                    reader.unread(entry)
            entries = [entry for entry in entries if not isinstance(entry, Unread)]
            facts["broken"] = dict(Counter(before) + Counter(reader.broken))
            writer.write(entries, {"mark": (mark.offset, mark.skip), "facts": facts})
            progress.at(reader.at, len(entries))
        facts["broken"] = dict(Counter(before) + Counter(reader.broken))
        if not writer.count:
            left_out = facts["broken"] or "nothing"
            raise ValueError(f"{source} holds no page that can be read (left out: {left_out}): check the file")
        seconds = writer.state("seconds", 0.0) + progress.end()
        writer.write([], {"read": True, "facts": facts, "seconds": seconds})
    facts |= {"source": str(source), "fingerprint": print_of, "pages": writer.count, "double": writer.double}
    seconds = {"pages": writer.state("seconds", 0.0)}
    writer.close()
    return facts, seconds


def _parsed(reader: Any, mark: Mark, workers: int) -> Iterator[tuple[Mark, list[Any]]]:
    """(mark after it, parsed entries) batch by batch, in the source's order."""
    parse, batches = reader.parse(), _batches(reader.rows(mark))
    if workers == 1:
        yield from ((after, parse_all(parse, batch)) for after, batch in batches)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        under_way: deque = deque()
        for after, batch in batches:
            under_way.append((after, pool.submit(parse_all, parse, batch)))
            if len(under_way) >= WINDOW * workers:
                mark, future = under_way.popleft()
                yield mark, future.result()
        while under_way:
            mark, future = under_way.popleft()
            yield mark, future.result()


def parse_all(parse: Callable[[Any], Any], batch: list[Any]) -> list[Any]:
    return [parse(raw) for raw in batch]


def _batches(rows: Iterator[tuple[Mark, Any]]) -> Iterator[tuple[Mark, list[Any]]]:
    """Bounded in pages and in characters."""
    batch, size, after = [], 0, Mark()
    for after, raw in rows:
        batch.append(raw)
        size += len(raw["text"] if isinstance(raw, dict) else raw.wikitext)
        if len(batch) >= BATCH or size >= BATCH_CHARACTERS:
            yield after, batch
            batch, size = [], 0
    if batch:
        yield after, batch


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """ValueError when another process builds here."""
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is building {folder}: wait for it, or name another folder") from None
        yield
