"""What became of a run, or of every stage of a chain: job, steps, rate, time left, last loss and reward, and why it failed.

python tools/status.py runs/NAME [--log-lines 12] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from megatron_nb import slurm

RECENT = 20  # steps that the rate is taken over
SHOWN = ("loss", "reward_mean", "heldout_loss", "heldout_reward")  # last values worth a column
DEAD = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE")


@dataclass
class Status:
    """One run folder. `state`: done | running | waiting | stopped | not started, or what Slurm calls a job that died."""

    name: str
    state: str
    job: str | None = None
    step: int = 0
    num_steps: int | None = None
    attempts: int = 0
    step_s: float | None = None  # median of the last steps
    left_s: float | None = None
    last: dict[str, float] | None = None
    reason: str = ""  # of a run that died: the last lines of its log


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl; a torn last line is left out."""
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def job_of(folder: Path) -> str | None:
    try:
        return json.loads((folder / "slurm" / "job.json").read_text())["id"]
    except (OSError, ValueError, KeyError):
        return None


def status_of(folder: Path, name: str, log_lines: int) -> Status:
    """The state of one run folder."""
    job, rows = job_of(folder), rows_of(folder)
    attempts = len(list(folder.glob("logs/attempt-*")))
    told = Status(name, "not started", job, attempts=attempts)
    if rows:
        told.step = max(row["step"] for row in rows)
        seconds = [row["seconds"] for row in rows if "seconds" in row][-RECENT:]
        told.step_s = statistics.median(seconds) if seconds else None
        told.last = {key: row[key] for row in rows for key in SHOWN if row.get(key) is not None}
    if (folder / "config.yaml").exists():
        told.num_steps = yaml.safe_load((folder / "config.yaml").read_text()).get("num_steps")
    if (folder / "summary.json").exists():
        told.state = "done"
        return told
    state = slurm.state(job) if job and slurm.here() else None
    if state in slurm.WAITS:
        told.state = "running" if state in ("RUNNING", "COMPLETING") else f"waiting ({state.lower()})"
    elif (folder / "lock").exists() and state is None:
        told.state = "running"
    elif state in DEAD or attempts:
        told.state = (state or "stopped").lower().replace("_", " ")
        told.reason = last_lines(folder, log_lines)
    if told.state == "running" and told.step_s and told.num_steps:
        told.left_s = told.step_s * (told.num_steps - told.step)
    return told


def last_lines(folder: Path, count: int) -> str:
    """The end of the newest log: the job's own, which holds all ranks' consoles, or else rank 0's."""
    logs = [*folder.glob("slurm/*.log"), *folder.glob("logs/attempt-*/rank-0.log")]
    if not logs:
        return ""
    newest = max(logs, key=lambda path: path.stat().st_mtime)
    return "\n".join([f"{newest}:", *newest.read_text(errors="replace").splitlines()[-count:]])


def stages_of(folder: Path) -> list[Path]:
    """The run folders below a chain's, in the order of the chain; the folder itself when it is a run."""
    order = folder / "chain.json"
    if order.exists():
        return [folder / name for name in json.loads(order.read_text())["stages"]]
    return [folder]


def print_table(told: list[Status]) -> None:
    """One line a stage, and why what died did."""
    table = Table("stage", "state", "job", "step", "attempts", "s/step", "left", "last")
    for one in told:
        steps = f"{one.step}/{one.num_steps}" if one.num_steps else str(one.step or "")
        left = str(timedelta(seconds=round(one.left_s))) if one.left_s is not None else ""
        rate = f"{one.step_s:.3g}" if one.step_s else ""
        last = "  ".join(f"{key} {value:.4g}" for key, value in (one.last or {}).items())
        table.add_row(one.name, one.state, one.job or "", steps, str(one.attempts or ""), rate, left, last)
    console = Console()
    console.print(table)
    for one in told:
        if one.reason:
            console.print(f"\n{one.name} is {one.state}. {one.reason}", markup=False, highlight=False)


def main() -> None:
    """Command line. Exit code 1 when a stage died."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder, or a chain's")
    parser.add_argument("--log-lines", type=int, default=12, help="of the log of a stage that died (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print a list of objects instead")
    args = parser.parse_args()
    if not args.run.is_dir():
        sys.exit(f"error: {args.run} is no folder: give the folder of a run or of a chain, such as runs/NAME")
    told = [status_of(folder, folder.name, args.log_lines) for folder in stages_of(args.run)]
    if args.json:
        print(json.dumps([asdict(one) for one in told], indent=2))
    else:
        print_table(told)
    sys.exit(int(any(one.reason for one in told)))


if __name__ == "__main__":
    main()
