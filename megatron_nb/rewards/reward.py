"""The reward protocol: a group of rollouts in, one Score for each out; and rewards composed of terms.

    total = sum over terms of weight * value          0 when the value of a gate is 0

Gates are asked first, in the order of the configuration; a rollout whose gate gives 0 has total 0, and the terms after it are
not asked about it (one that compares the rollouts of a group still sees it). A gate that gives another value counts like any
term: with weight 0 it only lets pass. The other terms are asked at the same time. A term that fails (exception, None, NaN,
time-out) makes the rollout invalid: reward None, with a reason that names the term and the cause. `parts` keeps the value of
every term that was asked, before its weight, and `reason` what they said.

An episode of several rows is scored once, by its last row (score_episode: by all of them), and its rows share the Score.
See README.md for one's own terms.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megatron_nb.records import Group, Rollout, Score
from megatron_nb.rewards.deadline import Workers
from megatron_nb.rewards.term import Term, find, make_term, method_of, settings_of
from megatron_nb.schema import ConfigError
from megatron_nb.training.checkpoint_folder import resolve

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


class Reward(Protocol):
    """Whatever judges rollouts."""

    async def score(self, group: Group) -> list[Score]:
        """One Score per episode (rows of one rollout), in the order of group.episodes."""


@dataclass
class TermConfig:
    """One term of a reward."""

    kind: str  # one of BUILT_IN in term.py, or your own package.module.Class
    weight: float = 1.0
    gate: bool = False  # a value of 0 makes the whole reward 0
    timeout_s: float | None = None  # None: that of the reward
    settings: dict[str, Any] = field(default_factory=dict)  # of the class


@dataclass
class RewardConfig:
    """Terms by name; see the head of the file."""

    terms: dict[str, TermConfig] = field(default_factory=dict)
    timeout_s: float = 60.0  # of one call of a term, retries included, from when it has begun
    retries: int = 1  # after an exception or a lost worker; clients of endpoints try again by themselves
    concurrency: int = 64  # calls of one term under way at once
    workers: int = 4  # processes for plain (not async) methods, shared by the terms

    def __post_init__(self):
        for name, least in (("timeout_s", 0), ("retries", -1), ("concurrency", 0), ("workers", 0)):
            if getattr(self, name) <= least:
                raise ValueError(f"reward.{name}={getattr(self, name)} must be more than {least}")
        for name, term in self.terms.items():
            if not math.isfinite(term.weight):
                raise ValueError(f"reward.terms.{name}.weight={term.weight} must be a finite number")


def check_reward(config: RewardConfig) -> None:
    """Find every term's class and check its settings, without making it. Raises ConfigError."""
    if not config.terms:
        raise ConfigError("reward.terms is empty: name at least one term, such as reward.terms.answer.kind=math")
    for name, term in config.terms.items():
        target = find(term.kind, f"reward.terms.{name}")
        method_of(target, f"reward.terms.{name}")
        settings = settings_of(target, term.settings, f"reward.terms.{name}")
        if term.kind in ("pass_rate", "gated_complexity"):
            _check_program_reward(f"reward.terms.{name}", term.weight, target, settings)


def _check_program_reward(key: str, weight: float, target: Any, settings: dict[str, Any]) -> None:
    """Refuse what would let a program that fails a test score as high as one that passes all."""
    if weight <= 0:
        raise ConfigError(
            f"{key}.weight={weight} must be more than 0: a program that fails a test must score below one that passes all"
        )
    try:
        target(**settings)  # starts nothing
    except ValueError as error:
        raise ConfigError(f"{key}.settings: {error}") from error


def find_models(config: RewardConfig) -> None:
    """Look up the checkpoints that built-in terms name, so that a wrong path costs no model. Raises ConfigError."""
    for name, term in config.terms.items():
        if term.kind in ("pointwise", "pairwise"):
            try:
                resolve(term.settings["checkpoint"])
            except ValueError as error:
                raise ConfigError(f"reward.terms.{name}.settings.checkpoint: {error}") from None


