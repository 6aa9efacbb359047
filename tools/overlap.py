"""Which evaluation items a run or a cascade has trained on, so that evaluations can leave them out.

    python tools/overlap.py runs/RECIPE tasks=recipe data_dir=FOLDER          tasks as `megatron_nb.evaluate` takes them
    python tools/overlap.py runs/RECIPE --tasks-of runs/EVALUATION            those of an evaluation that was made
    python tools/overlap.py runs/RECIPE --training extra=DATA.jsonl --headline humaneval tasks=recipe data_dir=FOLDER

Writes RUN/overlap.json, for `exclude=RUN/overlap.json` of an evaluation, and RUN/overlap_report.json, which names each pair by
file and line. Every stage that has begun is looked through, by the sources of its config.yaml; --training adds files by hand,
for stages to come. Stopped, it goes on where it was. Exit code 1: an item of a --headline task was met; take those rows out.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_nb.config import ConfigError, compose
from megatron_nb.evals.overlap import find_overlaps, stages_in
from megatron_nb.evals.task import Item
from megatron_nb.evaluate import EvaluateConfig, build_tasks


def items_of(words: list[str], tasks_of: Path | None) -> dict[str, list[Item]]:
    """{task: items} of words for `evaluate`, or of the configuration of an evaluation. ConfigError and ValueError."""
    if tasks_of is None:
        config = compose(EvaluateConfig, "evaluate", words)
    else:
        path = tasks_of / "config.yaml"
        if words or not path.exists():
            raise ValueError(f"--tasks-of {tasks_of}: {'give either it or words for evaluate' if words else f'no {path}'}")
        saved: dict[str, Any] = yaml.safe_load(path.read_text())
        config = EvaluateConfig(tasks=saved["tasks"], only=saved.get("only"), seed=saved.get("seed", 0))
    return {task.name: task.items() for task in build_tasks(config)}


def table(report: dict[str, Any]) -> Table:
    """A line a task."""
    found = Table("task", "items", "met in training", "by stage", title="evaluation items met in training")
    for task, one in report["tasks"].items():
        stages = ", ".join(f"{stage} {count}" for stage, count in one["stages"].items())
        found.add_row(task, f"{one['items']:,}", f"{one['excluded']:,}", stages)
    rows = {stage: sum(sources.values()) for stage, sources in report["stages"].items()}
    found.caption = "rows: " + ", ".join(f"{stage} {count:,}" for stage, count in rows.items())
    return found


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run or of a cascade")
    parser.add_argument("words", nargs="*", help="of `python -m megatron_nb.evaluate` that choose the tasks")
    parser.add_argument("--tasks-of", type=Path, metavar="RUN", help="an evaluation's run, in the place of words")
    parser.add_argument("--training", action="append", default=[], metavar="NAME=PATH", help="more rows; repeatable")
    parser.add_argument("--headline", action="append", default=[], metavar="TASK", help="must not be met; repeatable")
    parser.add_argument("--n", type=int, default=13, help="words in a row that make an overlap (%(default)s)")
    parser.add_argument("--common", type=int, default=3, help="items beyond which such a run is a phrase (%(default)s)")
    parser.add_argument("--workers", type=int, help="processes; default: one per core")
    options = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if not options.run.is_dir():
            raise ValueError(f"{options.run} is no folder: give the folder of a run or of a cascade, such as runs/NAME")
        stages = stages_in(options.run)
        for text in options.training:
            name, found, path = text.partition("=")
            if not (name and found and path):
                raise ValueError(f"--training {text} must have the form NAME=PATH")
            stages.setdefault("by hand", {})[name] = path
        items = items_of(options.words, options.tasks_of)
        if unknown := set(options.headline) - set(items):
            raise ValueError(f"--headline {', '.join(sorted(unknown))}: there is no such task; there are {', '.join(items)}")
        report = find_overlaps(options.run, stages, items, n=options.n, common=options.common, workers=options.workers)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return tell(report, options)


def tell(report: dict[str, Any], options: argparse.Namespace) -> int:
    """Print what was found; the exit code."""
    Console(width=None if sys.stdout.isatty() else 140).print(table(report))
    for text in report["missing"]:
        print(f"NOT LOOKED THROUGH: {text}")
    for text in report["bad_rows"]:
        print(f"left out: {text}")
    print(f"{options.run / 'overlap.json'}, {options.run / 'overlap_report.json'}")
    met = [task for task in options.headline if report["tasks"][task]["excluded"]]
    for task in met:
        rows = [pair["where"] for pair in report["pairs"] if pair["task"] == task]
        print(f"error: training has met {report['tasks'][task]['excluded']} items of {task}, which must never be trained on: "
              f"take out {', '.join(rows[:5])}{' ...' if len(rows) > 5 else ''}", file=sys.stderr)  # fmt: skip
    return int(bool(met))


if __name__ == "__main__":
    sys.exit(main())
