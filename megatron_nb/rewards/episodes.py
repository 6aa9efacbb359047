"""Episodes: all rows of one rollout together, what turns they hold, and what a step's log says of them."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from megatron_nb.records import Group, Rollout


@dataclass
class Episode:
    """All rows of one rollout, by segment. Its turns are those of all rows, one after the other."""

    rows: list[Rollout]
    reward: float | None = None  # None: invalid
    advantage: float = 0.0
    turns: np.ndarray | None = None  # [turns] advantage to be added, by turn

    @property
    def acts(self) -> np.ndarray:
        """[turns] whether the model took the turn."""
        return np.array([turn.kind == "assistant" for row in self.rows for turn in row.turns], bool)

    @property
    def turn_rewards(self) -> np.ndarray:
        """[assistant turns]; NaN where one has no reward."""
        rewards = [turn.reward for row in self.rows for turn in row.turns if turn.kind == "assistant"]
        return np.array([math.nan if reward is None else reward for reward in rewards], np.float64)

    @property
    def length(self) -> int:
        """Sampled tokens."""
        return sum(sum(row.sampled_mask) for row in self.rows)

    def states(self, kind: str) -> list[bytes]:
        """[assistant turns] what the model had been told when the turn began, as a digest; what it said itself is left out.

        history: every tool result so far, in order, whether it still stands in the context or not; observation: the results
        since its last turn.
        """
        told, found = hashlib.blake2b(digest_size=16), []
        for row in self.rows:
            for turn in row.turns:
                if turn.kind != "assistant":
                    told.update(np.asarray(row.ids[turn.start : turn.stop], np.int64).tobytes() + b"|")
                    continue
                found.append(told.digest())
                if kind == "observation":
                    told = hashlib.blake2b(digest_size=16)
        return found


def episodes_of(groups: list[Group]) -> list[list[Episode]]:
    """Episodes by group, in the order in which ids first appear; groups go by id, whatever list a row stands in."""
    by_group: dict[str, dict[str, Episode]] = {}
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        episodes = by_group.setdefault(rollout.group_id, {})
        episodes.setdefault(rollout.rollout_id, Episode([])).rows.append(rollout)
    found = [list(episodes.values()) for episodes in by_group.values()]
    for episode in (episode for group in found for episode in group):
        episode.rows.sort(key=lambda row: row.segment)
        episode.reward = _reward(episode.rows)
    return found


def _reward(rows: list[Rollout]) -> float | None:
    """The rollout's reward; None where any row or the score is invalid."""
    score = rows[0].score
    if score is None or score.reward is None or not math.isfinite(score.reward) or any(r.status == "invalid" for r in rows):
        return None
    return float(score.reward)


# ---------------------------------------------------------------------------------------------- the log
def statistics(everyone: list[Episode], valid: list[list[Episode]]) -> dict[str, float]:
    """Finite numbers for the log; a mean over nothing is left out."""
    rewarded = [episode for group in valid for episode in group]
    stats = {"rollouts": float(len(everyone)), "invalid": float(len(everyone) - len(rewarded)), "groups": float(len(valid))}
    for cause, count in Counter(_cause(episode) for episode in everyone if episode.reward is None).items():
        stats[f"invalid/{cause}"] = float(count)
    if not rewarded:
        return stats
    rewards = np.array([e.reward for e in rewarded])
    lengths = np.array([e.length for e in rewarded], np.float64)
    flat = [len({e.reward for e in group}) < 2 for group in valid]
    stats |= {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "zero_advantage_groups": float(np.mean(flat)),
        "advantage_abs": float(np.mean([abs(e.advantage) for e in rewarded])),
        "length_mean": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "truncated": float(np.mean([e.rows[-1].status == "length" for e in rewarded])),
    }
    stats |= _of_turns(rewarded)
    for name in sorted({name for e in rewarded for name in e.rows[0].score.parts}):
        parts = [e.rows[0].score.parts[name] for e in rewarded if name in e.rows[0].score.parts]
        stats[f"reward_part/{name}"] = float(np.mean(parts))
    return stats


def _of_turns(episodes: list[Episode]) -> dict[str, float]:
    """Turns of the model, what it called and how that went, how episodes ended; those of agents only where there are tools."""
    acts = [int(episode.acts.sum()) for episode in episodes]
    stats = {"turns_mean": float(np.mean(acts)), "turns_max": float(max(acts))}
    turns = [turn for episode in episodes for row in episode.rows for turn in row.turns]
    tools = [turn.status for turn in turns if turn.kind == "tool"]
    asked = [turn for turn in turns if turn.kind == "assistant"]
    if tools or any(len(episode.rows) > 1 for episode in episodes):
        stats |= {
            "calls_mean": sum(turn.calls for turn in asked) / len(episodes),
            "malformed": sum(turn.status == "malformed" for turn in asked) / max(len(asked), 1),
            "tool_errors": tools.count("error") / max(len(tools), 1),  # shares of the tools' turns
            "tool_failures": tools.count("failed") / max(len(tools), 1),
            "context_restarts": sum(len(episode.rows) - 1 for episode in episodes) / len(episodes),
        }
        for status, count in Counter(episode.rows[-1].status for episode in episodes).items():
            stats[f"ended/{status}"] = count / len(episodes)
    rewards = np.concatenate([episode.turn_rewards for episode in episodes])
    if np.isfinite(rewards).any():
        stats["turn_reward_mean"] = float(np.nanmean(rewards))
    return stats


def _cause(episode: Episode) -> str:
    """The first words of why a rollout is invalid: a term's name, "generation", "tools", ... as part of a metric's name."""
    score = next((row.score for row in episode.rows if row.score is not None), None)
    words = re.match(r"[A-Za-z_][\w. -]*", score.reason if score else "")
    return "_".join(re.sub(r"\d+", "", words[0]).split()[:6]).strip("._-") or "unknown" if words else "unknown"
