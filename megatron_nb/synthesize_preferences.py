"""Synthesis of training data: preference pairs of a strong and a weak model.

python -m megatron_nb.synthesize --config-name synthesize_preferences strong.checkpoint=RUN weak.checkpoint=RUN \
       prompts.sources.a.path=prompts.jsonl
torchrun --nproc-per-node N -m megatron_nb.synthesize --config-name synthesize_preferences [overrides]
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from megatron_nb.asking.askers import Answer, AnswererConfig, Asker
from megatron_nb.asking.ledger import Ledger, Progress, ledger_name
from megatron_nb.asking.loading import check_room, decides, size_told, with_asker
from megatron_nb.config import flatten, job
from megatron_nb.launch import LaunchConfig, elsewhere, open_run
from megatron_nb.parallel import topology
from megatron_nb.parallel.topology import ParallelConfig, Topology, everywhere
from megatron_nb.records import Group, Prompt, Rollout, Score
from megatron_nb.rewards.reward import RewardConfig, build_reward, check_reward
from megatron_nb.rollout.agent import seed_of
from megatron_nb.rollout.native import NativeConfig
from megatron_nb.run import Run
from megatron_nb.synthesis.answers import Question, answer_all
from megatron_nb.synthesis.preferences import Judged, PairsConfig, QuestionConfig, read_questions, write_pairs

log = logging.getLogger(__name__)
SIDES = ("strong", "weak")


@dataclass
class PreferencesConfig:
    """One stage of preference synthesis."""

    name: str | None = None  # run folder runs_dir/name; None: derived from the configuration
    runs_dir: str = "runs"
    seed: int = 1234
    concurrency: int = 256  # questions under way at once
    max_prompt_tokens: int = 8192  # of a checkpoint's prompts, with template and header; longer ones are left out
    prompts: QuestionConfig = field(default_factory=QuestionConfig)
    strong: AnswererConfig = field(default_factory=AnswererConfig)
    weak: AnswererConfig = field(default_factory=AnswererConfig)
    judge: RewardConfig = field(default_factory=RewardConfig)  # without terms the strong model's answer is the better one
    pairs: PairsConfig = field(default_factory=PairsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # in which a checkpoint is loaded
    engine: NativeConfig = field(default_factory=NativeConfig)  # by which it is sampled
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self):
        for name in ("concurrency", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative: the generators take no such seed")
        if self.strong.samples != self.weak.samples:
            raise ValueError(f"strong.samples={self.strong.samples} and weak.samples={self.weak.samples} must be equal: pairs")


    def validate(self) -> None:
        """Raises ValueError for a setting that no run could use."""
        self.prompts.validate()
        self.strong.validate("strong")
        self.weak.validate("weak")
        self.pairs.validate()
        if self.judge.terms:
            check_reward(self.judge)


def describe_job(config: PreferencesConfig, questions: list[Question], dropped: Counter) -> str:
    """What the dry run prints below the configuration. ValueError when it cannot run."""
    lines = [
        f"prompts      {len(questions)}, {sum(bool(question.adversarial) for question in questions)} of them adversarial; "
        f"{dropped.total()} left out as duplicates"
    ]
    for side in SIDES:
        answerer = getattr(config, side)
        check_room(answerer, config.engine)
        lines.append(f"{side:<12} {size_told(answerer, config.parallel)}; {answerer.samples} answers of at most "
                     f"{answerer.max_tokens} tokens, temperature {answerer.temperature:g}")  # fmt: skip
    lines.append(f"judge        {', '.join(config.judge.terms) or 'none: the answer of the strong model is the better one'}")
    lines.append(f"parts        {', '.join(f'{name} {share:.0%}' for name, share in config.pairs.parts.items()) or 'one'}")
    return "\n".join(lines)


def sample(
    side: str, questions: list[Question], config: PreferencesConfig, place: Topology, folder: Path, name: str
) -> Ledger:  # fmt: skip
    """This side's answers to every question, on disk. Collective."""
    answerer, ledger = getattr(config, side), Ledger(folder, name, place.rank)

    async def work(asker: Asker, share: int, shares: int) -> None:
        mine = questions[share::shares]
        await answer_all(asker, mine, ledger, side, answerer.samples, config.seed, config.concurrency)

    if any(everywhere(any(question.id not in ledger for question in questions))):
        with_asker(answerer, work, place, config.seed, config.parallel, config.engine, config.max_prompt_tokens)
    dist.barrier()
    ledger.read()
    return ledger


