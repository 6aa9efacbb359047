"""What a refinement asks: every finished reply and verdict is on disk, and is not asked for again.

A key is NAME/DIGEST, the digest that of everything the model or the comparison was shown: what changes is asked anew. The
steps of a refinement are plain code that runs from the start each time; what has been said already comes from the ledger. So a
job that was killed goes on in the middle of a round, and a changed rule of acceptance costs no reply.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_nb.asking.askers import Answer, Asker, TooLong
from megatron_nb.asking.ledger import Ledger, Progress
from megatron_nb.data.preferences import final_answer
from megatron_nb.records import Conversation, Group, Prompt, Rollout
from megatron_nb.rewards.reward import ComposedReward, RewardConfig, TermConfig, build_reward
from megatron_nb.rollout.agent import seed_of

log = logging.getLogger(__name__)

SAME = "megatron_nb.synthesis.refine_same"
JUDGE = """\
Do these two final answers to the task say the same? Wording does not count, meaning and numbers do.

<task>
{question}
</task>

<first>
{reference}
</first>

<second>
{answer}
</second>

End your reply with: Grade: 1 if they say the same, Grade: 0 if not."""


@dataclass
class SameConfig:
    """When two final answers are the same."""

    kind: Literal["math", "exact", "normalised", "judge"] = "math"
    timeout_s: float = 10.0  # of a comparison by math-verify; of the judge, retries included
    workers: int = 2  # processes for math-verify, on every rank
    judge: dict[str, Any] = field(default_factory=dict)  # settings of rewards/judge.py: url, model, ...

    def __post_init__(self):
        if (self.kind == "judge") != bool(self.judge):
            raise ValueError(f"same.kind={self.kind} with same.judge={self.judge}: kind judge alone has url and model there")

    @property
    def reward(self) -> RewardConfig:
        """The comparison as a reward, which brings deadlines and retries."""
        kinds = {"math": f"{SAME}.SameMaths", "judge": "judge"}
        kind = kinds.get(self.kind, f"{SAME}.SameText")
        settings = {"ignore": self.kind == "normalised"} if kind.endswith("SameText") else {}
        if self.kind == "judge":
            settings = {"template": JUDGE, "low": 0.0, "high": 1.0, **self.judge}
        return RewardConfig({"same": TermConfig(kind, settings=settings)}, timeout_s=self.timeout_s, workers=self.workers)


def digest(*told: Any) -> str:
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=8).hexdigest()


class NotAnswered(Exception):
    """The reply is not on disk, and nobody is there to be asked."""


class Unreadable(ValueError):
    """No reply of the wanted form in all tries. step: whose."""

    def __init__(self, step: str, reason: str):
        super().__init__(f"{step}: {reason}")
        self.step = step


class Calls:
    """Replies and verdicts by name. asker, reward None: from disk only, anything else is NotAnswered."""

    def __init__(self, ledgers: Sequence[Ledger], asker: Asker | None, same: SameConfig, reward: ComposedReward | None,
                 seed: int, tries: int):  # fmt: skip
        """The last ledger is written to; the earlier ones hold what earlier phases were told."""
        self.ledgers, self.asker, self.same, self.reward, self.seed, self.tries = ledgers, asker, same, reward, seed, tries

    def found(self, key: str) -> dict[str, Any] | None:
        return next((ledger[key] for ledger in self.ledgers if key in ledger), None)

    async def ask(self, name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> Answer:
        """One reply. Raises OSError when there is none after all retries, TooLong, NotAnswered."""
        key = f"{name}/{digest(messages, tools)}"
        row = self.found(key)
        if row is None:
            if self.asker is None:
                raise NotAnswered(key)
            try:
                row = vars(await self.asker.ask(Conversation(messages, name, "", tools), name, seed_of(self.seed, name)))
                row["text"] = row["text"].encode("utf-8", "replace").decode()  # half a surrogate pair cannot be sent on
            except TooLong as error:
                row = {"too_long": str(error)}
            self.ledgers[-1][key] = row
        if "too_long" in row:
            raise TooLong(row["too_long"])
        return Answer(**row)

    async def read[T](self, name: str, messages: list[dict[str, Any]], reader: Callable[[str], T]) -> T:
        """`reader` of a reply; one that is cut off or that it raises ValueError on is asked for again. Raises Unreadable."""
        reason = ""
        for number in range(self.tries):
            answer = await self.ask(f"{name}/try-{number}" if number else name, messages)
            try:
                if not answer.whole:
                    raise ValueError("cut off at max_tokens")
                return reader(answer.text)
            except ValueError as error:
                reason = str(error)
        raise Unreadable(name.rpartition("/")[2], reason)

    async def is_same(self, name: str, question: str, reference: str, answer: str) -> bool | None:
        """Whether two final answers are the same; None when the comparison cannot say. OSError when the judge is lost."""
        key = f"{name}/same/{digest(self.same.kind, self.same.judge, question, reference, answer)}"
        row = self.found(key)
        if row is None:
            if self.reward is None:
                raise NotAnswered(key)
            asked = Prompt(Conversation([{"role": "user", "content": question}], name, ""), [], {"reference": reference})
            asked.data["question"] = question
            said = Rollout([], [], [], [], [], [], [], "done", {}, 0, name, 0, text=final_answer(answer))
            score = (await self.reward.score(Group(name, asked, [said])))[0]
            if score.reward is None and "ValueError" not in score.reason:  # trouble, not a verdict: another attempt may succeed
                raise OSError(f"no verdict: {score.reason}")
            row = self.ledgers[-1][key] = {"same": None if score.reward is None else score.reward >= 0.5}
        return row["same"]


# ------------------------------------------------------------------ a phase
async def replay[T](flow: Callable[..., Awaitable[T]], tasks: Sequence[Any], calls: Calls) -> tuple[dict[str, T], list[Any]]:
    """(id -> what the flow gives by what is on disk, the tasks that need more)."""
    found, left = {}, []
    for task in tasks:
        try:
            found[task.id] = await flow(task, calls)
        except NotAnswered:
            left.append(task)
    return found, left


async def run_all(
    flow: Callable[..., Awaitable[Any]], tasks: Sequence[Any], calls: Calls, label: str, total: int, concurrency: int
) -> None:  # fmt: skip
    """Run the flow of every task, so many at once; a task whose model or judge is lost is told and left to another attempt."""
    progress, room = Progress(label, total, total - len(tasks)), asyncio.Semaphore(concurrency)

    async def one(task: Any) -> None:
        async with room:
            try:
                await flow(task, calls)
            except OSError as error:
                log.warning("%s: left to another attempt: %s", task.id, error)
            progress.tick()

    async with asyncio.TaskGroup() as group:
        for task in tasks:
            group.create_task(one(task))


def open_same(config: SameConfig) -> ComposedReward:
    return build_reward(config.reward, None, "cpu")
