"""Batches of scored groups: which prompts a step takes, who generates them, which groups are kept.

Every rank calls `collect`; the leader of each replica generates and scores its share (produce.py), and all ranks get the
same groups in the same order. Step s is trained on weights of version s - 1, and each of its tokens was sampled by weights
of version >= s - 1 - staleness. With staleness 0 the ranks wait for their batch; with k > 0 up to k later batches are
generated while they train.

A batch is collected in rounds: where dynamic sampling drops groups, the next round asks further prompts, up to a bound.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_nb.data.prompts import PromptSet
from megatron_nb.records import Group, Prompt, Score
from megatron_nb.rollout.agent import Agent, seed_of
from megatron_nb.rollout.engine import Engine, Sampling
from megatron_nb.rollout.produce import Ask, OverlongConfig, Producer, Scorer, scores_of
from megatron_nb.rollout.store import label

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOOK_S = 0.05  # how often ranks that wait for a batch look
LOWEST_RATE = 0.1  # of kept groups that a further round reckons with


@dataclass
class CollectConfig:
    """How a batch of rollouts is collected."""

    num_prompts: int = 64  # groups of a batch
    group_size: int = 8  # rollouts of a prompt
    concurrency: int = 256  # rollouts that a replica works on at once; 1: one after the other, the same bits every time
    timeout_s: float = 1800.0  # of one rollout, once it runs; a longer one is invalid
    staleness: int = 0  # k: a batch for weights of version v may be sampled by versions >= v - k
    dynamic_sampling: bool = False  # groups whose rewards are all equal are dropped and replaced from further prompts
    max_generation_batches: int = 10  # prompts asked for one batch: at most num_prompts times this
    overlong: OverlongConfig | None = None

    def __post_init__(self):
        for name in ("num_prompts", "group_size", "concurrency", "max_generation_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"collect.{name}={getattr(self, name)} must be at least 1")
        if self.staleness < 0:
            raise ValueError(f"collect.staleness={self.staleness} must not be negative (0 is strictly on-policy)")
        if self.timeout_s <= 0:
            raise ValueError(f"collect.timeout_s={self.timeout_s} must be positive")
        if self.dynamic_sampling and self.group_size == 1:
            raise ValueError("collect.dynamic_sampling=true needs collect.group_size > 1: a single reward equals itself")


class Interrupted(Exception):
    """The job was asked to stop while it collected; what is finished is on disk. Raised on every rank."""


@dataclass
class Round:
    """Prompts under way. `future` is this rank's share, None where the rank leads no replica."""

    asks: list[Ask]
    future: Future | None


def all_equal(group: Group) -> bool:
    """Whether the group teaches nothing: fewer than two valid rewards, or all of them equal."""
    rewards = [rows[-1].score.reward for rows in group.episodes if rows[-1].score.reward is not None]
    return len(rewards) < 2 or max(rewards) == min(rewards)


