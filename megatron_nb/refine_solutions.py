"""Refinement of solutions by checklist, and reconstruction of the reasoning that leads to them.

python -m megatron_nb.synthesize --config-name refine_solutions prompts.sources.a.path=prompts.jsonl refiner.checkpoint=RUN
torchrun --nproc-per-node N -m megatron_nb.synthesize --config-name refine_solutions [overrides]
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from megatron_nb.asking.askers import AnswererConfig, Asker, TooLong
from megatron_nb.asking.ledger import Ledger, ledger_name
from megatron_nb.asking.loading import check_room, decides, size_told, with_asker
from megatron_nb.config import job
from megatron_nb.launch import LaunchConfig, elsewhere, open_run
from megatron_nb.parallel import topology
from megatron_nb.parallel.topology import ParallelConfig, Topology, everywhere
from megatron_nb.rollout.native import NativeConfig
from megatron_nb.run import Run
from megatron_nb.synthesis.refine import (
    LengthConfig,
    Reasoning,
    Refined,
    Rules,
    Task,
    TaskConfig,
    answer_faults,
    read_tasks,
    reconstruct,
    record_of,
    refine,
    sft_row,
    write_draft,
)
from megatron_nb.synthesis.refine_calls import Calls, SameConfig, Unreadable, open_same, replay, run_all
from megatron_nb.synthesis.refine_leaks import LeakConfig
from megatron_nb.synthesis.refine_report import Price, card_text, measure, report_text, summary_of, used_tokens, write_all
from megatron_nb.synthesis.refine_wording import Wording

log = logging.getLogger(__name__)
ROLES = ("drafter", "refiner", "reasoner")


@dataclass
class RefineConfig:
    """One stage of refinement."""

    name: str | None = None  # run folder runs_dir/name; None: derived from the configuration
    runs_dir: str = "runs"
    seed: int = 1234
    concurrency: int = 256  # tasks under way at once
    max_prompt_tokens: int = 16384  # of a checkpoint's prompts, with template and header; longer tasks are left out
    rounds: int = 3  # revisions of a draft at most
    most_items: int = 8  # of a checklist
    open_items: int = 0  # items that may still fail in the answer that is kept
    tries: int = 2  # of a reply that has another form than was asked for
    require_reference: bool = False  # accept only what is the row's reference
    prompts: TaskConfig = field(default_factory=TaskConfig)
    drafter: AnswererConfig | None = None  # writes drafts where rows bring none; None: the refiner
    refiner: AnswererConfig = field(default_factory=AnswererConfig)  # writes checklists, critiques, revisions
    reasoner: AnswererConfig | None = None  # writes the reasoning, `samples` times at most; None: the refiner
    wording: Wording = field(default_factory=Wording)
    same: SameConfig = field(default_factory=SameConfig)
    leaks: LeakConfig = field(default_factory=LeakConfig)
    length: LengthConfig = field(default_factory=LengthConfig)
    prices: dict[str, Price] = field(default_factory=dict)  # by drafter, refiner, reasoner
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # in which a checkpoint is loaded
    engine: NativeConfig = field(default_factory=NativeConfig)  # by which it is sampled
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self):
        for name in ("concurrency", "max_prompt_tokens", "rounds", "most_items", "tries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if min(self.seed, self.open_items) < 0:
            raise ValueError(f"seed={self.seed} and open_items={self.open_items} must not be negative")
        for name in ("drafter", "refiner"):
            if (who := getattr(self, name)) and who.samples != 1:
                raise ValueError(f"{name}.samples={who.samples} must be 1: one draft is refined; reasoner.samples may be more")
        if unknown := sorted(set(self.prices) - set(ROLES)):
            raise ValueError(f"prices has {unknown[0]!r}: it must be one of {', '.join(ROLES)}")

    def validate(self) -> None:
        """Raises ValueError for a setting that no run could use."""
        for name in ROLES:
            if who := getattr(self, name):
                who.validate(name)

    def who(self, role: str) -> AnswererConfig:
        return getattr(self, role) or self.refiner

    @property
    def rules(self) -> Rules:
        return Rules(self.wording, self.leaks, self.length, self.rounds, self.most_items, self.open_items,
                     self.require_reference, self.who("reasoner").samples)  # fmt: skip


def describe_job(config: RefineConfig, tasks: list[Task], dropped: Counter) -> str:
    """What the dry run prints below the configuration. ValueError when it cannot run."""
    given, known = sum(task.draft is not None for task in tasks), sum(task.reference is not None for task in tasks)
    lines = [f"tasks        {len(tasks)}: {given} with a draft, {known} with a reference; left out: {dict(dropped) or 'none'}"]
    most = {"drafter": len(tasks) - given, "refiner": len(tasks) * (2 + 2 * config.rounds),
            "reasoner": len(tasks) * config.rules.reasonings}  # fmt: skip
    for role in ROLES:
        who = config.who(role)
        check_room(who, config.engine)
        price = config.prices.get(role, Price())
        cost = f", {most[role] * who.max_tokens * price.reply / 1e6:.4g} for replies" if price.reply else ""
        lines.append(f"{role:<12} {size_told(who, config.parallel)}; at most {most[role]} calls, unreadable replies aside, "
                     f"of at most {who.max_tokens} tokens{cost}; temperature {who.temperature:g}")  # fmt: skip
    lines.append(f"accepted     final answers the same by {config.same.kind}; {_rules_told(config)}")
    return "\n".join(lines)


def _rules_told(config: RefineConfig) -> str:
    phrases = sum(map(len, config.leaks.phrases.values()))
    return (f"at most {config.rounds} revisions, {config.open_items} open items; {phrases} leak phrases of "
            f"{len(config.leaks.phrases)} kinds; {config.length.min_chars} to {config.length.max_chars} characters"
            f"{'; the reference is required' if config.require_reference else ''}")  # fmt: skip


class Phases:
    """The phases of a job, one model at a time; what each was told is a ledger of its own."""

    def __init__(self, run: Run, config: RefineConfig, place: Topology):
        self.config, self.place, self.folder = config, place, run.folder / "synthesis"
        self.ledgers: dict[str, Ledger] = {}

    def run(self, role: str, label: str, flow: Callable[..., Awaitable[Any]], tasks: list[Task]) -> dict[str, Any]:
        """id -> what `flow` gives, for every task that it could be finished for. Collective."""
        config, who = self.config, self.config.who(role)
        own = self.ledgers[role] = Ledger(self.folder, ledger_name(role, decides(who), config.seed), self.place.rank)
        ledgers = [*self.ledgers.values()]
        on_disk = Calls(ledgers, None, config.same, None, config.seed, config.tries)
        found, left = asyncio.run(replay(flow, tasks, on_disk))
        if any(everywhere(bool(left))):

            async def work(asker: Asker, share: int, shares: int) -> None:
                same = open_same(config.same)
                try:
                    calls = Calls(ledgers, asker, config.same, same, config.seed, config.tries)
                    mine = left[share::shares]
                    done = len(range(share, len(tasks), shares)) - len(mine)
                    await run_all(flow, mine, calls, label, max(done, 0) + len(mine), config.concurrency)
                finally:
                    same.close()

            with_asker(who, work, self.place, config.seed, config.parallel, config.engine, config.max_prompt_tokens)
            dist.barrier()
            own.read()
            found, left = asyncio.run(replay(flow, tasks, on_disk))
        if left:
            log.warning("%s: %d of %d tasks were not finished; the same command tries them again", label, len(left), len(tasks))
        return found


async def _drafted(task: Task, calls: Calls) -> bool:
    """Whether a draft is there, or it is known that none can be."""
    with contextlib.suppress(Unreadable, TooLong):
        await write_draft(task, calls)
    return True


def synthesize(run: Run, config: RefineConfig, place: Topology, tasks: list[Task], dropped: Counter) -> None:
    """Drafts, refinements, reasonings, then the files; what an earlier attempt has finished is taken over."""
    phases, rules, total = Phases(run, config, place), config.rules, len(tasks)
    if config.drafter:
        drafted = phases.run("drafter", "drafts", _drafted, tasks)
        tasks = [task for task in tasks if task.id in drafted]
    refined: dict[str, Refined] = phases.run("refiner", "refinements", functools.partial(refine, rules=rules), tasks)
    faults = {name: answer_faults(one, rules) for name, one in refined.items()}
    sound = [task for task in tasks if task.id in refined and not faults[task.id]]

    async def reason(task: Task, calls: Calls) -> list[Reasoning]:
        return await reconstruct(task, calls, refined[task.id], rules)

    written: dict[str, list[Reasoning]] = phases.run("reasoner", "reasonings", reason, sound)
    done = [task for task in tasks if task.id in refined and (faults[task.id] or task.id in written)]
    records = {task.id: record_of(task, refined[task.id], faults[task.id], written.get(task.id, [])) for task in done}
    rows = [sft_row(task, records[task.id]) for task in done if records[task.id]["accepted"]]
    if run.rank == 0:
        unfinished = Counter({"unfinished": total - len(done)})
        report = measure([*records.values()], dropped + unfinished, used_tokens(phases.ledgers, config.prices))
        models = {role: config.who(role).told for role in ROLES}
        sources = {name: source.path for name, source in config.prompts.sources.items()}
        card = card_text(report, models, sources, f"same final answer by {config.same.kind}; {_rules_told(config)}")
        write_all(run.folder / "solutions", [*records.values()], rows, report, card)
        log.info("%s", report_text(report, "Refined solutions"))
        if rows:
            run.write_summary(config.seed, **summary_of(report))
    dist.barrier()
    if not rows:
        why = run.folder / "solutions" / "report.md"
        raise ValueError(f"none of {total} tasks is accepted, {total - len(done)} were not finished: {why} says why")


@job(RefineConfig, "refine_solutions")
def main(config: RefineConfig) -> None:
    """Run the stage, or describe it."""
    config.validate()
    tasks, dropped = read_tasks(config.prompts)
    report = describe_job(config, tasks, dropped)
    if elsewhere(config, "refine_solutions", "megatron_nb.refine_solutions", report):
        return
    place = topology.initialize(config.parallel, config.seed)
    with open_run(config, "refine_solutions") as run:
        log.info("%s\n%s", run.folder, report)
        synthesize(run, config, place, tasks, dropped)


if __name__ == "__main__":
    main()
