"""What no further try could change: the run's script is told not to start the job again, and whoever looks at it why."""

from __future__ import annotations

import json
import os
from pathlib import Path

STOPPED = "NB_STOPPED"  # names the file, as slurm/job.sbatch.jinja exports it; other starts have no need of one


class GivesUp(RuntimeError):
    """The job would fail in the same way again. A user reads it in one line and its notes, without a traceback."""


def give_up(reason: str) -> None:
    """Leave the reason where the job's script and tools/status.py look; the first rank to speak is kept."""
    if path := os.environ.get(STOPPED):
        try:
            with Path(path).open("x") as file:
                file.write(reason.rstrip() + "\n")
        except OSError:  # another rank was first, or the disk is full: the console has it too
            pass


def last_steps(metrics: Path, count: int = 10) -> str:
    """A line for each of the last steps in a metrics.jsonl: what led up to the end."""
    shown, told = ("step", "loss", "lr", "grad_norm", "skipped"), []
    for line in metrics.read_text().splitlines()[-count:] if metrics.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:  # torn by a full disk
            continue
        told.append("  ".join(f"{key} {row[key]:.4g}" for key in shown if row.get(key) is not None))
    return "\n".join(told)
