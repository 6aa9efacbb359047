"""Answers to the held-out prompts: what the reward trained on says of them, what a judge says, and how often they win.

The same seeds at every evaluation, so two of them differ by their weights alone. The answers of step 0 are those of the
starting model: later ones are compared with them, prompt by prompt, by a pair-wise judge.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from megatron_nb.records import Group, Prompt, Rollout, Score
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
    """Evaluation on the held-out prompts of a run. Scorers are called on leaders alone; elsewhere anything but None will do."""

    def __init__(
        self, collector: Collector, prompts: list[Prompt], samples: int, folder: Path, *,
        judge: Scorer | None, versus: Scorer | None, relative: tuple[bool, bool] = (False, False), writes: bool,
    ):  # fmt: skip
        """versus: gives each of a group's two rollouts its probability to be better. writes: whether this rank writes files.

        relative: whether reward and judge compare the rollouts of a group; they are then asked about an answer beside the
        starting model's, since a mean over answers that are compared with each other would say nothing.
        """
        self.collector, self.prompts, self.samples, self.folder = collector, prompts, samples, folder
        self.judge, self.versus, self.writes = judge, versus, writes
        self.relative_reward, self.relative_judge = relative
        self._start: list[Group] | None = None

    def evaluate(self, step: int) -> dict[str, float]:
        """Collective. Means over the prompts, and standard errors over them. Interrupted when asked to stop."""
        start = self._start or self._read_start()
        score = partial(self._beside_start, start) if self.relative_reward else None
        groups, _ = self.collector.answers("heldout", step, self.prompts, self.samples, score)
        if step == 0:
            start = self._start = groups
        told = _means("heldout_reward", [[rows[-1].score for rows in group.episodes] for group in groups])
        episodes = [rows for group in groups for rows in group.episodes]
        answers = [rows for rows in episodes if rows[-1].status != "invalid"]
        lengths = [sum(sum(row.sampled_mask) for row in rows) for rows in answers]
        told["heldout_length"] = float(np.mean(lengths)) if answers else math.nan
        told["heldout_truncated"] = float(np.mean([rows[-1].status == "length" for rows in answers])) if answers else math.nan
        told["heldout_invalid"] = float(np.mean([rows[-1].score.reward is None for rows in episodes]))
        for name, judge, relative in (
            ("heldout_judge", self.judge, self.relative_judge), ("heldout_win_rate", self.versus, True),
        ):  # fmt: skip
            if judge is None or (relative and start is None):
                continue
            if relative:
                firsts = [scores[0] for scores in self.collector.judge(_pairs(groups, start), judge)]
                scores = [firsts[i : i + self.samples] for i in range(0, len(firsts), self.samples)]
            else:
                scores = self.collector.judge(groups, judge)
            told |= self._told(groups, name, scores)
        if self.writes:
            write_step(self.folder, step, groups, kind="heldout")
        return told

    async def _beside_start(self, start: list[Group] | None, group: Group) -> list[Score]:
        """The reward of each rollout in a group of two with the starting model's answer; with itself where there is none."""
        place = int(group.group_id.split(".")[1])
        pairs = _pairs([group], [start[place] if start else group])
        scored = await asyncio.gather(*(self.collector.score(pair) for pair in pairs))
        return [scores[0] for scores in scored]

    def _told(self, groups: list[Group], name: str, scores: list[list[Score]]) -> dict[str, float]:
        """Means of a judge's scores, which also go into the file beside the reward's own parts."""
        for group, its in zip(groups, scores):
            for rows, score in zip(group.episodes, its):
                if score.reward is not None and rows[-1].score is not None:
                    rows[-1].score.parts[name] = score.reward  # all its rows have this score
        return _means(name, scores)

    def _read_start(self) -> list[Group] | None:
        """The starting model's answers of an earlier attempt; None when their file is gone."""
        if not step_file(self.folder, 0, "heldout").exists():
            return None
        groups: dict[str, list[Rollout]] = {}
        for row in read_step(self.folder, 0, "heldout"):
            groups.setdefault(row.group_id, []).append(row)
        self._start = [Group(name, prompt, its) for prompt, (name, its) in zip(self.prompts, groups.items(), strict=True)]
        return self._start


def _pairs(groups: list[Group], start: list[Group]) -> list[Group]:
    """A group of two for every episode: itself, and the starting model's answer with the same seed."""
    pairs = []
    for group, then in zip(groups, start):
        first = {rows[0].index: rows for rows in then.episodes}
        for rows in group.episodes:
            index = rows[0].index
            both = [replace(row, index=place) for place, its in enumerate((rows, first[index])) for row in its]
            pairs.append(Group(f"{group.group_id}/{index}", group.prompt, both))
    return pairs


def _means(name: str, scores: list[list[Score]]) -> dict[str, float]:
    """Mean over prompts of their mean reward, with its standard error; NaN where nothing is valid."""
    valid = [[score.reward for score in its if score.reward is not None] for its in scores]
    by_prompt = np.array([np.mean(its) for its in valid if its])
    if not len(by_prompt):
        return {name: math.nan, f"{name}_error": math.nan}
    error = by_prompt.std(ddof=1) / math.sqrt(len(by_prompt)) if len(by_prompt) > 1 else 0.0
    return {name: float(by_prompt.mean()), f"{name}_error": float(error)}
