"""Tables over the stages of a cascade: what each changed, what evaluations said of it, what training met of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nb.training.metrics import duration
from tools.report_charts import short
from tools.report_read import RunRead, read_json

# what a stage is known by, the first that it has; an error beside it makes a verdict
KNOWN_BY = ("heldout_win_rate", "heldout_judge", "heldout_reward", "heldout_accuracy", "heldout_loss", "reward", "loss")
LOWER = ("loss", "truncat", "repet", "invalid", "error", "flip", "ece", "unparsed", "failed")  # better when lower
NEUTRAL = ("token", "second", "length", "items", "samples", "cost", "count", "excluded", "calls", "turns", "kl", "bias")


@dataclass
class Cell:
    """A number of a table, and how it compares with the one before: better, worse, or "" within the errors."""

    text: str
    verdict: str = ""
    note: str = ""


def direction(name: str) -> int:
    """1: higher is better; -1: lower; 0: neither."""
    return 0 if any(word in name for word in NEUTRAL) else -1 if any(word in name for word in LOWER) else 1


def verdict(name: str, change: float, error: float) -> str:
    """better or worse where the change exceeds the error."""
    by = change * direction(name)
    return "" if not by or abs(change) <= error else "better" if by > 0 else "worse"


def headline(run: RunRead) -> Cell | None:
    """The quantity a stage is known by, before and after, with a verdict at two standard errors where there are errors."""
    pairs = run.before_after
    name = next((name for name in KNOWN_BY if name in pairs), None)
    if name is None:
        return None
    before, after = pairs[name]
    errors = pairs.get(f"{name}_error")
    told = f"{name.replace('_', ' ')} {short(before)} \u2192 {short(after)}"
    if errors is None:
        return Cell(told)
    error = math.hypot(*errors)
    return Cell(f"{told} \u00b1 {short(error)}", verdict(name, after - before, 2 * error))


def gate_cell(run: RunRead) -> Cell:
    """Of the ledger's gate: the metric, its bound, its value."""
    gate = run.ledger.get("gate")
    if not gate:
        return Cell("")
    bound = f"\u2265 {short(gate['at_least'])}" if gate.get("at_least") is not None else f"\u2264 {short(gate.get('at_most'))}"
    said = {True: "passed", False: "NOT PASSED", None: "not asked yet"}[gate.get("passed")]
    text = f"{gate['metric']} {short(gate.get('value'))} {bound}: {said}"
    return Cell(text, {True: "better", False: "worse", None: ""}[gate.get("passed")])


def ledger_rows(runs: list[RunRead]) -> list[dict[str, Any]]:
    """One row a stage."""
    rows = []
    for run in runs:
        seconds = run.ledger.get("seconds") or run.summary.get("wall_s")
        rows.append({
            "name": run.name, "stage": run.ledger.get("stage", ""), "state": run.ledger.get("state") or run.status.state,
            "took": duration(seconds) if seconds else "", "steps": steps_of(run), "tokens": short(run.summary.get("tokens")),
            "headline": headline(run), "gate": gate_cell(run),
        })  # fmt: skip
    return rows


def steps_of(run: RunRead) -> str:
    status = run.status
    if not status.step:
        return ""
    return f"{status.step}/{status.num_steps}" if status.num_steps and status.step != status.num_steps else str(status.step)


@dataclass
class Evaluations:
    """Tasks by stage. rows: (task, metric, cell for each stage); main: those with confidence bounds."""

    stages: list[str]
    main: list[tuple[str, str, list[Cell]]]
    rest: list[tuple[str, str, list[Cell]]]
    fell: list[str]  # sentences: what a stage made worse


def evaluations(runs: list[RunRead]) -> Evaluations | None:
    """What the ledger's evaluations, or the runs' own results, say; None where there is none."""
    columns = {run.name: run.ledger.get("evaluation") or run.results for run in runs}
    columns = {name: results for name, results in columns.items() if results}
    if not columns:
        return None
    told = Evaluations(list(columns), [], [], [])
    for task in dict.fromkeys(task for results in columns.values() for task in results):
        scores = [results.get(task, {}) for results in columns.values()]
        for metric in dict.fromkeys(name for one in scores for name in one):
            if metric.endswith(("_low", "_high")):
                continue
            bounded = any(f"{metric}_low" in one for one in scores)
            cells, fell = metric_cells(metric, scores)
            (told.main if bounded else told.rest).append((task, metric, cells))
            told.fell += [f"{task}: {metric} fell from {was} to {now} after {told.stages[place]}" for place, was, now in fell]
    return told


def metric_cells(metric: str, scores: list[dict[str, float]]) -> tuple[list[Cell], list[tuple[int, str, str]]]:
    """(cells, places that are worse than the stage before): a verdict only where the intervals do not overlap."""
    cells, fell, last = [], [], None
    for place, one in enumerate(scores):
        value = one.get(metric)
        if value is None:
            cells.append(Cell("-"))
            continue
        bounds = (one.get(f"{metric}_low"), one.get(f"{metric}_high"))
        known = None not in bounds
        cell = Cell(short(value), note=f"{short(bounds[0])} to {short(bounds[1])}" if known else "")
        if known and last and None not in last[1]:
            apart = bounds[0] > last[1][1] or bounds[1] < last[1][0]
            cell.verdict = verdict(metric, value - last[0], 0.0) if apart else ""
            if cell.verdict == "worse":
                fell.append((place, short(last[0]), short(value)))
        cells.append(cell)
        last = (value, bounds)
    return cells, fell


def overlaps(folder: Path) -> dict[str, Any] | None:
    """What tools/overlap.py wrote: tasks with their counts, and pairs; None before it ran."""
    report = read_json(folder / "overlap_report.json")
    if report is None and (excluded := read_json(folder / "overlap.json")) is not None:
        report = {"tasks": {task: {"excluded": len(items)} for task, items in excluded.items()}, "pairs": []}
    return report
