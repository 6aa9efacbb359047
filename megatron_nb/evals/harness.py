"""Attempts at the items of all tasks: many at once, each on disk before the next is counted, resumed, never asked twice.

    RUN/outcomes/parts/TASK-DIGEST.rank-R.jsonl   what each rank has finished; the digest is of what decides an outcome
    RUN/outcomes/TASK.jsonl                       one row per attempt, in the order of the items; written last
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_nb.asking.askers import Asker, TooLong
from megatron_nb.asking.ledger import Ledger, Progress, ledger_name
from megatron_nb.evals.overlap import files_of, find_overlaps, stages_in
from megatron_nb.evals.task import Item, Outcome, Task
from megatron_nb.run import write_atomic
from megatron_nb.schema import flatten

FREE = ("samples", "limit")  # settings that change which attempts there are, not what comes of one; Task.told_by: of a task
GIVE_UP = 32  # attempts in a row without an answer: the model is not there

log = logging.getLogger(__name__)


class Attempts:
    """The attempts of an evaluation, asked for and kept. One object on every rank; items and their order are the same."""

    def __init__(self, folder: Path, tasks: list[Task], items: dict[str, list[Item]], model: Any, rank: int):
        """folder: RUN/outcomes. model: what decides the answers beside the tasks' settings, as plain JSON."""
        self.folder, self.tasks, self.items = folder, tasks, items
        self.ledgers: dict[str, Ledger] = {}
        self._digests = {task.name: {item.id: digest_of(item) for item in items[task.name]} for task in tasks}
        for task in tasks:
            settings = {key: value for key, value in flatten(task.config).items() if key not in (*FREE, *task.told_by)}
            name = ledger_name(task.name, model, settings, dataclasses.astuple(task.sampling))
            self.ledgers[task.name] = Ledger(folder / "parts", name, rank)
        self._invalid: dict[tuple[str, str], Outcome] = {}  # not on disk: asked for again by the next run

    def _key(self, task: Task, item: Item, index: int) -> str:
        return f"{item.id}/{index}/{self._digests[task.name][item.id]}"

    def missing(self) -> list[tuple[Task, Item, int]]:
        """What has not been finished. Attempt 0 of all items comes before attempt 1: a run cut short has seen every item."""
        return [
            (task, item, index)
            for task in self.tasks for index in range(task.samples) for item in self.items[task.name]
            if self._key(task, item, index) not in self.ledgers[task.name]
        ]  # fmt: skip

    async def run(self, asker: Asker, share: int, shares: int, concurrency: int) -> None:
        """Make this share of the missing attempts, `concurrency` at once. ValueError when the model does not answer at all."""
        mine = self.missing()[share::shares]
        total = sum(task.samples * len(self.items[task.name]) for task in self.tasks)
        progress = Progress("attempts", total if shares == 1 else len(mine), total - len(mine) if shares == 1 else 0)
        queue, failed = iter(mine), 0

        async def worker() -> None:
            nonlocal failed
            for task, item, index in queue:
                outcome = await attempt(task, item, asker, index)
                if outcome.status == "invalid":
                    self._invalid[task.name, self._key(task, item, index)] = outcome
                    log.warning("%s, item %s, attempt %d has no verdict: %s", task.name, item.id, index, outcome.reason)
                    failed += 1
                    if failed >= GIVE_UP:
                        raise ValueError(f"{failed} attempts in a row have no verdict; the last: {outcome.reason}")
                else:
                    failed = 0
                    self.ledgers[task.name][self._key(task, item, index)] = dataclasses.asdict(outcome)
                progress.tick()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(mine))):
                    group.create_task(worker())
        except ExceptionGroup as group:
            raise group.exceptions[0] from group

    def read(self, invalid: Iterable[dict[tuple[str, str], Outcome]] = ()) -> dict[str, list[Outcome]]:
        """Task -> outcomes of all ranks in the order of the items. invalid: `self.invalid` of every rank."""
        lost = {key: outcome for its in invalid for key, outcome in its.items()}
        found: dict[str, list[Outcome]] = {}
        for task in self.tasks:
            ledger, rows = self.ledgers[task.name], found.setdefault(task.name, [])
            ledger.read()
            for item in self.items[task.name]:
                for index in range(task.samples):
                    key = self._key(task, item, index)
                    if key in ledger:
                        rows.append(Outcome(**ledger[key]))
                    else:
                        rows.append(lost.get((task.name, key)) or Outcome(item.id, index, None, "invalid", reason="not asked"))
        return found

    @property
    def invalid(self) -> dict[tuple[str, str], Outcome]:
        return self._invalid

    def write(self, outcomes: dict[str, list[Outcome]]) -> None:
        """The files that people and reports read."""
        for name, rows in outcomes.items():
            lines = (json.dumps(dataclasses.asdict(row), ensure_ascii=False) for row in rows)
            text = "".join(f"{line}\n" for line in lines)
            write_atomic(self.folder / f"{name}.jsonl", text.encode("utf-8", "replace"))  # calls may hold half a surrogate pair

    def close(self) -> None:
        for ledger in self.ledgers.values():
            ledger.close()


def digest_of(item: Item) -> str:
    """An item whose content has changed under the same id is another one."""
    content = json.dumps([item.prompt, item.gold, item.tools], sort_keys=True, default=str)
    return hashlib.blake2b(content.encode(), digest_size=6).hexdigest()


