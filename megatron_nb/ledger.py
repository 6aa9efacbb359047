"""What a chain of stages has come to: each stage's numbers, whether its gate let the chain go on, its evaluation.

    python -m megatron_nb.ledger RECIPE_FOLDER [STAGE]        write ledger.json; exit code 86 when the gate of STAGE is shut

Everything is read anew from the stages' run folders, so that any process may write it at any time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_nb.give_up import give_up
from megatron_nb.run import STALE_S, write_atomic

log = logging.getLogger(__name__)
CHAIN_FILE, LEDGER_FILE, RESULTS_FILE = "chain.json", "ledger.json", "results.json"
GATE_EXIT = 86  # a stage has done its work, and the chain must not go on


class GateShut(ValueError):
    """A stage is done, and is not good enough for the next."""


@dataclass
class Gate:
    """A bound on a number of the stage's summary.json; the chain goes on when it holds."""

    metric: str = ""  # such as heldout_loss_after
    minus: str | None = None  # another one, taken off first: {metric: reward_after, minus: reward_before, at_least: 0.05}
    at_least: float | None = None
    at_most: float | None = None
    remedy: str | None = None  # where it does not hold; null: make the stage anew with better settings, or move the bound

    def __post_init__(self):
        if not self.metric:
            raise ValueError("gate.metric is not set: name a number of the stage's summary.json")
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"gate of {self.metric}: at_least={self.at_least}, at_most={self.at_most}: give one of the two")

    @property
    def told(self) -> str:
        bound = f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"
        return f"{self.metric}{f' - {self.minus}' if self.minus else ''} {bound}"

    def value(self, summary: dict[str, float]) -> float | None:
        """The number that is bounded; None when the summary lacks it, or has something else there."""
        wanted = [self.metric, *([self.minus] if self.minus else [])]
        if not _number(*(summary.get(name) for name in wanted)):
            return None
        return summary[self.metric] - (summary[self.minus] if self.minus else 0.0)

    def passed(self, summary: dict[str, float]) -> bool:
        value = self.value(summary)
        if value is None:
            return False
        return value >= self.at_least if self.at_least is not None else value <= self.at_most


@dataclass
class LedgerConfig:
    """Evaluations that the chain makes of the checkpoints on its way, by the same tasks each time."""

    stage: str = "evaluate"  # their stage file
    words: list[str] = field(default_factory=list)  # their command line, with their tasks; none: no evaluations
    of: list[str] | None = None  # stages; null: every one that trains a policy (sft, rl)
    base: str | None = None  # a model folder that is evaluated before all stages
    headline: list[str] = field(default_factory=list)  # of the tasks that `words` name, those on which no stage may train

    def __post_init__(self):
        if self.headline and not self.words:
            raise ValueError(f"ledger.headline={self.headline}: ledger.words is empty, so there are no tasks: name them there")


@dataclass
class Known:
    """What chain.json says of a link of the chain."""

    name: str
    stage: str  # its stage file
    start_from: str | None = None
    gate: Gate | None = None
    evaluates: str | None = None  # the stage whose checkpoint this link evaluates; "" for the model before all


def write_chain(root: Path, links: list[Known]) -> None:
    """Write chain.json: the chain in its order."""
    told = [{**vars(link), "gate": vars(link.gate) if link.gate else None} for link in links]
    root.mkdir(parents=True, exist_ok=True)
    write_atomic(root / CHAIN_FILE, json.dumps({"stages": [link.name for link in links], "links": told}, indent=1) + "\n")


