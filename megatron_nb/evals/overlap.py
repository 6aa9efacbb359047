"""Which evaluation items training has seen: every row of every stage against every task, by runs of words and by id.

    CASCADE/overlap.json          {"task": [ids of items that were met]}: what `exclude` of an evaluation takes
            overlap_report.json   per task the stages that met it; each pair with the training row's file and line
            overlap/              what is done, by file and batch of rows: the same call goes on after a kill

An item is looked for without what all items of its task begin or end with (instructions, the form of an answer), so that a
short question is found where it stands alone. An equal id counts where at least half of the item's words
stand in the row too: ids such as "12" or "test/3" are given by everybody.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from megatron_nb.asking.ledger import Ledger, Progress, ledger_name
from megatron_nb.data.decontamination import Evaluations, texts_of, words_of
from megatron_nb.data.files import locked
from megatron_nb.data.rows import BadRow, data_files, decode, raw_rows
from megatron_nb.evals.task import Item
from megatron_nb.run import write_atomic

BATCH = 200  # rows of a file that a process takes at once
FEW = 8  # batches; fewer are not worth the processes
SAME_TEXT = 0.5  # share of an item's words that a row of the same id holds
PAIRS = 2000  # that the report names at most, and
ROWS = 3  # rows of an item
SECTIONS = ("data", "prompts")  # of a job's configuration, where its training rows are named

log = logging.getLogger(__name__)


class Look:
    """The items of all tasks, ready to be met."""

    def __init__(self, items: dict[str, list[Item]], n: int, common: int):
        self.evaluations = Evaluations(n, common)
        self.ids: dict[str, list[tuple[str, str, set[str]]]] = {}  # id -> (task, item, its words)
        self.digest = hashlib.sha256()
        for task, its in items.items():
            for item, texts in zip(its, own_texts([asked(item) for item in its], n), strict=True):
                self.evaluations.add(task, item.id, *texts)
                self.ids.setdefault(item.id, []).append((task, item.id, set(words_of(texts[0]))))
                self.digest.update(json.dumps([task, item.id, texts]).encode())

    def pairs(self, where: str, row: dict[str, Any]) -> list[dict[str, Any]]:
        """What this row shares with items: {task, item, by: words | id, shared, of, excerpt, where}, one for each item."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        texts = list(texts_of(row))
        for text in texts:
            for one in self.evaluations.find(text):
                told = {"task": one.set, "item": one.item, "by": "words", "shared": one.shared, "of": one.of,
                        "excerpt": one.excerpt, "where": where}  # fmt: skip
                if one.shared > found.get((one.set, one.item), told | {"shared": 0})["shared"]:
                    found[one.set, one.item] = told
        for name in {str(row[key]) for key in ("id", "task_id", "question_id") if row.get(key) not in (None, "")}:
            for task, item, words in self.ids.get(name, ()):
                here = words & {word for text in texts for word in words_of(text)}
                if (task, item) not in found and words and len(here) >= SAME_TEXT * len(words):
                    found[task, item] = {"task": task, "item": item, "by": "id", "shared": len(here), "of": len(words),
                                         "excerpt": "", "where": where}  # fmt: skip
        return list(found.values())


def asked(item: Item) -> str:
    """What an item says before it is answered, system messages left out."""
    said = [message.get("content") for message in item.prompt if message["role"] != "system"]
    return "\n".join(text for text in said if isinstance(text, str))


def own_texts(texts: list[str], n: int) -> list[list[str]]:
    """What to look for of each text: it without the words that all begin with and end with, and when that has fewer than `n`
    words, also each run of n words that holds it: such words mean nothing where they stand among others, but for their form.
    """
    words = [words_of(text) for text in texts]
    first = last = 0
    if len(set(map(tuple, words))) > 1:
        least = min(map(len, words))
        first = next((k for k in range(least) if len({one[k] for one in words}) > 1), least)
        last = next((k for k in range(least - first) if len({one[-1 - k] for one in words}) > 1), least - first)
    found = []
    for one in words:
        stop = len(one) - last
        places = range(max(0, stop - n), min(first, len(one) - n) + 1) if 0 < stop - first < n else ()
        found.append([" ".join(one[first:stop]), *(" ".join(one[place : place + n]) for place in places)])
    return found


