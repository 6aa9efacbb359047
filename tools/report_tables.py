"""Tables over the stages of a cascade: what each changed, what evaluations said of it, what training met of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_nb.training.metrics import duration
from tools.report_charts import short
from tools.report_read import RunRead, scores_of

BEFORE = "before"  # the column of the model that the chain began with
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
    value: float | None = None


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
    if errors is None or not any(errors):  # of a single prompt there is none
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
    what = gate["metric"] + (f" \u2212 {gate['minus']}" if gate.get("minus") else "")
    colour = {True: "better", False: "worse", None: ""}[gate.get("passed")]
    return Cell(f"{what} {short(gate.get('value'))} {bound}: {said}", colour)


def ledger_rows(runs: list[RunRead], found: Evaluations | None) -> list[dict[str, Any]]:
    """One row a stage; its state is the folder's, which is newer than the ledger's, but for a gate that is shut."""
    rows = []
    for run in runs:
        seconds = run.ledger.get("seconds") or run.summary.get("wall_s")
        shut = (run.ledger.get("gate") or {}).get("passed") is False
        rows.append({
            "name": run.name, "stage": run.ledger.get("stage", ""), "state": "gate shut" if shut else run.status.state,
            "took": duration(seconds) if seconds else "", "steps": steps_of(run),
            "tokens": short(run.summary["tokens"]) if "tokens" in run.summary else "",
            "headline": headline(run), "gate": gate_cell(run), "changes": found.changes.get(run.name, []) if found else [],
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
    changes: dict[str, list[Cell]]  # stage -> the change of each task's headline


def evaluations(runs: list[RunRead], base: dict[str, dict[str, float]] | None) -> Evaluations | None:
    """What the ledger's evaluations, or the runs' own results, say; None where there is none. base: of the model before all."""
    asked = {run.evaluates: run.results for run in runs if run.evaluates is not None}
    stages = [run for run in runs if run.evaluates is None]
    columns = {BEFORE: asked.get("") or base or {}}  # the folder's results are newer than the ledger's, or the same
    columns |= {run.name: asked.get(run.name) or run.ledger.get("evaluation") or run.results for run in stages}
    columns = {name: results for name, results in columns.items() if results}
    if not columns:
        return None
    names = list(columns)
    before = [names.index(one) if (one := ancestor(name, stages, names)) in columns else None for name in names]
    told = Evaluations(names, [], [], [], {})
    for task in dict.fromkeys(task for results in columns.values() for task in results):
        scores = [results.get(task, {}) for results in columns.values()]
        metrics = list(dict.fromkeys(name for one in scores for name in one))
        for metric in (name for name in metrics if not name.endswith(("_low", "_high"))):
            cells = metric_cells(metric, scores, before)
            (told.main if f"{metric}_low" in metrics else told.rest).append((task, metric, cells))
            told.fell += [
                f"{task}: {metric} fell from {cells[place].text} ({names[place]}) to {cell.text} by {name}"
                for name, place, cell in zip(names, before, cells)
                if cell.verdict == "worse" and not metric.startswith("clean_")
            ]
            if metric == metrics[0]:  # the headline
                for name, place, cell in zip(names, before, cells):
                    if place is not None and None not in (cell.value, cells[place].value):
                        by = f"{task} {cell.value - cells[place].value:+.3g}"
                        told.changes.setdefault(name, []).append(Cell(by, cell.verdict))
    return told


def ancestor(name: str, stages: list[RunRead], columns: list[str]) -> str | None:
    """The evaluated stage that this one goes back to: by its start, or the column before where no start is known."""
    starts = {run.name: run.start_from for run in stages}
    if not any(starts.values()):
        return columns[columns.index(name) - 1] if columns.index(name) else None
    start = starts.get(name)
    while start is not None and start not in columns:
        start = starts.get(start)
    return start if start is not None else BEFORE if name != BEFORE else None


def metric_cells(metric: str, scores: list[dict[str, float]], before: list[int | None]) -> list[Cell]:
    """A cell for each column; a verdict only where its interval does not overlap with that of the column it goes back to."""
    cells = []
    for one, place in zip(scores, before):
        value, bounds = one.get(metric), (one.get(f"{metric}_low"), one.get(f"{metric}_high"))
        note = f"{short(bounds[0])} to {short(bounds[1])}" if None not in bounds else ""
        cell = Cell(short(value), note=note, value=value)
        was = scores[place] if place is not None else {}
        low, high = was.get(f"{metric}_low"), was.get(f"{metric}_high")
        if None not in (*bounds, low, high) and (bounds[0] > high or bounds[1] < low):
            cell.verdict = verdict(metric, value - was[metric], 0.0)
        cells.append(cell)
    return cells


def flips(runs: list[RunRead], count: int) -> list[tuple[str, list[tuple[str, float, str]]]]:
    """Items whose score changed most from the first evaluation to the last: (what, [(stage, score, answer)])."""
    asked = [run for run in runs if run.results]
    if len(asked) < 2:
        return []
    sides = [(run.name if run.evaluates is None else run.evaluates or BEFORE, scores_of(run)) for run in (asked[0], asked[-1])]
    (first, then), (last, now) = sides
    by = sorted((now[key][0] - then[key][0], key) for key in then.keys() & now.keys() if now[key][0] != then[key][0])
    chosen = [key for change, key in by[::-1] if change > 0][:count] + [key for change, key in by if change < 0][:count]
    return [(" ".join(key), [(first, *then[key]), (last, *now[key])]) for key in chosen]
