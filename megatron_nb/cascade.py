"""A chain of stages: each starts from the checkpoint of the one before, here one after the other, or as jobs of Slurm.

python -m megatron_nb.cascade --config-name cascade name=RECIPE [launch=slurm] [overrides]

A stage that is done is never run again, and one that waits or runs is not submitted again: the same command continues.
"""

from __future__ import annotations

import importlib
import json
import logging
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_nb import slurm
from megatron_nb.config import ConfigError, compose, job, schema_in, to_yaml
from megatron_nb.launch import LaunchConfig, slurm_job
from megatron_nb.ledger import Gate, LedgerConfig
from megatron_nb.run import run_folder, write_atomic

log = logging.getLogger(__name__)
JOBS = {  # the schema that a stage file begins with -> its job
    "SftConfig": "megatron_nb.sft",
    "RewardModelConfig": "megatron_nb.reward_model",
    "RlConfig": "megatron_nb.rl",
    "PreferencesConfig": "megatron_nb.synthesize_preferences",
    "ComplexityConfig": "megatron_nb.synthesize_complexity",
    "QuestionsConfig": "megatron_nb.synthesize_questions",
    "TrajectoriesConfig": "megatron_nb.synthesize_trajectories",
    "RefineConfig": "megatron_nb.refine_solutions",
}


@dataclass
class StageConfig:
    """One link of the chain."""

    stage: str = ""  # its stage file
    words: list[str] = field(default_factory=list)  # its command line; {NAME} is the run folder of stage NAME
    start_from: str | None = None  # the stage whose checkpoint it starts from; null: its words say, or it needs none
    after: list[str] = field(default_factory=list)  # further stages that must be done first
    gate: Gate | None = None  # what it must reach for those behind it to begin


@dataclass
class CascadeConfig:
    """A chain; its stages' runs lie in runs_dir/name/STAGE."""

    name: str = "cascade"
    runs_dir: str = "runs"
    stages: dict[str, StageConfig] = field(default_factory=dict)  # in order
    words: list[str] = field(default_factory=list)  # of every stage that knows their key, before its own: [model=tiny]
    ledger: LedgerConfig = field(default_factory=LedgerConfig)  # evaluations after stages
    from_stage: str | None = None  # run this one and those behind it again; what they made before is moved aside
    action: Literal["run", "cancel"] = "run"  # cancel: take every job of the chain out of the queue
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self):
        names = list(self.stages)
        for place, (name, stage) in enumerate(self.stages.items()):
            for other in filter(None, [stage.start_from, *stage.after]):
                if other not in names[:place]:
                    before = ", ".join(names[:place]) or "none"
                    raise ValueError(f"stages.{name} waits for {other!r}, which is no stage before it; those are: {before}")
        if self.from_stage is not None and self.from_stage not in names:
            raise ValueError(f"from_stage={self.from_stage!r} must be one of {', '.join(names)}")


@dataclass
class Link:
    """A stage, ready to run."""

    name: str
    module: str
    config: Any  # the job's dataclass
    command: list[str]  # words of the same
    run: Path
    waits_for: list[str]

    @property
    def done(self) -> bool:
        return (self.run / "summary.json").exists()


def links_of(config: CascadeConfig) -> list[Link]:
    """Every stage with its composed configuration. ConfigError naming the stage whose words are wrong."""
    root, links = run_folder(config.runs_dir, config.name), []
    folders = {name: root / name for name in config.stages}
    for name, stage in config.stages.items():
        try:
            module, schema = job_of(stage.stage)
            words = [word.format(**folders) for word in [*_for_all(config), *stage.words]]
            words += [f"init_from={folders[stage.start_from]}"] if stage.start_from else []
            words += [f"name={name}", f"runs_dir={root}"]
            links.append(Link(name, module, compose(schema, stage.stage, words), [f"--config-name={stage.stage}", *words],
                              folders[name], [*filter(None, [stage.start_from]), *stage.after]))  # fmt: skip
        except (ValueError, KeyError) as error:
            what = f"no stage is named {error}" if isinstance(error, KeyError) else error
            raise ConfigError(f"stages.{name}: {what}") from error
    return links