# ------------------------------------------------------------------ training rows
def training_sources(config: dict[str, Any]) -> dict[str, str]:
    """{source: path} of a job's resolved configuration: what it trains on; held-out rows are none of it."""
    sections = [config[name] for name in SECTIONS if isinstance(config.get(name), dict)]
    return {name: source["path"] for section in sections for name, source in (section.get("sources") or {}).items()}


def stages_in(root: Path) -> dict[str, dict[str, str]]:
    """{stage: {source: path}} of the runs in the folder of a cascade that have begun, or of the run that it is."""
    found = {}
    for path in sorted([*root.glob("config.yaml"), *root.glob("*/config.yaml")], key=lambda path: path.stat().st_mtime):
        if ".before-" not in path.parent.name:  # moved aside by a chain that made it anew
            found[path.parent.resolve().name] = training_sources(yaml.safe_load(path.read_text()) or {})
    return {stage: sources for stage, sources in found.items() if sources}


@dataclass(frozen=True)
class Part:
    """A batch of rows of a file."""

    file: Path
    begin: int
    rows: list[tuple[str, Any]]

    @property
    def key(self) -> str:
        state = self.file.stat()
        return f"{self.file.resolve()}:{state.st_size}:{state.st_mtime_ns}:{self.begin}"


def parts_of(files: list[Path]) -> Iterator[Part]:
    for file in files:
        rows, begin = raw_rows(file), 0
        while batch := list(islice(rows, BATCH)):
            yield Part(file, begin, batch)
            begin += len(batch)


def look_through(look: Look, part: Part) -> dict[str, Any]:
    """{rows, bad, pairs} of a batch. bad: the first row that cannot be read, and there may be more."""
    found: dict[str, Any] = {"rows": len(part.rows), "bad": None, "pairs": []}
    for where, raw in part.rows:
        try:
            found["pairs"] += look.pairs(where, decode(where, raw))
        except BadRow as error:
            found["bad"] = found["bad"] or str(error)
    return found