def read_chain(root: Path) -> list[Known]:
    """ValueError when there is no chain in the folder."""
    try:
        told = json.loads((root / CHAIN_FILE).read_text())["links"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{root} is the folder of no chain: {CHAIN_FILE} cannot be read ({error})") from error
    return [Known(**{**link, "gate": Gate(**link["gate"]) if link["gate"] else None}) for link in told]


def read_json(path: Path) -> Any:
    """None where there is no such file, or only a part of one."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def summary_of(run: Path) -> dict[str, float] | None:
    """What a stage that is done has come to. None before, and where only a part of its summary.json is there: not done.

    OSError when there is one that cannot be read: nobody shall take its stage for one that is not done.
    """
    try:
        found = json.loads((run / "summary.json").read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def gate_row(gate: Gate | None, summary: dict[str, float] | None) -> dict[str, Any] | None:
    """The gate as the ledger has it; value and passed are null before the stage is done."""
    if gate is None:
        return None
    value, passed = (gate.value(summary), gate.passed(summary)) if summary is not None else (None, None)
    found = "" if summary is None else f", found {value:.6g}" if value is not None else ", which its summary.json lacks"
    return {**vars(gate), "value": value, "passed": passed, "told": gate.told + found}


def check_gate(root: Path, name: str, gate: Gate | None) -> None:
    """GateShut when the stage is done and its gate does not hold."""
    row = gate_row(gate, summary_of(root / name))
    if row is not None and row["passed"] is False:
        anew = f"run it anew with from_stage={name} and better settings, or change stages.{name}.gate"
        raise GateShut(
            f"{name} is done, but the chain must not go on: its gate is {row['told']}. See {root / name}; then "
            f"{gate.remedy or anew} and give the same command again"
        )


def seconds_of(run: Path) -> float | None:
    """Time that all attempts of a run took; None before the first."""
    begun = [path / "config.yaml" for path in sorted(run.glob("logs/attempt-*"))]
    total = 0.0
    for config in (path for path in begun if path.exists()):
        last = max(path.stat().st_mtime for path in config.parent.iterdir())
        total += last - config.stat().st_mtime
    return round(total, 1) if begun else None


def state_of(run: Path) -> str:
    """done | running | stopped | not started, by what lies in the run folder."""
    if summary_of(run) is not None:
        return "done"
    with contextlib.suppress(OSError):
        if time.time() - (run / "lock").stat().st_mtime < STALE_S:
            return "running"
    return "stopped" if any(run.glob("logs/attempt-*")) else "not started"


def rows_of(root: Path) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """(a row for every stage in order, the evaluation of the model before all)."""
    chain = read_chain(root)
    evaluations = {link.evaluates: read_json(root / link.name / RESULTS_FILE) for link in chain if link.evaluates is not None}
    rows, before = [], {}
    for link in chain:
        if link.evaluates is not None:
            continue
        run = root / link.name
        summary = summary_of(run)
        gate = gate_row(link.gate, summary)
        state = "gate shut" if gate and gate["passed"] is False else state_of(run)
        evaluation = evaluations.get(link.name)
        start = before.get(link.start_from, evaluations.get(""))  # of the model that the stage started from
        before[link.name] = evaluation or start
        rows.append({
            "name": link.name, "stage": link.stage, "start_from": link.start_from, "state": state, "seconds": seconds_of(run),
            "metrics": summary or {}, "gate": gate, "evaluation": evaluation, "changed": changes(start, evaluation),
        })  # fmt: skip
    return rows, evaluations.get("")


def changes(before: dict | None, after: dict | None) -> dict[str, dict[str, float]] | None:
    """{task: {metric: after - before}} of what both have."""
    if not before or not after:
        return None
    return {
        task: {name: value - before[task][name] for name, value in metrics.items() if _number(before[task].get(name), value)}
        for task, metrics in after.items() if task in before
    }  # fmt: skip


def _number(*values: Any) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def write_ledger(root: Path) -> list[dict[str, Any]]:
    """Write ledger.json from what lies in the run folders; its rows."""
    rows, base = rows_of(root)
    write_atomic(root / LEDGER_FILE, json.dumps({"stages": rows, "base_evaluation": base}, indent=1) + "\n")
    return rows


def main() -> None:
    """Command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    root, name = Path(sys.argv[1]), (sys.argv[2:] or [None])[0]
    try:
        write_ledger(root)
        gates = {link.name: link.gate for link in read_chain(root)}
        if name is not None and name not in gates:
            raise ValueError(f"{root} has no stage {name!r}; it has {', '.join(gates)}")
        if name is not None and summary_of(root / name) is None:
            raise ValueError(f"{root / name} ended without its summary.json: the stage is not done")
        check_gate(root, name, gates[name]) if name else None
    except GateShut as shut:
        give_up(str(shut))  # a job of Slurm is not tried again
        print(f"error: {shut}", file=sys.stderr)
        sys.exit(GATE_EXIT)
    except (ValueError, OSError) as error:  # a full disk too
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
