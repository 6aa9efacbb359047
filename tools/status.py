"""What became of a run, or of every stage of a chain: job, steps, rate, time left, last loss and reward; why it waits or died.

python tools/status.py runs/NAME [--log-lines 12] [--json]
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from megatron_nb import addresses, slurm
from megatron_nb.ledger import CHAIN_FILE, Gate, GateShut, check_gate, read_json
from megatron_nb.schema import ConfigError
from megatron_nb.training.checkpoint_folder import newest_complete

RECENT = 20  # steps that the rate is taken over
SHOWN = ("loss", "reward_mean", "heldout_loss", "heldout_reward")  # last values worth a column
# what torchrun's agents and torch's stores say of an end that another process brought about
NOISE = re.compile(r"(\d+: )?(\[?[WE]\d{4} |frame #|<omitting python|Exception raised from|\[rank\d+\]:\[W|\s*$)")
FULL_GB = 0.01  # with less left, a disk counts as full
TURN = ("", "None", "Priority", "BeginTime", "Resources", "Dependency", "JobArrayTaskLimit")  # reasons to wait that pass
WAITS_FOR = {  # a word of any other -> what to do
    "account": "set account in the site file, or another partition",
    "node": "`sinfo -R` says why a node is away; it goes on when the node is back, or leave the node out of the site's options",
    "limit": "ask for fewer nodes or less time, or wait for your other jobs",
}
DEAD = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE")


@dataclass
class Status:
    """One run folder. `state`: done | running | waiting | stopped | not started | not known, or what Slurm calls a dead job."""

    name: str
    state: str
    job: str | None = None
    step: int = 0
    num_steps: int | None = None
    attempts: int = 0
    step_s: float | None = None  # median of the last steps
    left_s: float | None = None
    last: dict[str, float] | None = None
    reason: str = ""  # of a run that waits or died: what Slurm says, what the job said, or the last lines of its log
    services: list[str] | None = None  # beside it: name, address, restarts


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
    state, unanswered = None, ""
    if job and slurm.here():
        try:
            state = slurm.state(job, patient=False)
        except ConfigError as error:
            unanswered = str(error)
    told.services = services_of(folder)
    if unanswered and not reason_left(folder, job).exists():
        told.state, told.reason = "not known", unanswered
    elif state in slurm.WAITS:
        told.state = "running" if state in ("RUNNING", "COMPLETING") else f"waiting ({state.lower()})"
        told.reason = why_it_waits(job) if state == "PENDING" else ""
    elif (folder / "lock").exists() and state is None:
        told.state = "running"
    elif state in DEAD or attempts:
        told.state = (state or "stopped").lower().replace("_", " ")
        told.reason = why_it_died(folder, job, state, log_lines)
    if told.state == "running" and told.step_s and told.num_steps:
        told.left_s = told.step_s * (told.num_steps - told.step)
    return told


def services_of(folder: Path) -> list[str]:
    """A line for each server beside the run."""
    told = addresses.records(folder / "services")
    return [
        f"{one['name']}-{one['replica']} is {one['state']}{', ' + one['said'] if one.get('said') else ''}: {one['url']} on "
        f"{one['node']}, started again {one['restarts']} times"
        for one in told
    ]


def why_it_waits(job: str) -> str:
    """What Slurm says of a job that does not run, with what to do; empty when it only waits for its turn."""
    done = subprocess.run(["squeue", "-h", "-j", job, "-o", "%r"], capture_output=True, text=True)
    said = (done.stdout.strip().splitlines() or [""])[0]
    if said in TURN:
        return ""
    remedy = next((remedy for word, remedy in WAITS_FOR.items() if word in said.lower()), None)
    return f"{said}: {remedy}" if remedy else said


def reason_left(folder: Path, job: str | None) -> Path:
    """Where a job that ends for good says why."""
    return folder / "slurm" / f"stopped-{job}.txt"


def why_it_died(folder: Path, job: str | None, state: str | None, log_lines: int) -> str:
    """The reason that the job itself left; else the end of its log, with what goes on from where."""
    told = reason_left(folder, job)
    if told.exists():
        return told.read_text().strip()
    newest = newest_complete(folder)
    lines = [last_lines(folder, log_lines)]
    if shutil.disk_usage(folder).free / 1e9 < FULL_GB:
        lines.append(f"the disk of {folder} is full: make room, then start the same command again")
    elif newest is not None:
        lines.append(f"the same command goes on from {newest.name}")
    elif state == "CANCELLED":
        lines.append("there is no checkpoint yet: the same command begins again")
    return "\n".join(filter(None, lines))


def last_lines(folder: Path, count: int) -> str:
    """The end of the newest log: the job's own, which holds all ranks' consoles, or else rank 0's."""
    logs = [path for path in [*folder.glob("slurm/*.log"), *folder.glob("logs/attempt-*/rank-0.log")] if path.stat().st_size]
    if not logs:
        return ""
    newest = max(logs, key=lambda path: path.stat().st_mtime)
    lines = [line for line in newest.read_text(errors="replace").splitlines() if "exitcode" in line or not NOISE.match(line)]
    return "\n".join([f"{newest}:", *lines[-count:]])


def stages_of(folder: Path) -> list[Path]:
    """The run folders below a chain's, in the order of the chain; the folder itself when it is a run."""
    order = folder / CHAIN_FILE
    if order.exists():
        return [folder / name for name in json.loads(order.read_text())["stages"]]
    return [folder]


def look_at_gates(told: list[Status], chain: Path) -> None:
    """Stages that are done, but not well enough for the next, are called so."""
    gates = {link["name"]: link["gate"] for link in (read_json(chain / CHAIN_FILE) or {}).get("links", [])}
    for one in told:
        try:
            check_gate(chain, one.name, Gate(**gates[one.name]) if gates.get(one.name) else None)
        except GateShut as shut:
            one.state, one.reason = "gate shut", str(shut)


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
            console.print(f"\n{one.name} is {one.state}: {one.reason}", markup=False, highlight=False)
        for line in one.services or []:
            console.print(f"{one.name}: {line}", markup=False, highlight=False)


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
    look_at_gates(told, args.run)
    if args.json:
        print(json.dumps([asdict(one) for one in told], indent=2))
    else:
        print_table(told)
    sys.exit(int(any(one.reason and not one.state.startswith("waiting") for one in told)))


if __name__ == "__main__":
    main()