# ------------------------------------------------------------------ the scan
def find_overlaps(
    root: Path, stages: dict[str, dict[str, str]], items: dict[str, list[Item]], *,
    n: int = 13, common: int = 3, workers: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Look through {stage: {source: path}} for the items of {task: items}; writes both files into `root` and gives the report.

    workers: processes; None: one per core; 0: this one. ValueError when there is nothing to look through. A path that is not
    there yet is named in the report's "missing": its stage is not checked.
    """
    (root / "overlap").mkdir(parents=True, exist_ok=True)
    with locked(root / "overlap" / "lock"):  # evaluations of several stages may ask at the same time
        return _find_overlaps(root, stages, items, n, common, workers)


def _find_overlaps(
    root: Path, stages: dict[str, dict[str, str]], items: dict[str, list[Item]], n: int, common: int, workers: int | None
) -> dict[str, Any]:
    look = Look(items, n, common)
    files, missing = files_of(stages)
    distinct = list(dict.fromkeys(file for its in files.values() for found in its.values() for file in found))
    if not distinct:
        why = "; ".join(missing) or "no stage names sources"
        raise ValueError(f"no training rows to look through ({why}): run a stage first, or name files")
    ledger = Ledger(root / "overlap", ledger_name("rows", look.digest.hexdigest(), n, common), 0)
    try:
        keys = scan(look, distinct, ledger, os.cpu_count() if workers is None else workers)
        report = report_of(items, files, {file: [ledger[key] for key in its] for file, its in keys.items()})
    finally:
        ledger.close()
    report |= {"n": n, "common": common, "missing": missing}
    met = {task: sorted({pair["item"] for pair in report["all"] if pair["task"] == task}) for task in items}
    write_atomic(root / "overlap.json", json.dumps(met, indent=1, ensure_ascii=False) + "\n")
    report["pairs"] = shown(report.pop("all"))
    write_atomic(root / "overlap_report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return report


def files_of(stages: dict[str, dict[str, str]]) -> tuple[dict[str, dict[str, list[Path]]], list[str]]:
    """({stage: {source: files}}, what is not there)."""
    files: dict[str, dict[str, list[Path]]] = {}
    missing = []
    for stage, sources in stages.items():
        for source, path in sources.items():
            try:
                files.setdefault(stage, {})[source] = data_files(path)
            except ValueError as error:
                missing.append(f"{stage}, source {source}: {error}")
    return files, missing


def scan(look: Look, files: list[Path], ledger: Ledger, workers: int) -> dict[Path, list[str]]:
    """Bring every batch of every file into the ledger; {file: its keys}."""
    keys: dict[Path, list[str]] = {file: [] for file in files}
    counts = [sum(1 for _ in raw_rows(file)) for file in files]
    total = sum(-(-count // BATCH) for count in counts)
    progress = Progress(f"batches of {BATCH} training rows", total)
    pool = None
    if workers and total >= FEW:
        fork = multiprocessing.get_context("fork")  # the items lie in memory once
        pool = ProcessPoolExecutor(workers, fork, initializer=_take, initargs=(look,))
    waiting: deque[tuple[str, Future]] = deque()

    def settle(least: int) -> None:
        while len(waiting) > least:
            key, future = waiting.popleft()
            ledger[key] = future.result()
            progress.tick()

    try:
        for part in parts_of(files):
            keys[part.file].append(part.key)
            if part.key in ledger:
                progress.tick()
            elif pool is None:
                ledger[part.key] = look_through(look, part)
                progress.tick()
            else:
                waiting.append((part.key, pool.submit(_look_through, part)))
                settle(3 * workers)
        settle(0)
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    return keys


_look: Look | None = None  # of a worker process


def _take(look: Look) -> None:
    global _look
    _look = look


def _look_through(part: Part) -> dict[str, Any]:
    return look_through(_look, part)


def report_of(items: dict[str, list[Item]], files: dict[str, dict[str, list[Path]]],
              found: dict[Path, list[dict[str, Any]]]) -> dict[str, Any]:  # fmt: skip
    """{tasks, stages, bad_rows, all: every pair}."""
    pairs = {file: [pair for batch in batches for pair in batch["pairs"]] for file, batches in found.items()}
    met: dict[str, dict[str, set[str]]] = {task: {} for task in items}  # task -> stage -> items
    stages: dict[str, dict[str, int]] = {}
    for stage, sources in files.items():
        for source, its in sources.items():
            stages.setdefault(stage, {})[source] = sum(batch["rows"] for file in its for batch in found[file])
            for pair in (pair for file in its for pair in pairs[file]):
                met[pair["task"]].setdefault(stage, set()).add(pair["item"])
    tasks = {
        task: {"items": len(items[task]), "excluded": len(set().union(*by_stage.values())),
               "stages": {stage: len(its) for stage, its in by_stage.items()}}
        for task, by_stage in met.items()
    }  # fmt: skip
    bad = [batch["bad"] for batches in found.values() for batch in batches if batch["bad"]]
    return {"tasks": tasks, "stages": stages, "bad_rows": bad[:20], "all": [pair for its in pairs.values() for pair in its]}


def shown(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pairs that share most: ROWS of an item, PAIRS in all."""
    pairs = sorted(pairs, key=lambda pair: (-pair["shared"] / max(pair["of"], 1), pair["task"], pair["item"], pair["where"]))
    count: dict[tuple[str, str], int] = {}
    kept = []
    for pair in pairs:
        key = (pair["task"], pair["item"])
        count[key] = count.get(key, 0) + 1
        if count[key] <= ROWS:
            kept.append(pair)
    return kept[:PAIRS]