async def judge_all(judge: RewardConfig, questions: list[tuple[Question, dict]], ledger: Ledger, concurrency: int) -> None:
    """Scores of every question's answers, strong before weak, into the ledger."""
    reward = build_reward(judge, None, "cpu")
    open_ = [pair for pair in questions if pair[0].id not in ledger]
    progress, room = Progress("judged", len(questions), len(questions) - len(open_)), asyncio.Semaphore(concurrency)

    async def one(question: Question, answers: dict[str, list[dict]]) -> None:
        async with room:
            group = Group(question.id, Prompt(question.conversation, [], question.data), [
                as_rollout(Answer(**row), question.id, number)
                for number, row in enumerate(answers["strong"] + answers["weak"])
            ])  # fmt: skip
            scores = await reward.score(group)
            for score in scores:
                if score.reward is None:
                    log.warning("%s: an answer is not judged: %s", question.id, score.reason)
            ledger[question.id] = [dataclasses.asdict(score) for score in scores]
            progress.tick()

    async with asyncio.TaskGroup() as tasks:
        for question, answers in open_:
            tasks.create_task(one(question, answers))


def as_rollout(answer: Answer, group_id: str, index: int) -> Rollout:
    """An answer as rewards know it; its tokens are gone."""
    status = "done" if answer.whole else "length"
    return Rollout([], [], [], [], [], [], [], status, {}, 0, group_id, index, text=answer.text)


def judged_all(
    questions: list[Question], ledgers: dict[str, Ledger], config: PreferencesConfig, place: Topology, folder: Path, name: str,
    dropped: Counter,
) -> list[Judged]:  # fmt: skip
    """Every question with the answers and scores of both sides, those without counted in `dropped`. Collective."""
    both = []
    for question in questions:
        rows = {side: ledgers[side][question.id] for side in SIDES if question.id in ledgers[side]}
        reason = next((row["dropped"] for row in rows.values() if "dropped" in row), "failed" if len(rows) < 2 else None)
        if reason:
            dropped[reason] += 1
        else:
            both.append((question, {side: row["answers"] for side, row in rows.items()}))
    if not config.judge.terms:
        sure = {"strong": Score(1.0), "weak": Score(0.0)}
        return [Judged(question, answers, {side: [sure[side]] * len(answers[side]) for side in SIDES})
                for question, answers in both]  # fmt: skip
    ledger = Ledger(folder, name, place.rank)
    asyncio.run(judge_all(config.judge, both[place.rank :: place.world], ledger, config.concurrency))
    dist.barrier()
    ledger.read()
    found = []
    for question, answers in both:
        scores, first = [Score(**row) for row in ledger[question.id]], len(answers["strong"])
        found.append(Judged(question, answers, {"strong": scores[:first], "weak": scores[first:]}))
    return found


def synthesize(run: Run, config: PreferencesConfig, place: Topology, questions: list[Question], dropped: Counter) -> None:
    """Sample both sides, judge, write pairs and summary; what an earlier attempt has finished is taken over."""
    folder = run.folder / "synthesis"
    names = [question.id for question in questions], config.seed, config.prompts.adversarial_share, config.max_prompt_tokens
    told = {side: decides(getattr(config, side)) for side in SIDES}
    strong_name = ledger_name("strong", told["strong"], names)
    strong = sample("strong", questions, config, place, folder, strong_name)
    complete = []  # with the turns that the strong model has written
    for question in questions:
        messages = strong[question.id].get("messages") if question.id in strong else None
        complete.append(question.with_messages(messages) if messages else question)
    answered = [question for question in complete if question.id in strong and "dropped" not in strong[question.id]]
    weak_name = ledger_name("weak", told["weak"], strong_name)
    weak = sample("weak", answered, config, place, folder, weak_name)
    ledgers = {"strong": strong, "weak": weak}
    name = ledger_name("scores", flatten(config.judge), strong_name, weak_name)
    judged = judged_all(complete, ledgers, config, place, folder, name, dropped)
    if run.rank == 0:
        models = {side: getattr(config, side).told for side in SIDES}
        seed = seed_of(config.seed, "balance")
        measured = write_pairs(run.folder / "pairs", judged, config.pairs, models, seed)
        measured |= {f"dropped_{reason}": count for reason, count in dropped.items()}
        log.info("%s", "\n".join(f"{key:<28} {value:.6g}" for key, value in measured.items()))
        if not measured["pairs"]:
            raise ValueError(f"no pair is left of {len(questions)} prompts, see the counts above: check models and judge")
        run.write_summary(config.seed, prompts=len(questions), **measured)
    dist.barrier()


@job(PreferencesConfig, "synthesize_preferences")
def main(config: PreferencesConfig) -> None:
    """Run the stage, or describe it."""
    config.validate()
    questions, dropped = read_questions(config.prompts, config.seed)
    report = describe_job(config, questions, dropped)
    if elsewhere(config, "synthesize", "megatron_nb.synthesize_preferences", report):
        return
    place = topology.initialize(config.parallel, config.seed)
    with open_run(config, "synthesize") as run:
        log.info("%s\n%s", run.folder, report)
        synthesize(run, config, place, questions, dropped)


if __name__ == "__main__":
    main()
