"""Synthesis of labelled programs, to fine-tune and to judge a model that names time complexities (the second witness).

python -m megatron_nb.synthesize_complexity [overrides]
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_nb.asking.ledger import Progress
from megatron_nb.config import job
from megatron_nb.launch import LaunchConfig, elsewhere, open_run
from megatron_nb.rewards.judging import CodeJudge, JudgeConfig
from megatron_nb.run import Run, write_atomic
from megatron_nb.sandbox.ladder import LADDER, UNKNOWN
from megatron_nb.synthesis.complexity_programs import program
from megatron_nb.synthesis.complexity_rows import LabelledSource, labelled_rows

log = logging.getLogger(__name__)
FILES = {"train": "train", "seen": "train", "heldout": "heldout"}  # file -> whose templates its programs have
TRIES = 200  # programs in a row that have been written already, before a class counts as used up


@dataclass
class ComplexityConfig:
    """One stage of labelled programs. Classes are equally frequent; no program stands in two files."""

    name: str | None = None  # run folder runs_dir/name; None: derived from the configuration
    runs_dir: str = "runs"
    seed: int = 1234
    train: int = 12000  # programs to train on
    seen: int = 600  # held-out programs of the training templates
    heldout: int = 600  # programs of templates that training never sees
    extras: int = 2  # smaller parts of a program at most
    sources: dict[str, LabelledSource] = field(default_factory=dict)  # programs of others
    sources_heldout: float = 0.05  # share of theirs that goes to heldout-NAME.jsonl
    verify: list[str] = field(default_factory=list)  # files whose programs the empirical witness runs too; seconds for each
    judge: JudgeConfig = field(default_factory=JudgeConfig)  # where it runs them
    concurrency: int = 8  # of those under way at once
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self):
        for name in ("train", "seen", "heldout", "extras", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if unknown := set(self.verify) - set(FILES):
            raise ValueError(f"verify={sorted(unknown)} must be some of {', '.join(FILES)}: only our own programs can be run")
        if not 0 <= self.sources_heldout < 1:
            raise ValueError(f"sources_heldout={self.sources_heldout} must be in [0, 1)")
        if self.concurrency < 1:
            raise ValueError(f"concurrency={self.concurrency} must be at least 1")


def made_rows(file: str, count: int, config: ComplexityConfig, seen: set[str], dropped: Counter) -> Iterator[dict[str, Any]]:
    """`count` programs for a file, class by class in turn; a class that has no more new ones gives fewer."""
    rng, open_classes = random.Random(f"{config.seed}/{file}"), list(LADDER)
    for number in range(count):
        if not open_classes:
            break
        cost = open_classes[number % len(open_classes)]
        for _ in range(TRIES):
            row = program(cost, FILES[file], rng, config.extras).row(f"{file}/{number}")
            if row["messages"][0]["content"] not in seen:
                seen.add(row["messages"][0]["content"])
                yield row
                break
            dropped["duplicate"] += 1
        else:
            log.warning("%s: no further program of class %s is found", file, cost)
            open_classes.remove(cost)


async def verified(rows: list[dict[str, Any]], file: str, config: ComplexityConfig, told: Counter) -> list[dict[str, Any]]:
    """The rows that the costs do not contradict; each has `empirical`, the class that they say."""
    judge, room = CodeJudge(config.judge), asyncio.Semaphore(config.concurrency)
    progress = Progress(f"verified programs of {file}", len(rows))

    async def one(row: dict[str, Any]) -> None:
        async with room:
            row["empirical"] = (await judge.complexity(row["plain"], row["function"], row["generator"])).complexity
            progress.tick()

    try:
        async with asyncio.TaskGroup() as group:
            for row in rows:
                group.create_task(one(row))
    finally:
        judge.close()
    kept = []
    for row in rows:
        agrees = "unknown" if row["empirical"] == UNKNOWN else "agreed" if row["empirical"] == row["complexity"] else "differed"
        told[f"verify_{agrees}"] += 1
        if agrees == "differed":
            log.info("%s: labelled %s, measured %s: dropped", row["id"], row["complexity"], row["empirical"])
        else:
            kept.append(row)
    return kept


def synthesize(run: Run, config: ComplexityConfig) -> None:
    """Write RUN/programs/*.jsonl and the summary."""
    told: Counter = Counter()
    asked: set[str] = set()
    files: dict[str, list[dict[str, Any]]] = {}
    for file in ("heldout", "seen", "train"):  # what is rare comes first
        rows = list(made_rows(file, getattr(config, file), config, asked, told))
        files[file] = asyncio.run(verified(rows, file, config, told)) if file in config.verify else rows
    for name, source in config.sources.items():
        dropped: Counter = Counter()
        for row in labelled_rows(source, name, dropped):
            if row["messages"][0]["content"] in asked:
                dropped["duplicate"] += 1
                continue
            asked.add(row["messages"][0]["content"])
            part = "heldout" if random.Random(f"{config.seed}/{row['id']}").random() < config.sources_heldout else "train"
            files.setdefault(f"{part}-{name}", []).append(row)
        told |= {f"dropped_{name}_{reason}": count for reason, count in dropped.items()}
        log.info("%s: left out %s", name, dict(dropped) or "nothing")
    folder = run.folder / "programs"
    folder.mkdir(parents=True, exist_ok=True)
    measured: dict[str, float] = {}
    for file, rows in files.items():
        random.Random(f"{config.seed}/{file}/order").shuffle(rows)
        write_atomic(folder / f"{file}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        key = file.replace("-", "_")
        measured |= {f"programs_{key}": len(rows), f"templates_{key}": len({row["template"] for row in rows})}
        log.info("%-16s %6d programs of %d templates", file, len(rows), measured[f"templates_{key}"])
    run.write_summary(config.seed, **measured, **told)


@job(ComplexityConfig, "synthesize_complexity")
def main(config: ComplexityConfig) -> None:
    """Run the stage, or describe it."""
    counts = ", ".join(f"{file} {getattr(config, file)}" for file in FILES)
    report = f"programs     {counts}; of others {', '.join(config.sources) or 'none'}"
    if elsewhere(config, "synthesize_complexity", "megatron_nb.synthesize_complexity", report):
        return
    with open_run(config, "synthesize_complexity") as run:
        synthesize(run, config)


if __name__ == "__main__":
    main()