class Collector:
    """See the head of the file. Public methods are collective, but for the state's."""

    def __init__(
        self, engine: Engine, prompts: PromptSet, score: Scorer, config: CollectConfig, sampling: Sampling,
        tokenizer: PreTrainedTokenizerBase, folder: Path, *, seed: int, num_steps: int,
        stopping: Callable[[], bool] = lambda: False, agent: Agent | None = None,
    ):  # fmt: skip
        """folder: of the run; stopping: whether this process was asked to stop, looked at while it generates."""
        self.engine, self.prompts, self.score, self.config = engine, prompts, score, config
        self.folder, self.seed, self.num_steps = folder, seed, num_steps
        self.producer = Producer(
            engine, sampling, tokenizer, folder,
            room=config.concurrency, timeout_s=config.timeout_s, overlong=config.overlong, stopping=stopping, agent=agent,
        )  # fmt: skip
        self.cursor = 0  # places of the endless order that batches have taken
        self.ahead: dict[int, list[int]] = {}  # step -> places of its first round, for batches that have been started early
        self._rounds: dict[int, Round] = {}  # of those batches

    # ------------------------------------------------------------------ where the order stands
    def state(self) -> dict[str, Any]:
        """Plain JSON, the same on every rank, to be saved with the weights."""
        ahead = {str(step): places for step, places in self.ahead.items()}
        return {"cursor": self.cursor, "ahead": ahead, "prompts": self.prompts.digest}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`. ValueError when the prompts are not those of then."""
        if state["prompts"] != self.prompts.digest:
            raise ValueError(
                "the prompts are not those of the checkpoint (rows, tokenizer, template or limit changed), so their order "
                "would be another: give the old ones back, or start a new run with init_from= this one"
            )
        self.cursor, self.ahead = state["cursor"], {int(step): places for step, places in state["ahead"].items()}

    # ------------------------------------------------------------------ batches
    def collect(self, step: int) -> tuple[list[Group], dict[str, float]]:
        """(scored groups of `step` in the order of their prompts, what it took).

        RuntimeError when dynamic sampling reaches its bound, or nothing has a reward. Interrupted when asked to stop.
        """
        began, wanted = time.perf_counter(), self.config.num_prompts
        self.start_ahead(step)
        kept, tried, rounds = [], [], []
        while len(kept) < wanted:
            left = wanted * self.config.max_generation_batches - len(tried)
            if not left:
                raise RuntimeError(self._too_few(step, kept, tried))
            running = self._rounds.pop(step, None) or self._start(step, self._places(self._further(kept, tried, left)))
            groups, stats = self._finish(running)
            rounds.append(stats)
            tried += groups
            kept += [group for group in groups if not (self.config.dynamic_sampling and all_equal(group))]
        self.ahead.pop(step, None)
        kept = kept[:wanted]
        if not any(rollout.score.reward is not None for group in kept for rollout in group.rollouts):
            raise RuntimeError(f"step {step}: no rollout has a reward, so there is nothing to learn from: {_reasons(kept)}")
        return kept, {"collect_s": time.perf_counter() - began, **self._stats(step, kept, tried, rounds)}

    def start_ahead(self, step: int) -> None:
        """With staleness k > 0: see that the batches of `step` .. `step` + k are being generated. With 0 nothing."""
        for later in range(step, min(step + self.config.staleness, self.num_steps) + 1) if self.config.staleness else ():
            if later not in self._rounds:
                places = self.ahead.setdefault(later, []) or self._places(self.config.num_prompts)
                self.ahead[later], self._rounds[later] = places, self._start(later, places)

    def answers(
        self, kind: str, number: int, prompts: list[Prompt], samples: int, score: Scorer | None = None
    ) -> tuple[list[Group], dict[str, float]]:
        """Scored groups of `samples` answers to these prompts by the weights of now, durable, outside the training order.

        The seeds do not depend on `number`: two evaluations differ by their weights alone. score: None is the collector's.
        """
        asks = [
            self._ask(f"{kind}{number}.{place}.{prompt.conversation.sample_id}", prompt, (kind, place), samples)
            for place, prompt in enumerate(prompts)
        ]
        return self._finish(self._produce(label(kind, number), asks, self.engine.version, score))

    def judge(self, groups: list[Group], score: Scorer) -> list[list[Score]]:
        """What another reward says of these groups; the groups keep their scores."""

        async def work() -> dict[str, list[Score]]:
            mine = groups[self.engine.replica :: self.engine.replicas]
            scores = await asyncio.gather(*(scores_of(group, score) for group in mine))
            return {group.group_id: its for group, its in zip(mine, scores)}

        found = {name: scores for part in self._wait(self._run(work)) for name, scores in part.items()}
        return [found[group.group_id] for group in groups]

    # ------------------------------------------------------------------ a round
    def _further(self, kept: list, tried: list, left: int) -> int:
        """How many prompts the next round asks: by the rate so far, within the bound."""
        if not tried:
            return self.config.num_prompts
        rate = max(len(kept) / len(tried), LOWEST_RATE)
        return min(math.ceil((self.config.num_prompts - len(kept)) / rate), left)

    def _places(self, count: int) -> list[int]:
        first, self.cursor = self.cursor, self.cursor + count
        return list(range(first, self.cursor))

    def _ask(self, group_id: str, prompt: Prompt, place: tuple, samples: int) -> Ask:
        names = (*place, prompt.conversation.source, prompt.conversation.sample_id)
        return Ask(group_id, prompt, tuple(seed_of(self.seed, *names, index) for index in range(samples)))

    def _start(self, step: int, places: list[int]) -> Round:
        """Generate the prompts at these places for `step`; a prompt may come twice in a step, its places differ."""
        asks = []
        for place in places:
            prompt = self.prompts.at(place)
            group_id = f"step{step}.{place}.{prompt.conversation.sample_id}"
            asks.append(self._ask(group_id, prompt, (step, place), self.config.group_size))
        return self._produce(label("step", step), asks, step - 1 - self.config.staleness)

    def _produce(self, name: str, asks: list[Ask], oldest: int, score: Scorer | None = None) -> Round:
        mine = asks[self.engine.replica :: self.engine.replicas]
        return Round(asks, self._run(lambda: self.producer.produce(name, mine, oldest, score or self.score)))

    def _run(self, work: Callable[[], Awaitable[Any]]) -> Future | None:
        """Begin `work` on the leaders. With staleness 0 it is done when this returns."""
        if self.config.staleness:
            return self.engine.start(work)
        done: Future = Future()
        done.set_result(self.engine.run(work))
        return done if self.engine.leads else None

    def _wait(self, future: Future | None) -> list[Any]:
        """The results of all leaders, on every rank. An error of one is raised on all."""
        while not all(_everywhere(future is None or future.done())):
            time.sleep(LOOK_S)  # many short collectives: a wait of minutes inside one would run into its time-out
        error = future.exception() if future is not None else None
        errors = _everywhere(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if any(errors):
            raise RuntimeError(f"another replica failed: {next(filter(None, errors))}")
        parts = _everywhere(None if future is None else (future.result(),))
        return [part[0] for part in parts if part is not None]

    def _finish(self, running: Round) -> tuple[list[Group], dict[str, float]]:
        """Wait for a round; the same groups on every rank, in the order they were asked."""
        shares = self._wait(running.future)
        if any(share.stopped for share in shares):
            raise Interrupted
        rollouts = {group_id: its for share in shares for group_id, its in share.rollouts.items()}
        stats = {name: max(share.stats[name] for share in shares) for name in ("generation_s", "scoring_s")}
        stats |= {name: sum(share.stats[name] for share in shares) for name in ("reused", "generated_tokens")}
        return [Group(ask.group_id, ask.prompt, rollouts[ask.group_id]) for ask in running.asks], stats

    # ------------------------------------------------------------------ reports
    def _stats(self, step: int, kept: list[Group], tried: list[Group], rounds: list[dict[str, float]]) -> dict[str, float]:
        scores = [rows[-1].score for group in tried for rows in group.episodes]
        lags = [step - 1 - version for g in kept for r in g.rollouts for version in r.weight_version if version >= 0]
        assert max(lags, default=0) <= self.config.staleness, "a token is older than collect.staleness allows"
        return {
            **{name: sum(stats[name] for stats in rounds) for name in rounds[0]},
            "rounds": len(rounds),
            "groups_tried": len(tried),
            "groups_equal": sum(map(all_equal, tried)) / len(tried),
            "invalid_share": sum(score.reward is None for score in scores) / len(scores),
            "staleness_mean": sum(lags) / max(len(lags), 1),
            "staleness_max": max(lags, default=0),
        }

    def _too_few(self, step: int, kept: list[Group], tried: list[Group]) -> str:
        rewards = [rows[-1].score.reward for group in tried for rows in group.episodes]
        valid = [reward for reward in rewards if reward is not None]
        mean = f"mean reward {sum(valid) / len(valid):.4g}" if valid else _reasons(tried)
        return (
            f"step {step}: dynamic sampling kept {len(kept)} of {len(tried)} groups ({len(kept) / len(tried):.1%}), "
            f"{self.config.num_prompts} are needed and collect.max_generation_batches={self.config.max_generation_batches} is "
            f"reached; {len(rewards) - len(valid)} of {len(rewards)} rollouts are invalid, {mean}: "
            "filter the prompts by success (prompt_filter), raise group_size or the bound, or turn dynamic_sampling off"
        )


def _everywhere(value: Any) -> list:
    """`value` of every rank."""
    if not dist.is_initialized():
        return [value]
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _reasons(groups: list[Group]) -> str:
    found = [rollout.score.reason for group in groups for rollout in group.rollouts if rollout.score.reward is None]
    return "; ".join(list(dict.fromkeys(found))[:3]) or "no reason was given"