async def attempt(task: Task, item: Item, asker: Asker, index: int) -> Outcome:
    """The task's attempt, whatever happens: trouble outside the model is invalid, a prompt that can never fit has 0 points.

    Errors of our own pass through: a wrong score is worse than no evaluation.
    """
    began = time.perf_counter()
    try:
        outcome = await task.attempt(item, asker, index)
    except TooLong as error:
        outcome = Outcome(item.id, index, 0.0, "too_long", reason=str(error))
    except OSError as error:  # of the model, a judge, a sandbox or a search, after all their retries
        outcome = Outcome(item.id, index, None, "invalid", reason=f"{type(error).__name__}: {error}")
    if outcome.score is None:
        outcome.status = "invalid"
    outcome.seconds = time.perf_counter() - began
    return outcome


# ------------------------------------------------------------------ what they say
def measure(task: Task, outcomes: list[Outcome], excluded: set[str], prices: tuple[float, float]) -> dict[str, float]:
    """The task's metrics, its headline first; counts, lengths and rates that all tasks have; clean_* without what was seen.

    excluded: ids of items that training has seen. prices: per million tokens in and out.
    """
    told = task.summarise(outcomes)
    ordered = {task.headline: told[task.headline]} if task.headline in told else {}
    ordered |= {name: value for name, value in told.items() if name != task.headline}
    if seen := excluded & {outcome.item for outcome in outcomes}:
        clean = [outcome for outcome in outcomes if outcome.item not in seen]
        ordered |= {f"clean_{name}": value for name, value in (task.summarise(clean) if clean else {}).items()}
        ordered["excluded"] = len(seen)
    valid = [outcome for outcome in outcomes if outcome.status != "invalid"]
    tokens = [sum(getattr(outcome, name) for outcome in outcomes) for name in ("tokens_in", "tokens_out")]
    ordered |= {
        "items": len({outcome.item for outcome in outcomes}), "attempts": len(outcomes),
        "invalid": len(outcomes) - len(valid), "tokens_in": tokens[0], "tokens_out": tokens[1],
        "cost": sum(count * price for count, price in zip(tokens, prices)) / 1e6,
    }  # fmt: skip
    if valid:
        ordered |= {
            "truncated": _share(valid, lambda one: one.status == "length"),
            "too_long": _share(valid, lambda one: one.status == "too_long"),
            "repetition": _share(valid, lambda one: one.parts.get("repetition", 0)),
            "length_mean": tokens[1] / len(valid), "seconds_mean": sum(one.seconds for one in valid) / len(valid),
        }  # fmt: skip
    return ordered


def _share(outcomes: list[Outcome], of: Any) -> float:
    return sum(float(of(outcome)) for outcome in outcomes) / len(outcomes)


def read_excluded(path: str | None, items: dict[str, list[Item]]) -> dict[str, set[str]]:
    """Task -> ids of items that training has seen. path: a file {"task": [ids]} such as tools/overlap.py writes, or the folder
    of a run or a cascade, all of whose training rows are then searched for the items.
    """
    if path is None:
        return {}
    file = Path(path).expanduser()
    if file.is_dir():
        stages = stages_in(file)
        if not stages:
            log.warning("exclude=%s: no run there says what it was trained on, so nothing is excluded", path)
            return {}
        if not files_of(stages)[0]:
            log.warning("exclude=%s: none of the training rows that its runs name is there, so nothing is excluded", path)
            return {}
        for text in find_overlaps(file, stages, items)["missing"]:
            log.warning("exclude=%s: not looked through, so what it held counts as not seen: %s", path, text)
        file = file / "overlap.json"
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"exclude={path!r} cannot be read ({error}): it is a JSON file of {{task: [ids]}}") from error
    if not isinstance(found, dict) or not all(isinstance(ids, list) for ids in found.values()):
        raise ValueError(f"exclude={path!r} must hold an object {{task: [ids]}}")
    if found and not set(found) & set(items):
        raise ValueError(f"exclude={path!r} names the tasks {', '.join(found)}; none of them is evaluated: {', '.join(items)}")
    return {name: {str(one) for one in ids} for name, ids in found.items()}


def table(results: dict[str, dict[str, float]], tasks: list[Task]) -> str:
    """Markdown: a line for each task, its headline with bounds, beside it what tells whether to believe it."""
    lines = ["| task | metric | value | 95 % | without seen | items x samples | cut off | repeats | invalid | tokens out |",
             "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for task in tasks:
        told, name = results[task.name], task.headline
        bounds = f"{told[f'{name}_low']:.3f} .. {told[f'{name}_high']:.3f}" if f"{name}_low" in told else ""
        clean = f"{told[f'clean_{name}']:.3f} ({told['excluded']:.0f} left out)" if f"clean_{name}" in told else ""
        rates = [f"{100 * told[rate]:.1f} %" if rate in told else "" for rate in ("truncated", "repetition")]
        value = f"{told[name]:.3f}" if name in told else "none"
        cells = [task.name, name, value, bounds, clean, f"{told['items']:.0f} x {task.samples}", *rates,
                 f"{told['invalid']:.0f}", f"{told['tokens_out']:,.0f}"]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
