"""Evaluation: scores of a checkpoint or of a served model on many tasks.

python -m megatron_nb.evaluate checkpoint=RUN tasks=recipe data_dir=FOLDER [overrides]
torchrun --nproc-per-node N -m megatron_nb.evaluate checkpoint=RUN tasks=recipe data_dir=FOLDER [overrides]
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_nb.asking.askers import AnswererConfig, Asker
from megatron_nb.asking.cache import CachedAsker
from megatron_nb.asking.loading import check_room, identity, size_told, with_asker
from megatron_nb.client import ClientConfig
from megatron_nb.config import job
from megatron_nb.evals.harness import Attempts, measure, read_excluded, table
from megatron_nb.evals.kinds import make_task
from megatron_nb.evals.task import Item, Task
from megatron_nb.launch import LaunchConfig, elsewhere, open_run
from megatron_nb.parallel import topology
from megatron_nb.parallel.topology import ParallelConfig, Topology, everywhere
from megatron_nb.rollout.engine import Sampling
from megatron_nb.rollout.engines import EngineConfig
from megatron_nb.run import Run, write_atomic
from megatron_nb.sandbox.isolation import IsolationMissing

MOST_INVALID = 0.1  # share of a task's attempts without a verdict, above which the evaluation has failed

log = logging.getLogger(__name__)


@dataclass
class EvaluateConfig:
    """One evaluation."""

    checkpoint: str | None = None  # Hugging Face folder, run, or step folder; or
    endpoint: ClientConfig | None = None  # an OpenAI-compatible server
    chat_template: str | None = None  # of the checkpoint: a Jinja file, or chatml (built in); null: the tokenizer's own
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> kind and settings, see evals/README.md
    only: list[str] | None = None  # of the tasks; null: all
    data_dir: str = "."  # where the files of tasks=recipe lie
    # items that training has seen, for figures without them: a file {"task": [ids]}; or a run or cascade: its rows are searched
    exclude: str | None = None
    name: str | None = None  # run folder runs_dir/name; null: derived from the configuration
    runs_dir: str = "runs"
    seed: int = 1234
    concurrency: int = 64  # attempts under way at once, on each replica of an engine
    cache: Path | None = None  # folder of answers by model, prompt, sampling and seed, shared by runs
    price_in: float = 0.0  # per million tokens
    price_out: float = 0.0
    max_prompt_tokens: int | None = None  # of a checkpoint's prompts; longer ones score 0; null: what its positions leave
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=2048))  # where a task says nothing
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # in which a checkpoint is loaded
    engine: EngineConfig = field(default_factory=EngineConfig)  # by which it is sampled
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self):
        if self.concurrency < 1:
            raise ValueError(f"concurrency={self.concurrency} must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")

    def answerer(self, max_tokens: int) -> AnswererConfig:
        """Who answers. max_tokens: the longest answer of any task."""
        drawn = self.sampling
        return AnswererConfig(self.checkpoint, self.endpoint, self.chat_template, drawn.temperature, drawn.top_p, max_tokens)


def build_tasks(config: EvaluateConfig) -> list[Task]:
    """The chosen tasks, their settings checked. Raises ConfigError and ValueError."""
    if not config.tasks:
        raise ValueError("tasks is empty: choose tasks=recipe, or give one: tasks.NAME.kind=math tasks.NAME.path=FILE")
    if unknown := set(config.only or ()) - set(config.tasks):
        known = ", ".join(config.tasks)
        raise ValueError(f"only={config.only}: there is no task {', '.join(sorted(unknown))}; there are {known}")
    wanted = config.only or list(config.tasks)
    made = [make_task(name, {"seed": config.seed, **config.tasks[name]}, config.sampling) for name in wanted]
    for task in made:
        task.check()
    return made


def describe_job(config: EvaluateConfig, tasks: list[Task], items: dict[str, list[Item]]) -> str:
    """What the dry run prints below the configuration. ValueError when it cannot run."""
    answerer = config.answerer(1)
    answerer.validate("evaluate")
    engine = f", {config.engine.kind} engine" if config.checkpoint else ""
    lines = [f"model        {size_told(answerer, config.parallel)}{engine}"]
    agents = {task.name: getattr(task.config, "agent", None) for task in tasks}
    rows = {f"tasks.{name}.agent.max_tokens={agent.max_tokens}": agent.max_tokens for name, agent in agents.items() if agent}
    check_room(config.answerer(max(task.sampling.max_tokens for task in tasks)), config.engine, rows)
    for task in tasks:
        drawn = task.sampling
        lines.append(f"{task.name:<20} {len(items[task.name])} items x {task.samples}, at most {drawn.max_tokens} tokens, "
                     f"temperature {drawn.temperature:g}, top_p {drawn.top_p:g}")  # fmt: skip
    return "\n".join(lines)


# ------------------------------------------------------------------ the job
def evaluate(run: Run, config: EvaluateConfig, place: Topology, tasks: list[Task], items: dict[str, list[Item]]) -> None:
    """Attempts, outcomes, results and summary; what an earlier attempt of the job has finished is taken over. Collective."""
    answerer = config.answerer(max(task.sampling.max_tokens for task in tasks))
    told = [identity(answerer), config.max_prompt_tokens]
    attempts = Attempts(run.folder / "outcomes", tasks, items, told, place.rank)

    async def work(asker: Asker, share: int, shares: int) -> None:
        if config.cache is not None:
            asker = CachedAsker(asker, config.cache, identity(answerer))
        await _ready(tasks)
        await attempts.run(asker, share, shares, config.concurrency)

    try:
        if any(everywhere(bool(attempts.missing()))):
            with_asker(answerer, work, place, config.seed, config.parallel, config.engine, config.max_prompt_tokens)
    finally:
        for task in tasks:
            task.close()
    lost = everywhere(attempts.invalid)
    if place.rank == 0:
        excluded = read_excluded(config.exclude, items)
        outcomes = attempts.read(lost)
        attempts.write(outcomes)
        prices = config.price_in, config.price_out
        results = {task.name: measure(task, outcomes[task.name], excluded.get(task.name, set()), prices) for task in tasks}
        finish(run, config, tasks, results)
    attempts.close()


async def _ready(tasks: list[Task]) -> None:
    """Try what the tasks stand on. ValueError naming the task."""
    for task in tasks:
        try:
            await task.ready()
        except (OSError, IsolationMissing) as error:
            raise ValueError(f"tasks.{task.name} cannot run: {error}") from error


def finish(run: Run, config: EvaluateConfig, tasks: list[Task], results: dict[str, dict[str, float]]) -> None:
    """results.json, results.md and the summary. ValueError when too much of a task has no verdict."""
    finite = {name: {key: value for key, value in told.items() if math.isfinite(value)} for name, told in results.items()}
    write_atomic(run.folder / "results.json", json.dumps(finite, indent=2) + "\n")
    text = table(results, tasks)
    write_atomic(run.folder / "results.md", text + "\n")
    log.info("%s\n%s", run.folder / "results.md", text)
    for name, told in results.items():
        if told["invalid"] > MOST_INVALID * told["attempts"]:
            raise ValueError(
                f"{told['invalid']:.0f} of {told['attempts']:.0f} attempts of {name} have no verdict, for trouble outside the "
                f"model (see {run.folder}/outcomes/{name}.jsonl): the same command again asks for these alone"
            )
    run.write_summary(config.seed, **{f"{name}_{key}": value for name, told in finite.items() for key, value in told.items()})


@job(EvaluateConfig, "evaluate")
def main(config: EvaluateConfig) -> None:
    """Run the evaluation, or describe it."""
    tasks = build_tasks(config)
    items = {task.name: task.items() for task in tasks}
    report = describe_job(config, tasks, items)
    if config.exclude and not Path(config.exclude).is_dir():
        read_excluded(config.exclude, items)
    if elsewhere(config, "evaluate", "megatron_nb.evaluate", report):
        return
    place = topology.initialize(config.parallel, config.seed)
    with open_run(config, "evaluate") as run:
        log.info("%s\n%s", run.folder, report)
        evaluate(run, config, place, tasks, items)


if __name__ == "__main__":
    main()
