"""Whether rows hold items of headline tasks: what a chain asks before a stage trains on them.

python -m megatron_nb.headline tasks=recipe data_dir=FOLDER 'only=[TASK]' 'rows=[FILE]' [overrides]

Exit code 86, as of a shut gate, when an item is met.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from typing import Any

from megatron_nb.config import job
from megatron_nb.data.rows import data_files
from megatron_nb.evals.kinds import make_task
from megatron_nb.evals.overlap import find_overlaps
from megatron_nb.evals.task import Item
from megatron_nb.give_up import give_up
from megatron_nb.launch import LaunchConfig, elsewhere, open_run
from megatron_nb.ledger import GATE_EXIT, GateShut
from megatron_nb.rollout.engine import Sampling
from megatron_nb.run import Run

SHOWN = 5  # rows of a task that the reason names

log = logging.getLogger(__name__)


@dataclass
class HeadlineConfig:
    """One search."""

    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)  # as of evaluate
    only: list[str] | None = None  # of the tasks, those whose items must not be met; null: all
    data_dir: str = "."  # where the files of tasks=recipe lie
    rows: list[str] = field(default_factory=list)  # what a stage is to train on: files, folders, globs
    name: str | None = None  # run folder runs_dir/name; null: derived from the configuration
    runs_dir: str = "runs"
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self):
        if unknown := [name for name in self.only or () if name not in self.tasks]:
            known = ", ".join(self.tasks) or "none"
            raise ValueError(f"only={self.only}: there is no task {', '.join(unknown)}; there are {known}")


def headline_items(config: HeadlineConfig) -> dict[str, list[Item]]:
    """{task: its items}, all of them, however few an evaluation draws. ConfigError and ValueError."""
    wanted = config.only if config.only is not None else list(config.tasks)
    if not wanted:
        raise ValueError("no task is named: choose tasks=recipe, or give one: tasks.NAME.kind=math tasks.NAME.path=FILE")
    unused = Sampling(max_tokens=1)  # nothing is asked
    return {name: make_task(name, {**config.tasks[name], "limit": None}, unused).items() for name in wanted}


def search(run: Run, config: HeadlineConfig, items: dict[str, list[Item]]) -> None:
    """Look through the rows; the report and the summary. GateShut when an item is met, ValueError when rows are not there."""
    for path in config.rows:
        data_files(path)  # find_overlaps would pass by what is not there
    report = find_overlaps(run.folder, {run.folder.name: {path: path for path in config.rows}}, items)
    for text in report["bad_rows"]:
        log.warning("not looked through: %s", text)
    met = {name: told["excluded"] for name, told in report["tasks"].items()}
    looked = sum(sum(sources.values()) for sources in report["stages"].values())
    run.write_summary(0, items_met=sum(met.values()), rows=looked, **{f"{name}_met": count for name, count in met.items()})
    if any(met.values()):
        found = [f"  {name}: {count} of {len(items[name])} items, in {rows_with(name, report)}\n"
                 for name, count in met.items() if count]  # fmt: skip
        raise GateShut(
            f"{run.folder.name}: rows that are to be trained on hold items of headline tasks:\n{''.join(found)}"
            f"Take these rows out and give the same command again; {run.folder / 'overlap_report.json'} shows them beside the "
            "items. A task that may be trained on must leave ledger.headline"
        )


def rows_with(task: str, report: dict[str, Any]) -> str:
    """The first rows that hold items of a task, by file and line."""
    where = list(dict.fromkeys(pair["where"] for pair in report["pairs"] if pair["task"] == task))
    return ", ".join(where[:SHOWN]) + (f" and {len(where) - SHOWN} more" if len(where) > SHOWN else "")


@job(HeadlineConfig, "headline")
def main(config: HeadlineConfig) -> None:
    """Search, or describe the search. SystemExit with the code of a shut gate when an item is met."""
    if not config.rows:
        raise ValueError("rows is empty: name the files that are to be trained on, rows=[FILE]")
    items = headline_items(config)
    counts = ", ".join(f"{name} ({len(its):,} items)" for name, its in items.items())
    report = f"looks for    {counts}\nin           {', '.join(config.rows)}"
    if elsewhere(config, "headline", "megatron_nb.headline", report):
        return
    try:
        with open_run(config, "headline") as run:
            log.info("%s\n%s", run.folder, report)
            search(run, config, items)
    except GateShut as shut:
        give_up(str(shut))  # a job of Slurm is not tried again
        print(f"error: {shut}", file=sys.stderr)
        sys.exit(GATE_EXIT)


if __name__ == "__main__":
    main()