def _for_all(config: CascadeConfig) -> list[str]:
    """Words of every stage: how the chain is launched, then the chain's own."""
    told, usual = asdict(config.launch.slurm), asdict(slurm.SlurmConfig())
    asked = [f"launch.slurm.{key}={value}" for key, value in told.items() if value != usual[key] and key != "after"]
    return [f"launch={config.launch.kind}", *(asked if config.launch.kind == "slurm" else []), *config.words]


def job_of(stage: str) -> tuple[str, type]:
    """(module, schema) of a stage file."""
    name = schema_in(stage)
    if name not in JOBS:
        raise ConfigError(f"the stage file {stage!r} belongs to none of the jobs {', '.join(JOBS)}")
    module = importlib.import_module(JOBS[name])
    return JOBS[name], getattr(module, name)


def run_here(links: list[Link]) -> None:
    """One after the other in processes of their own; the first that fails ends the chain with its exit code."""
    for link in links:
        if link.done:
            log.info("%s is done: %s", link.name, link.run)
            continue
        log.info("%s begins: %s", link.name, link.run)
        began = time.monotonic()
        code = subprocess.run([sys.executable, "-m", link.module, *link.command]).returncode
        if code:
            log.error("%s ended with %d after %.0f s: see tools/status.py %s", link.name, code, time.monotonic() - began,
                      link.run.parent)  # fmt: skip
            sys.exit(code)
        log.info("%s is done in %.0f s", link.name, time.monotonic() - began)


def submit(links: list[Link], slurm_config: slurm.SlurmConfig) -> dict[str, str]:
    """Stage -> job of those that are not done; each waits for the stages that it needs. ConfigError when Slurm refuses."""
    jobs: dict[str, str] = {}
    for link in links:
        if link.done:
            log.info("%s is done: %s", link.name, link.run)
            continue
        known = slurm.running(link.run)
        if known is None:
            ready = slurm_job(link.config, link.name, link.module)
            ready.config.after = [*slurm_config.after, *(jobs[name] for name in link.waits_for if name in jobs)]
            known = ready.submit()
        jobs[link.name] = known
        log.info("%s is job %s", link.name, known)
    return jobs


def cancel(links: list[Link]) -> None:
    """Take the chain out of the queue, last stage first so that none starts in between."""
    for link in reversed(links):
        job_id = slurm.running(link.run)
        if job_id is not None:
            subprocess.run(["scancel", job_id], check=True)
            log.info("cancelled %s, job %s", link.name, job_id)


def move_aside(links: list[Link], first: str) -> None:
    """Rename the runs of `first` and of all behind it. ConfigError when one of them waits or runs."""
    names = [link.name for link in links]
    for link in links[names.index(first) :]:
        if slurm.here() and (job_id := slurm.running(link.run)) is not None:
            raise ConfigError(f"from_stage={first}: {link.name} is job {job_id}: action=cancel first")
        if link.run.exists():
            number = 1 + len(list(link.run.parent.glob(f"{link.name}.before-*")))
            link.run.rename(link.run.with_name(f"{link.name}.before-{number}"))


@job(CascadeConfig, "cascade")
def main(config: CascadeConfig) -> None:
    """Run or submit the chain, or describe it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    links = links_of(config)
    if config.launch.dry_run:
        print(to_yaml(config))
        for link in links:
            print(f"{link.name:<16} {'done' if link.done else 'to do':<6} python -m {link.module} {shlex.join(link.command)}")
        return
    if config.action == "cancel":
        cancel(links)
        return
    root = run_folder(config.runs_dir, config.name)
    root.mkdir(parents=True, exist_ok=True)
    if config.from_stage:
        move_aside(links, config.from_stage)
    write_atomic(root / "chain.json", json.dumps({"stages": [link.name for link in links]}))
    if config.launch.kind == "slurm":
        submit(links, config.launch.slurm)
        print(f"see it: python tools/status.py {root}")
    else:
        run_here(links)


if __name__ == "__main__":
    main()
