"""A replica's share of a batch: its leader generates the rollouts of its groups and has them scored, durably.

What is finished is appended to disk at once, scores too, and is taken from there after a kill. A rollout that meets its
time-out or loses its engine is invalid and says why; it is not shown to the reward. An episode of an agent may be several
rows: they are kept, scored and counted as one, and their score is written on each of them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nb.records import Group, Prompt, Rollout, Score
from megatron_nb.rollout.agent import Agent, episode, failed, recorded
from megatron_nb.rollout.engine import Engine, Sampling
from megatron_nb.rollout.store import Journal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Scorer = Callable[[Group], Awaitable[list[Score]]]  # one Score for each of the group's episodes
LOOK_S, TELL_S = 0.2, 15.0  # how often a leader looks whether it should stop, and tells how far a long collect is


@dataclass
class OverlongConfig:
    """Soft overlong penalty (DAPO, arXiv 2503.14476): 0 up to length - cache, then linear to -weight at length."""

    length: int = 4096  # L, in sampled tokens
    cache: int = 1024  # C
    weight: float = 1.0  # on the scale of the rewards

    def __post_init__(self):
        if not 0 < self.cache <= self.length:
            raise ValueError(f"collect.overlong.cache={self.cache} must be in 1..length={self.length}: it is its last part")


def soft_overlong(length: int, config: OverlongConfig) -> float:
    """0 up to L - C, linear to -1 at L, -1 beyond; times the weight."""
    return config.weight * min(0.0, max(-1.0, (config.length - config.cache - length) / config.cache))


@dataclass(frozen=True)
class Ask:
    """A group to be generated."""

    group_id: str
    prompt: Prompt
    seeds: tuple[int, ...]  # one per rollout


@dataclass
class Share:
    """What a leader gives back."""

    rollouts: dict[str, list[Rollout]]  # group_id -> scored rows, by index and segment
    stats: dict[str, float]
    stopped: bool = False  # the job was asked to stop: incomplete


class Producer:
    """Generates and scores on the leader of a replica. `room`: rollouts at once, over all batches under way."""

    def __init__(
        self, engine: Engine, sampling: Sampling, tokenizer: PreTrainedTokenizerBase, folder: Path, *, room: int,
        timeout_s: float, overlong: OverlongConfig | None, stopping: Callable[[], bool], agent: Agent | None = None,
    ):  # fmt: skip
        self.engine, self.sampling, self.tokenizer, self.folder = engine, sampling, tokenizer, folder
        self.room, self.timeout_s, self.overlong, self.stopping, self.agent = room, timeout_s, overlong, stopping, agent
        self._gate: tuple[Any, asyncio.Semaphore] | None = None

    async def produce(self, label: str, asks: list[Ask], oldest: int, score: Scorer) -> Share:
        """The groups asked for. oldest: version of weights below which a rollout found on disk does not count."""
        journal = Journal(self.folder, label, self.engine.replica)
        progress = Progress(label, len(asks), sum(len(ask.seeds) for ask in asks))
        tasks = [asyncio.create_task(self._group(ask, journal, oldest, score, progress)) for ask in asks]
        left = set(tasks)
        try:
            while left:
                done, left = await asyncio.wait(left, timeout=LOOK_S, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()  # raises what it met
                if left and self.stopping():
                    return Share({}, progress.stats(), stopped=True)
                progress.tell()
        finally:
            await _cancel(left)
            journal.close()
        return Share({ask.group_id: task.result() for ask, task in zip(asks, tasks)}, progress.stats())

    async def _group(self, ask: Ask, journal: Journal, oldest: int, score: Scorer, progress: Progress) -> list[Rollout]:
        episodes = await _together([self._episode(ask, index, journal, oldest, progress) for index in range(len(ask.seeds))])
        rollouts = [row for rows in episodes for row in rows]
        scores = journal.scores_of(rollouts)
        if scores is None:
            scores = await scores_of(Group(ask.group_id, ask.prompt, rollouts), score)
            scores = [self._penalised(*pair) for pair in zip(episodes, scores)]
            journal.add_scores(rollouts, scores)
        for rows, its in zip(episodes, scores):
            hand_out(rows, its)
            if its.reward is None:
                log.warning("%s is invalid: %s", rows[0].rollout_id, its.reason or "no reason was given")
        progress.groups_done += 1
        return rollouts

    async def _episode(self, ask: Ask, index: int, journal: Journal, oldest: int, progress: Progress) -> list[Rollout]:
        known = journal.rollouts.get((ask.group_id, index))
        if known is not None and self._usable(known, ask, index, oldest):
            progress.add(known, reused=True)
            return known
        names = {"group_id": ask.group_id, "index": index, "seed": ask.seeds[index]}
        async with self._room():
            try:
                async with asyncio.timeout(self.timeout_s):
                    rows = await episode(
                        self.engine, ask.prompt, self.sampling, tokenizer=self.tokenizer, agent=self.agent, trace=journal.trace,
                        **names,
                    )  # fmt: skip
            except TimeoutError:
                reason = f"no end within collect.timeout_s={self.timeout_s:g} s"
                rows = [failed(ask.prompt, self.sampling, reason=reason, agent=self.agent, **names)]
            except OSError as error:  # the engine's server is out of reach after all retries: not the model's fault
                reason = f"generation: {type(error).__name__}: {error}"
                rows = [failed(ask.prompt, self.sampling, reason=reason, agent=self.agent, **names)]
        journal.add_rollout(rows)
        progress.add(rows)
        return rows

    def _usable(self, known: list[Rollout], ask: Ask, index: int, oldest: int) -> bool:
        """Whether a rollout found on disk is the one that would be generated now, by weights that are new enough."""
        return (
            known[0].prompt_ids == list(ask.prompt.ids)
            and known[0].seed == ask.seeds[index]
            and known[0].sampling == recorded(self.sampling, self.agent)
            and all(version >= oldest for row in known for version in row.weight_version if version >= 0)
        )

    def _room(self) -> asyncio.Semaphore:
        """First come, first served, so the earliest batch is served first."""
        loop = asyncio.get_running_loop()
        if self._gate is None or self._gate[0] is not loop:
            self._gate = loop, asyncio.Semaphore(self.room)
        return self._gate[1]

    def _penalised(self, rows: list[Rollout], score: Score) -> Score:
        if score.reward is None or self.overlong is None:
            return score
        penalty = soft_overlong(sum(sum(row.sampled_mask) for row in rows), self.overlong)
        return Score(score.reward + penalty, score.turn_rewards, {**score.parts, "overlong": penalty}, score.reason)


def hand_out(rows: list[Rollout], score: Score) -> None:
    """Write the score of an episode on its rows, and the reward of each turn of the model into that turn.

    ValueError when the turn rewards are not one for each turn of the model.
    """
    turns = [turn for row in rows for turn in row.turns if turn.kind == "assistant"]
    if score.turn_rewards is not None and len(score.turn_rewards) != len(turns):
        raise ValueError(
            f"the reward gave {len(score.turn_rewards)} turn rewards for the {len(turns)} turns of the model in "
            f"{rows[0].rollout_id}: one each is needed"
        )
    for turn, reward in zip(turns, score.turn_rewards or ()):
        turn.reward = reward
    for row in rows:
        row.score = score


async def scores_of(group: Group, score: Scorer) -> list[Score]:
    """One Score per episode. Those that were not generated keep their reason; a reward that is no finite number is none.

    ValueError when the reward gives another number of scores than there are episodes.
    """
    episodes = group.episodes
    valid = [rows for rows in episodes if rows[-1].status != "invalid"]
    given = await score(Group(group.group_id, group.prompt, [row for rows in valid for row in rows])) if valid else []
    if len(given) != len(valid):
        raise ValueError(
            f"the reward gave {len(given)} scores for the {len(valid)} rollouts of group {group.group_id}: one each is needed"
        )
    rest = iter(given)
    scores = [rows[-1].score if rows[-1].status == "invalid" else next(rest) for rows in episodes]
    return [
        score if score.reward is None or math.isfinite(score.reward)
        else Score(None, score.turn_rewards, score.parts, f"the reward is {score.reward}")
        for score in scores
    ]  # fmt: skip


class Progress:
    """How far a replica's share of a batch is, told on long collects."""

    def __init__(self, label: str, groups: int, rollouts: int):
        self.label, self.groups, self.rollouts = label, groups, rollouts
        self.groups_done = self.rollouts_done = self.reused = self.tokens = 0
        self.began = self.last = self.told = time.perf_counter()

    def add(self, rows: list[Rollout], reused: bool = False) -> None:
        """Note a finished episode."""
        self.rollouts_done += 1
        self.reused += reused
        self.tokens += 0 if reused else sum(sum(row.sampled_mask) for row in rows)
        self.last = time.perf_counter()

    def tell(self) -> None:
        """A line every TELL_S."""
        now = time.perf_counter()
        if now - self.told < TELL_S:
            return
        self.told, fresh = now, max(self.rollouts_done - self.reused, 1)
        left = (now - self.began) / fresh * (self.rollouts - self.rollouts_done)
        log.info("%s: %d/%d rollouts, %d/%d groups scored, %.0f tokens/s, about %.0f s left", self.label, self.rollouts_done,
                 self.rollouts, self.groups_done, self.groups, self.tokens / (now - self.began), left)  # fmt: skip

    def stats(self) -> dict[str, float]:
        """scoring_s: what scoring took beyond the last rollout; the rest ran beside generation."""
        return {
            "generation_s": self.last - self.began,
            "scoring_s": time.perf_counter() - self.last,
            "reused": self.reused,
            "generated_tokens": self.tokens,
        }


async def _together(works: list[Coroutine]) -> list:
    """Results of all; the first error cancels the others before it is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await _cancel(tasks)
        raise


async def _cancel(tasks) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
