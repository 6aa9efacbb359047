"""Rows -> token caches: every row is checked first, then tokenised by several processes, shard by shard.

Safe beside other ranks and jobs: one process builds a cache under a file lock (which dies with its holder), the others
wait. A shard appears complete or not at all; shards finished before a kill are reused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nb.data import cache, chatml, formats, render, rows, schemas, turns
from megatron_nb.data.files import file_digests, locked
from megatron_nb.data.rows import BadRow
from megatron_nb.data.sources import DataConfig, SourceConfig
from megatron_nb.data.spawn import die_with_parent, light_start
from megatron_nb.data.tokenizer import tokenizer_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
CODE = (formats, schemas, rows, turns, render, chatml, cache)  # what decides the content of a cache
SHOWN = 5  # bad rows named in one message
POOLED = 2**24  # bytes from which processes save more time than they take to start; below, the tokenizer's threads do
TRIED = 16  # rows of a source that are rendered before any are tokenised
Chunk = list[tuple[str, Any]]  # (where, undecoded row)


@dataclass
class Source:
    """One source and the place of its cache."""

    name: str
    config: SourceConfig
    files: list[Path]
    folder: Path
    key: dict[str, Any]
    skip: bool

    @property
    def size(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def complete(self) -> bool:
        return (self.folder / "index.json").is_file()

    def chunks(self) -> Iterator[Chunk]:
        """The rows in groups of one shard. The size follows from the files alone, so a later run cuts at the same rows."""
        limit = min(max(self.size // 64, 2**18), 2**24)
        chunk: Chunk = []
        size = 0
        for file in self.files:
            for where, raw in rows.raw_rows(file):
                chunk.append((where, raw))
                size += len(raw) if isinstance(raw, bytes) else 2**12
                if size >= limit:
                    yield chunk
                    chunk, size = [], 0
        if chunk:
            yield chunk


def prepare(
    sources: dict[str, SourceConfig], config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> dict[str, cache.TokenCache]:
    """The token caches of these sources, built where they are missing.

    Raises ValueError for bad rows (all sources are read before any is tokenised), RuntimeError when a build breaks off.
    """
    folder = Path(config.cache_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    found = [_source(name, source, config, tokenizer, folder) for name, source in sources.items()]
    missing = sorted((source for source in found if not source.complete), key=lambda source: source.folder)
    with contextlib.ExitStack() as locks:
        for source in missing:  # all processes lock in the same order
            locks.enter_context(locked(folder / f"{source.folder.name}.lock"))
        if missing := [source for source in missing if not source.complete]:
            with Workers(config, tokenizer) as workers:
                counts = [workers.check(source) for source in missing]
                for source, count in zip(missing, counts):
                    workers.build(source, count)
    caches = {source.name: cache.TokenCache(source.folder, source.name) for source in found}
    for opened in caches.values():
        _report(opened)
    return caches


def _source(name: str, source: SourceConfig, config: DataConfig, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Source:
    import tokenizers
    import transformers

    files = rows.data_files(source.path)
    key = {
        "files": [[file.name, digest] for file, digest in zip(files, file_digests(files, folder))],
        "format": source.format,
        "tokenizer": tokenizer_digest(tokenizer),
        "history": config.history,
        "keep_all_think": config.keep_all_think,
        "bad_rows": config.bad_rows,
        "code": hashlib.sha256(b"".join(Path(module.__file__).read_bytes() for module in CODE)).hexdigest(),
        "libraries": [tokenizers.__version__, transformers.__version__],
    }
    place = folder / f"{name}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"
    return Source(name, source, files, place, key, config.bad_rows == "skip")


class Workers:
    """The processes that check and tokenise; for little data, and with workers=0 or 1, this process itself."""

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase):
        self.count = len(os.sched_getaffinity(0)) if config.workers is None else config.workers
        self.setting = (tokenizer, config.history, config.keep_all_think)
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def check(self, source: Source) -> int:
        """Reads every row of the source once; the number of rows. Raises ValueError that names the first bad rows."""
        count, bad, errors = 0, 0, []
        with progress() as bars:
            bar = bars.add_task(f"check {source.name}", total=None, tokens=0)
            for number, broken in self._map(_check, source.chunks(), source):
                count, bad, errors = count + number, bad + len(broken), errors + broken[: SHOWN - len(errors)]
                bars.update(bar, completed=count)
        if bad and (not source.skip or bad == count):
            more = f"\n  and {bad - len(errors)} more" if bad > len(errors) else ""
            raise ValueError(
                f"data source {source.name}: {bad} of {count} rows cannot be used:\n  " + "\n  ".join(errors) + more
            )
        return count

    def build(self, source: Source, count: int) -> None:
        """Writes the shards that are missing, then the index."""
        source.folder.mkdir(exist_ok=True)
        for left in source.folder.glob("*.part"):  # of a builder that was killed
            shutil.rmtree(left)
        shards: list[dict[str, Any]] = []
        tokens = 0
        try:
            with progress() as bars:
                bar = bars.add_task(f"tokenise {source.name}", total=count, tokens=0)
                for shard in self._map(_build, enumerate(source.chunks()), source):
                    shards.append(shard)
                    tokens += shard["tokens"]
                    bars.update(bar, advance=shard["rows"], tokens=tokens)
        except BrokenProcessPool as error:
            raise RuntimeError(
                f"{source.folder}: a tokenising process died (killed, or out of memory); finished shards are kept: "
                "run again, with fewer data.workers"
            ) from error
        except OSError as error:
            raise RuntimeError(
                f"{source.folder}: {error}; finished shards are kept: free some space or set data.cache_dir, and run again"
            ) from error
        if not sum(shard["samples"] for shard in shards):
            raise ValueError(f"data source {source.name}: none of {count} rows gave a sample: {shards[0]['skipped_examples']}")
        cache.write_index(source.folder, shards, source.key)

    def _map(self, work: Any, tasks: Iterator[Any], source: Source) -> Iterator[Any]:
        """work(task, source, renderer) of every task, in order, with a bounded number of tasks in memory."""
        if self.count < 2 or source.size < POOLED:
            renderer = render.Renderer(*self.setting)
            for task in tasks:
                yield work(task, source, renderer)
            return
        if self.pool is None:
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(self.count, context, initializer=_start_worker, initargs=self.setting)
        waiting: list[Future] = []
        for task in tasks:
            with light_start():  # processes are started as tasks come
                waiting.append(self.pool.submit(_in_worker, work, task, source))
            if len(waiting) > 2 * self.count:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


_renderer: render.Renderer


def _start_worker(*setting: Any) -> None:
    global _renderer
    die_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _renderer = render.Renderer(*setting)


def _in_worker(work: Any, task: Any, source: Source) -> Any:
    return work(task, source, _renderer)


def _parse(chunk: Chunk, source: Source) -> tuple[list[tuple[str, Any]], list[str]]:
    """[(where, Conversation or Text)] and the messages of rows that break a rule."""
    items, errors = [], []
    for where, raw in chunk:
        try:
            items.append((where, formats.parse(rows.decode(where, raw), where, source.name, source.config.format)))
        except BadRow as error:
            errors.append(str(error))
    return items, errors


def _check(chunk: Chunk, source: Source, renderer: render.Renderer) -> tuple[int, list[str]]:
    """(rows, messages of bad ones). A few are rendered too: what a template cannot do shows in the first rows."""
    items, errors = _parse(chunk, source)
    _, unrendered = _render(items[:TRIED], renderer)
    return len(chunk), errors + unrendered


def _render(items: list[tuple[str, Any]], renderer: render.Renderer) -> tuple[list[render.Rendered], list[str]]:
    rendered, errors = [], []
    for (where, _), found in zip(items, renderer([item for _, item in items])):
        if isinstance(found, BadRow):
            errors.append(f"{where}: {found}")
        else:
            rendered += found
    return rendered, errors


def _build(task: tuple[int, Chunk], source: Source, renderer: render.Renderer) -> dict[str, Any]:
    """Writes one shard, or finds it written; its counts."""
    number, chunk = task
    final = source.folder / f"{number:05d}"
    if not (final / "shard.json").is_file():
        items, errors = _parse(chunk, source)
        rendered, unrendered = _render(items, renderer)
        errors += unrendered
        if errors and not source.skip:
            raise BadRow(
                f"data source {source.name}: {len(errors)} rows of shard {number} cannot be rendered:\n  "
                + "\n  ".join(errors[:SHOWN])
            )
        part = final.with_suffix(".part")
        part.mkdir()
        cache.write_shard(part, rendered, {"rows": len(chunk), "skipped": len(errors), "skipped_examples": errors[:SHOWN]})
        part.rename(final)
    return json.loads((final / "shard.json").read_text())


def progress() -> Any:
    """Bars with rows, rate and time left, on the error stream."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    class Rate(TextColumn):
        def render(self, task: Any) -> str:  # type: ignore[override]
            seconds = max(task.elapsed or 0, 1e-9)
            tokens = f", {task.fields['tokens'] / seconds:,.0f} tokens/s" if task.fields["tokens"] else ""
            return f"{task.completed / seconds:,.0f} rows/s{tokens}"

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(""),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))


def _report(opened: cache.TokenCache) -> None:
    """One line of counts, and a warning for each thing that was left out or will not be trained."""
    index = opened.index
    log.info(
        "%s: %s rows, %s samples, %s tokens, %s trained",
        opened.source,
        *(f"{index[key]:,}" for key in ("rows", "samples", "tokens", "trained")),
    )
    if index["skipped"]:
        log.warning("%s: %d bad rows left out, first: %s", opened.source, index["skipped"], index["skipped_examples"])
    if index["untrained"]:
        log.warning(
            "%s: %d samples have no trained token, first: %s", opened.source, index["untrained"], index["untrained_names"]
        )
    if index["stripped"]:
        log.warning(
            "%s: the template left the thinking out of %d earlier turns (data.history=per_turn keeps it)",
            opened.source,
            index["stripped"],
        )
