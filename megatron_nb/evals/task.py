"""What every evaluation task is: items, an attempt at one of them, and what the outcomes say together.

A task is a class with a `Config` (a dataclass derived from TaskConfig). The least it gives is `read` (its items) and `score`
(one answer); one that talks for several turns, plays a user or compares two models gives `attempt` instead of `score`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from megatron_nb.asking.askers import Answer, Asker
from megatron_nb.data.preferences import final_answer
from megatron_nb.evals.statistics import mean_with_bounds
from megatron_nb.records import Conversation
from megatron_nb.rewards.text import repeated_share
from megatron_nb.rollout.engine import Sampling
from megatron_nb.rollout.turn import seed_of

NOTHING = {"too_long": 0.0}  # what a part counts that an outcome of this status lacks: as much as its score


@dataclass
class TaskConfig:
    """What all tasks have. A task's own Config derives from it; its keys stand flat in tasks.NAME."""

    kind: str  # of evals/kinds.py, or your own package.module.Class
    path: str = ""  # its items: a file, a folder or a glob
    samples: int = 1  # attempts at every item
    limit: int | None = None  # items at most, drawn by the seed; null: all
    seed: int = 1234
    system: str | None = None  # a system message before every prompt
    max_tokens: int | None = None  # of one turn; null, here and below: the job's
    temperature: float | None = None
    top_p: float | None = None

    def __post_init__(self):
        for name in ("samples", "limit", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")


@dataclass(frozen=True)
class Item:
    """One thing that is asked."""

    id: str
    prompt: list[dict[str, Any]]  # messages in the OpenAI form, the last one the user's
    gold: dict[str, Any] = field(default_factory=dict)  # what the answer is compared with
    tools: list[dict[str, Any]] | None = None


@dataclass
class Verdict:
    """What `score` says of an answer. score None: trouble outside the model, never 0."""

    score: float | None
    parts: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    answer: str | None = None  # what was compared, when it is not the final answer


@dataclass
class Outcome:
    """One attempt at one item."""

    item: str
    index: int  # which attempt at it
    score: float | None  # None: invalid, for trouble outside the model; never 0
    status: str  # done | length (cut off) | turns (used up) | too_long (the prompt does not fit: 0 points) | invalid
    parts: dict[str, float] = field(default_factory=dict)
    answer: str = ""
    tokens_in: int = 0
    tokens_out: int = 0
    seconds: float = 0.0
    reason: str = ""
    messages: list[dict[str, Any]] | None = None  # of several turns


class Talk:
    """The model's turns in one attempt: a seed for each, tokens and cut-off turns counted."""

    def __init__(self, task: Task, asker: Asker, item: Item, index: int):
        self.task, self.asker, self.item, self.index = task, asker, item, index
        self.name = f"{task.name}/{item.id}/{index}"
        self.turns, self.tokens_in, self.tokens_out, self.whole = 0, 0, 0, True
        self.texts: list[str] = []  # of every turn, thinking included

    async def say(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> Answer:
        """The model's next turn after `messages`. OSError and TooLong pass through."""
        name = f"{self.name}/{self.turns}"
        conversation = Conversation(messages, name, self.task.name, tools)
        answer = await self.asker.ask(conversation, name, seed_of(self.task.config.seed, name), self.task.sampling)
        self.turns += 1
        self.tokens_in += answer.prompt_tokens
        self.tokens_out += answer.tokens
        self.whole = self.whole and answer.whole
        self.texts.append(answer.text)
        return answer

    def outcome(self, score: float | None, status: str = "", **more: Any) -> Outcome:
        """The attempt's outcome. status: by default done or, after a turn that was cut off, length."""
        said = Outcome(self.item.id, self.index, score, status or ("done" if self.whole else "length"),
                       tokens_in=self.tokens_in, tokens_out=self.tokens_out, **more)  # fmt: skip
        said.parts.setdefault("repetition", repetition(self.texts))
        return said


class Task:
    """See the head of the file. One object for a whole evaluation; attempts run concurrently."""

    Config: ClassVar[type[TaskConfig]] = TaskConfig
    headline: ClassVar[str] = "score"  # the metric that tables show first
    told_by: ClassVar[tuple[str, ...]] = ()  # settings of its own that change what `summarise` tells, and no attempt

    def __init__(self, name: str, config: TaskConfig, sampling: Sampling):
        """sampling: the job's; what the task's configuration sets goes before it. ValueError for what cannot be run."""
        self.name, self.config = name, config
        given = {key: getattr(config, key) for key in ("max_tokens", "temperature", "top_p")}
        settings = {key: value for key, value in given.items() if value is not None}
        self.sampling = Sampling(**{key: getattr(sampling, key) for key in ("max_tokens", "temperature", "top_p", "top_k")}
                                 | settings)  # fmt: skip

    @property
    def samples(self) -> int:
        return self.config.samples

    def read(self) -> Sequence[Item]:
        """Every item there is. Raises BadRow and ValueError."""
        raise NotImplementedError

    def items(self) -> list[Item]:
        """The items that are asked, in the order of the files. ValueError for ids that occur twice, or no item."""
        found = list(self.read())
        seen: set[str] = set()
        for item in found:
            if item.id in seen:
                raise ValueError(f"tasks.{self.name}: the id {item.id!r} occurs twice in {self.config.path}: ids name outcomes")
            seen.add(item.id)
        if not found:
            raise ValueError(f"tasks.{self.name}: {self.config.path} holds no item")
        limit = self.config.limit
        if limit is not None and limit < len(found):
            drawn = np.random.default_rng(self.config.seed).permutation(len(found))[:limit]
            found = [found[place] for place in sorted(drawn)]
        return found

    def check(self) -> None:
        """Raises ValueError for settings that no run could use; called before any model is loaded, files may be looked at."""
        if self.samples > 1 and self.sampling.temperature == 0:
            raise ValueError(f"tasks.{self.name}: samples={self.samples} with temperature=0 would be the same answer so many "
                             "times: set a temperature, or samples=1")  # fmt: skip

    async def ready(self) -> None:
        """Try what the task stands on (sandbox, judge, search), before any work. Raises OSError naming it."""

    def close(self) -> None:
        """Free what `ready` began."""

    async def attempt(self, item: Item, asker: Asker, index: int) -> Outcome:
        """One attempt. OSError (no answer after all retries) makes it invalid, TooLong gives 0: the harness sees to both."""
        talk = Talk(self, asker, item, index)
        answer = await talk.say(self.prompt(item), item.tools)
        began = time.perf_counter()
        verdict = await self.score(item, answer)
        said = final_answer(answer.text) if verdict.answer is None else verdict.answer
        return talk.outcome(verdict.score, parts=verdict.parts, reason=verdict.reason, answer=said,
                            seconds=time.perf_counter() - began)  # fmt: skip

    def prompt(self, item: Item) -> list[dict[str, Any]]:
        """The item's messages, with the configured system message before them."""
        if self.config.system is None:
            return item.prompt
        return [{"role": "system", "content": self.config.system}, *(m for m in item.prompt if m["role"] != "system")]

    async def score(self, item: Item, answer: Answer) -> Verdict:
        """How good one answer is. What raises OSError is tried again by the next run."""
        raise NotImplementedError

    def summarise(self, outcomes: list[Outcome]) -> dict[str, float]:
        """Flat metrics, the headline's bounds as NAME_low and NAME_high. By default means over items of their attempts' means.

        outcomes: all of the items that count, invalid ones too. The harness adds counts, lengths, truncation and repetition.
        """
        told = mean_with_bounds(self.headline, by_item(outcomes))
        names = dict.fromkeys(name for outcome in outcomes for name in outcome.parts if name != "repetition")
        for name in names:
            values = by_item(outcomes, lambda one, name=name: one.parts.get(name, NOTHING.get(one.status)))
            told |= {name: float(np.mean([np.mean(its) for its in values]))} if values else {}
        return told


def by_item(outcomes: list[Outcome], value: Any = lambda outcome: outcome.score) -> list[list[float]]:
    """For every item with a valid attempt the values of those attempts; value(outcome) None leaves one out."""
    found: dict[str, list[float]] = {}
    for outcome in sorted(outcomes, key=lambda one: one.index):
        number = None if outcome.score is None else value(outcome)
        if number is not None:
            found.setdefault(outcome.item, []).append(float(number))
    return list(found.values())


def repetition(texts: list[str]) -> float:
    """1 when a turn repeats itself: half of its 8-grams of words have occurred before (RECIPE 2's unreadable answers)."""
    return float(any(repeated_share(text.split(), 8) >= 0.5 for text in texts))
