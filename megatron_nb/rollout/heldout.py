"""Answers to the held-out prompts: what the reward trained on says of them, what a judge says, and how often they win.

The same seeds at every evaluation, so two of them differ by their weights alone. The answers of step 0 are those of the
starting model: later ones are compared with them, prompt by prompt, by a pair-wise judge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_nb.records import Group, Prompt, Score
from megatron_nb.rollout.collect import Collector
from megatron_nb.rollout.produce import Scorer
from megatron_nb.rollout.store import read_step, step_file, write_step


@dataclass
class EvaluationConfig:
    """How often the held-out prompts are answered."""

    every: int = 20  # updates; before the first and after the last always
    samples: int = 1  # answers to a prompt

    def __post_init__(self):
        for name in ("every", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"evaluation.{name}={getattr(self, name)} must be at least 1")


class Heldout:
    """Evaluation on the held-out prompts of a run. judge, versus: scorers on leaders, anything but None elsewhere."""

    def __init__(
        self, collector: Collector, prompts: list[Prompt], samples: int, folder: Path, *,
        judge: Scorer | None, versus: Scorer | None, writes: bool,
    ):  # fmt: skip
        """versus: gives the first of two rollouts of a group its probability to be better; writes: whether this rank does."""
        self.collector, self.prompts, self.samples, self.folder = collector, prompts, samples, folder
        self.judge, self.versus, self.writes = judge, versus, writes
        self._start: list[Group] | None = None

    def evaluate(self, step: int) -> dict[str, float]:
        """Collective. Means over the prompts, and standard errors over them. Interrupted when asked to stop."""
        groups, _ = self.collector.answers("heldout", step, self.prompts, self.samples)
        told = _means("heldout_reward", [[rollout.score for rollout in group.rollouts] for group in groups])
        answers = [rollout for group in groups for rollout in group.rollouts if rollout.status != "invalid"]
        told["heldout_length"] = float(np.mean([sum(rollout.sampled_mask) for rollout in answers]))
        told["heldout_truncated"] = float(np.mean([rollout.status == "length" for rollout in answers]))
        told["heldout_invalid"] = 1 - sum(r.score.reward is not None for g in groups for r in g.rollouts) / sum(
            len(group.rollouts) for group in groups
        )
        if self.judge is not None:
            told |= self._told(groups, "heldout_judge", self.collector.judge(groups, self.judge))
        if step == 0:
            self._start = groups
        start = self._start or self._read_start()
        if self.versus is not None and start is not None:
            pairs = [
                Group(f"{now.group_id}/{a.index}", now.prompt, [a, b])
                for now, then in zip(groups, start)
                for a, b in zip(now.rollouts, then.rollouts)
            ]
            wins = [scores[:1] for scores in self.collector.judge(pairs, self.versus)]
            by_group = [sum(wins[i : i + self.samples], []) for i in range(0, len(wins), self.samples)]
            told |= self._told(groups, "heldout_win_rate", by_group)
        if self.writes:
            write_step(self.folder, step, groups, kind="heldout")
        return told

    def _told(self, groups: list[Group], name: str, scores: list[list[Score]]) -> dict[str, float]:
        """Means of a judge's scores, which also go into the file beside the reward's own parts."""
        for group, its in zip(groups, scores):
            for rollout, score in zip(group.rollouts, its):
                if score.reward is not None and rollout.score is not None:
                    rollout.score.parts[name] = score.reward
        return _means(name, scores)

    def _read_start(self) -> list[Group] | None:
        """The starting model's answers of an earlier attempt; None when their file is gone."""
        if not step_file(self.folder, 0, "heldout").exists():
            return None
        rollouts = iter(read_step(self.folder, 0, "heldout"))
        groups = [[next(rollouts) for _ in range(self.samples)] for _ in self.prompts]
        self._start = [Group(its[0].group_id, prompt, its) for prompt, its in zip(self.prompts, groups)]
        return self._start


def _means(name: str, scores: list[list[Score]]) -> dict[str, float]:
    """Mean over prompts of their mean reward, with its standard error; NaN where nothing is valid."""
    valid = [[score.reward for score in its if score.reward is not None] for its in scores]
    by_prompt = np.array([np.mean(its) for its in valid if its])
    if not len(by_prompt):
        return {name: math.nan, f"{name}_error": math.nan}
    error = by_prompt.std(ddof=1) / math.sqrt(len(by_prompt)) if len(by_prompt) > 1 else 0.0
    return {name: float(by_prompt.mean()), f"{name}_error": float(error)}
