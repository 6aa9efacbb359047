"""Rollouts of a run as its files hold them: reading, selecting, numbers by group and step, and what changed between two steps.

    runs/NAME/rollouts/step-N.jsonl     one row per Rollout (records.py) with "prompt" (messages) and, optional, "ratio"
              rollouts/heldout-N.jsonl  the same of the held-out prompts, asked after step N

A rollout without a reward is invalid and enters no mean. Only the standard library is needed.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Episode:
    """One answer to one prompt: its rows, which are several when the context was cut on the way."""

    step: int
    rows: list[dict[str, Any]]  # by segment

    @property
    def group_id(self) -> str:
        return self.rows[0]["group_id"]

    @property
    def index(self) -> int:
        return self.rows[0]["index"]

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """Messages."""
        return self.rows[0]["prompt"]

    @property
    def text(self) -> str:
        """The last answer, thinking included."""
        return self.rows[-1]["text"]

    @property
    def score(self) -> dict[str, Any]:
        return self.rows[-1].get("score") or {}

    @property
    def reward(self) -> float | None:
        """None: invalid."""
        reward = self.score.get("reward")
        usable = self.rows[-1]["status"] != "invalid" and reward is not None and math.isfinite(reward)
        return reward if usable else None

    @property
    def status(self) -> str:
        return self.rows[-1]["status"] if self.reward is not None else "invalid"

    @property
    def ended(self) -> str:
        """How generation ended, whatever the reward said."""
        return self.rows[-1]["status"]

    @property
    def reason(self) -> str:
        if self.score.get("reason") or self.reward is not None:
            return self.score.get("reason", "")
        if "reward" not in self.score:
            return "it was never scored"
        return "no reason was given"

    @property
    def advantage(self) -> float | None:
        return self.rows[-1].get("advantage")

    @property
    def length(self) -> int:
        """Sampled tokens."""
        return sum(sum(row["sampled_mask"]) for row in self.rows)

    @property
    def versions(self) -> list[int]:
        """Of the weights that sampled it, in order."""
        return sorted({version for row in self.rows for version in row["weight_version"] if version >= 0})


@dataclass
class Numbers:
    """Of a group or of a step; reward, spread and length are None where there is nothing to take them from."""

    groups: int
    rollouts: int
    invalid: int
    reward: float | None
    lowest: float | None
    highest: float | None
    spread: float | None  # population standard deviation within a group, mean over groups
    equal: int  # groups whose valid rewards are all equal: they teach nothing
    length: float | None
    truncated: int


def step_files(run: Path, kind: str = "step") -> dict[int, Path]:
    """{step: file} in order; kind: step or heldout. ValueError when the run has none."""
    if not run.is_dir():
        raise ValueError(f"{run} is not a folder: give the folder of a run, such as runs/NAME")
    files = {}
    for path in (run / "rollouts").glob(f"{kind}-*.jsonl"):
        if name := re.fullmatch(rf"{kind}-(\d+)", path.stem):
            files[int(name[1])] = path
    if not files:
        raise ValueError(f"{run}/rollouts holds no {kind}-N.jsonl: `python -m megatron_nb.rl` writes one with every step")
    return dict(sorted(files.items()))


def read_step(path: Path, step: int) -> list[Episode]:
    """The episodes of one file, by group and index.

    A last line without its end is left out: a kill, or a writer at work, leaves one. ValueError for any other bad line.
    """
    episodes: dict[tuple[str, int], Episode] = {}
    lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: answers may hold other line breaks
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            key = (row["group_id"], row["index"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            told = f"{path}:{number} is no rollout ({error!r}): it was not written by a run, or was edited"
            raise ValueError(told) from error
        episodes.setdefault(key, Episode(step, [])).rows.append(row)
    for episode in episodes.values():
        episode.rows.sort(key=lambda row: row["segment"])
    order = {name: place for place, name in enumerate(dict.fromkeys(name for name, _ in episodes))}
    return sorted(episodes.values(), key=lambda episode: (order[episode.group_id], episode.index))


def by_group(episodes: Iterable[Episode]) -> dict[tuple[int, str], list[Episode]]:
    """{(step, group_id): its episodes}, in the order met."""
    groups: dict[tuple[int, str], list[Episode]] = {}
    for episode in episodes:
        groups.setdefault((episode.step, episode.group_id), []).append(episode)
    return groups


def numbers(episodes: list[Episode]) -> Numbers:
    """The numbers of these episodes, whichever groups they belong to."""
    rewards = [[e.reward for e in group if e.reward is not None] for group in by_group(episodes).values()]
    flat = [reward for group in rewards for reward in group]
    spreads = [statistics.pstdev(group) for group in rewards if group]
    return Numbers(
        groups=len(rewards),
        rollouts=len(episodes),
        invalid=len(episodes) - len(flat),
        reward=statistics.fmean(flat) if flat else None,
        lowest=min(flat, default=None),
        highest=max(flat, default=None),
        spread=statistics.fmean(spreads) if spreads else None,
        equal=sum(len(group) > 0 and len(set(group)) == 1 for group in rewards),
        length=statistics.fmean(e.length for e in episodes) if episodes else None,
        truncated=sum(e.ended == "length" for e in episodes),
    )


def parse_range(text: str) -> tuple[float, float]:
    """"0.2:0.8", "0.5:" or ":0" -> bounds, both included. ValueError."""
    low, colon, high = text.partition(":")
    try:
        bounds = (float(low or "-inf"), float(high or "inf"))
    except ValueError:
        bounds = (math.nan, math.nan)
    if not colon or not bounds[0] <= bounds[1]:
        raise ValueError(f"--reward {text} must be LO:HI with LO <= HI; either may be left out, as in 0.5: or :0")
    return bounds


SORTS: dict[str, Callable[[Episode], float | None]] = {
    "reward": lambda episode: episode.reward,
    "length": lambda episode: episode.length,
    "advantage": lambda episode: episode.advantage,
}


def select(
    episodes: list[Episode], *, reward: tuple[float, float] | None = None, status: list[str] | None = None,
    group: str | None = None, sort: str | None = None, reverse: bool = False,
) -> list[Episode]:  # fmt: skip
    """Those that meet every condition; sorted, highest first (`reverse`: lowest), those without a value last."""
    found = [
        e
        for e in episodes
        if (group is None or e.group_id == group)
        and (not status or e.status in status)
        and (reward is None or (e.reward is not None and reward[0] <= e.reward <= reward[1]))
    ]
    if sort:
        value, sign = SORTS[sort], 1 if reverse else -1
        found.sort(key=lambda e: (value(e) is None, sign * (value(e) or 0)))
    return found


@dataclass
class Change:
    """One prompt in two steps."""

    before: list[Episode]
    after: list[Episode]

    def of(self, name: str) -> float | None:
        """Change of the mean `reward` or `length`; None where a side has no valid rollout."""
        sides = [getattr(numbers(side), name) for side in (self.before, self.after)]
        return None if None in sides else sides[1] - sides[0]

    def best(self) -> tuple[Episode, Episode]:
        """The answers to compare: the best rewarded of each step, the first among equals."""
        worst = -math.inf
        return tuple(
            max(side, key=lambda e: (worst if e.reward is None else e.reward, -e.index)) for side in (self.before, self.after)
        )


def changes(before: list[Episode], after: list[Episode]) -> list[Change]:
    """The prompts that both steps have, known by their messages."""
    sides: list[dict[str, list[Episode]]] = [{}, {}]
    for side, episodes in zip(sides, (before, after)):
        for episode in episodes:
            side.setdefault(json.dumps(episode.prompt, sort_keys=True), []).append(episode)
    return [Change(found, sides[1][prompt]) for prompt, found in sides[0].items() if prompt in sides[1]]


def paired(values: list[float]) -> tuple[float, float | None]:
    """(mean, its standard error) of differences; None for a single one."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error


def visible(text: str) -> str:
    """The text with characters shown that would steer a terminal, turn the direction of reading, or could not be written."""
    steering = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(steering, lambda c: chr(0x2400 + ord(c[0])) if ord(c[0]) < 32 else "\ufffd", text)
