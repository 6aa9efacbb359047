"""A sweep: the points of a --multirun, gathered and then run one after the other, or as an array of jobs.

Points lie in runs_dir/SWEEP/POINT, where SWEEP is `name` or follows from the words, and POINT is made of the words that differ.
A point that is done is not run again; one that fails does not stop the others, and the same command runs it alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_nb import slurm
from megatron_nb.config import AFTER_SWEEP, ConfigError, sweep_point, to_yaml
from megatron_nb.run import run_folder, write_atomic
from megatron_nb.slurm import STAGE, Job

SWEEP_FILE = "sweep.json"


@dataclass
class Point:
    """One configuration of a sweep with the words that it came from."""

    config: Any
    module: str
    words: list[str]


_points: list[Point] = []


def gathered(config: Any, module: str) -> bool:
    """Whether this is a point of a sweep: it is kept, and runs when all are known."""
    words = sweep_point()
    if words is None:
        return False
    if not _points:
        AFTER_SWEEP.append(run_all)
    _points.append(Point(config, module, words))
    return True


def differing(points: list[list[str]]) -> list[list[str]]:
    """The words of each point that not every point has; all of them, when there is only one point."""
    shared = set(points[0]).intersection(*points[1:]) if len(points) > 1 else set()
    return [[word for word in words if word not in shared] for words in points]


def name_of(words: list[str]) -> str:
    """A folder's name: the last part of each key and of its value."""
    split = (word.partition("=") for word in words)
    parts = [f"{key.rpartition('.')[2]}={value.rpartition('/')[2]}" for key, _, value in split]
    return re.sub(r"[^\w.+=-]+", "_", "-".join(parts)) or "point"


def run_all() -> None:
    """Run or submit what was gathered. SystemExit 1 when a point failed here."""
    points, _points[:] = list(_points), []
    first, swept = points[0].config, differing([point.words for point in points])
    digest = hashlib.blake2b(json.dumps([point.words for point in points]).encode(), digest_size=4).hexdigest()
    root = run_folder(first.runs_dir, first.name or f"sweep-{digest}")
    runs: dict[str, str] = {}
    for point, words in zip(points, swept):
        folder = root / name_of(words)
        if str(folder) in runs:  # values that differ in what a name leaves out
            folder = root / f"{folder.name}-{hashlib.blake2b(' '.join(words).encode(), digest_size=3).hexdigest()}"
        launch = replace(point.config.launch, kind="local", dry_run=False)
        runs[str(folder)] = to_yaml(replace(point.config, name=folder.name, runs_dir=str(root), launch=launch))
    if first.launch.dry_run:
        todo = job_of(root, points, runs)
        print("\n".join(f"{Path(run).name:<40} {' '.join(words)}" for run, words in zip(runs, swept)))
        print(f"\n{todo.text()}" if first.launch.kind == "slurm" else f"\n{len(runs)} runs, one after the other")
        return
    root.mkdir(parents=True, exist_ok=True)
    told = [{"name": Path(run).name, "words": words} for run, words in zip(runs, swept)]
    write_atomic(root / SWEEP_FILE, json.dumps(told, indent=1))
    on_slurm = first.launch.kind == "slurm"
    left = {
        run: config_yaml for run, config_yaml in runs.items()
        if not (Path(run) / "summary.json").exists() and not (on_slurm and slurm.here() and slurm.running(Path(run)))
    }  # fmt: skip
    print(f"{len(runs)} points, {len(runs) - len(left)} of them done or on their way: {root}")
    if not left:
        return
    if on_slurm:
        job_id = job_of(root, points, left).submit()
        print(f"job {job_id}\nsee it: python tools/sweep.py {root}")
    elif failed := run_here(left, points[0].module):
        print(f"error: {len(failed)} of {len(left)} points failed: {', '.join(failed)}: tools/sweep.py {root}", file=sys.stderr)
        sys.exit(1)


def job_of(root: Path, points: list[Point], runs: dict[str, str]) -> Job:
    """The array. ConfigError when the points' services need different nodes."""
    launch = points[0].config.launch
    needs = {tuple((name, one.nodes, one.per_node) for name, one in p.config.launch.services.items()) for p in points}
    if len(needs) > 1:
        raise ConfigError(f"launch.services differs between points ({needs}): an array gives all of them the same nodes")
    return Job(root.name, points[0].module, root, launch.slurm, "", runs, launch.at_once, launch.services)


def run_here(left: dict[str, str], module: str) -> list[str]:
    """Each in a process of its own, one after the other; the names of those that failed."""
    failed = []
    for run, config_yaml in left.items():
        folder = Path(run) / "slurm"
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / f"{STAGE}.yaml", config_yaml)
        done = subprocess.run([sys.executable, "-m", module, "--config-dir", str(folder), "--config-name", STAGE])
        if done.returncode:
            failed.append(Path(run).name)
    return failed