def find_judges(config: RewardConfig) -> None:
    """Ask terms that need a service or a sandbox whether it answers, before a batch is sampled for it. Raises ConfigError."""
    for name, term in config.terms.items():
        target = find(term.kind, f"reward.terms.{name}")
        if hasattr(target, "ready"):
            try:
                asyncio.run(target(**settings_of(target, term.settings, f"reward.terms.{name}")).ready())
            except (OSError, RuntimeError) as error:
                raise ConfigError(f"reward.terms.{name}: its judge cannot be used: {error}") from error


def build_reward(
    config: RewardConfig, tokenizer: PreTrainedTokenizerBase | None, device: torch.device | str
) -> ComposedReward:
    """The reward that the configuration describes. tokenizer: the policy's. Raises ConfigError (a ValueError)."""
    check_reward(config)
    return ComposedReward(config, {"tokenizer": tokenizer, "device": device})


class ComposedReward:
    """See the head of the file. Usable from one event loop after another."""

    def __init__(self, config: RewardConfig, given: dict[str, Any]):
        self.config, self._workers = config, Workers(config.workers)
        self.terms: dict[str, Term] = {
            name: make_term(
                name, term, config.timeout_s if term.timeout_s is None else term.timeout_s, config.retries, config.concurrency,
                self._workers, given,
            )  # fmt: skip
            for name, term in config.terms.items()
        }

    async def score(self, group: Group) -> list[Score]:
        """One Score per episode, in the order of group.episodes. ValueError when a term gives a list of another length."""
        rows = {episode[-1].index: episode for episode in group.episodes}
        valid = [episode[-1] for episode in rows.values() if episode[-1].status != "invalid"]
        sheets = {rollout.index: _Sheet() for rollout in valid}
        seen = Group(group.group_id, group.prompt, valid)

        def asked() -> list[Rollout]:
            return [rollout for rollout in valid if sheets[rollout.index].open]

        for name, term in self.config.terms.items():
            if term.gate and (rollouts := asked()):
                scores = await self.terms[name].scores(seen, rollouts, rows)
                self._enter(name, rollouts, scores, sheets)
        rollouts = asked()
        others = [name for name, term in self.config.terms.items() if not term.gate] if rollouts else []
        answers = await asyncio.gather(*(self.terms[name].scores(seen, rollouts, rows) for name in others))
        for name, scores in zip(others, answers):
            self._enter(name, rollouts, scores, sheets)
        none = Score(None, reason="the rollout itself is invalid")
        totals = {index: sheet.total() for index, sheet in sheets.items()}
        return [totals.get(index, none) for index in rows]

    def close(self) -> None:
        """End the worker processes; they end with the job anyway."""
        self._workers.close()

    def _enter(self, name: str, rollouts: list[Rollout], scores: list[Score], sheets: dict[int, _Sheet]) -> None:
        term = self.config.terms[name]
        for rollout, score in zip(rollouts, scores):
            sheet = sheets[rollout.index]
            if score.reason:
                sheet.reasons.append(f"{name}: {score.reason}")
            if score.reward is None:
                sheet.failed = True
                continue
            sheet.parts |= {name: score.reward, **{f"{name}/{part}": value for part, value in score.parts.items()}}
            sheet.shut = sheet.shut or (term.gate and score.reward == 0)
            sheet.sum += term.weight * score.reward
            if score.turn_rewards is not None:
                if sheet.turn_rewards is not None:
                    raise ValueError(f"reward.terms.{name} gives turn rewards, as another term does: one term may")
                sheet.turn_rewards = score.turn_rewards


@dataclass
class _Sheet:
    """What the terms have said of one rollout so far."""

    sum: float = 0.0
    failed: bool = False
    shut: bool = False  # by a gate
    parts: dict[str, float] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    turn_rewards: list[float] | None = None

    @property
    def open(self) -> bool:
        return not (self.failed or self.shut)

    def total(self) -> Score:
        reward = None if self.failed else 0.0 if self.shut else self.sum
        return Score(reward, self.turn_rewards, self.parts, "; ".join(self.reasons))
