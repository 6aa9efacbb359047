"""Credit: scores -> advantages and loss weights on training rows. What makes one algorithm another is written here.

    advantage        baseline                    scale             source
    grpo             mean of the group           std of the group  arXiv 2402.03300
    dr_grpo          mean of the group           1                 arXiv 2503.20783
    rloo             mean of the group's others  1                 arXiv 2402.14740
    reinforce_pp     mean of the batch           std of the batch  arXiv 2501.03262

A_i = (r_i - baseline) / (scale + eps). Rewards that are all equal (max = min, decided before dividing) give exactly 0, and so
does a group of one. Groups go by id. An advantage belongs to a rollout, however many rows it became; invalid rollouts (no
score, no finite reward, status "invalid") are in no mean, no spread and no row.

    reduction   loss weight of a token               count (the divisor is the sum over the batch)
    token       1                                    trained tokens
    sequence    1 / trained tokens of its rollout    1 a rollout
    constant    1 / max_tokens (Dr.GRPO)             1 a rollout
    turn        1 / trained tokens of its turn       turns with trained tokens

Turn credit, with r_t the turn rewards of a rollout in order, omega = turn_weight:
    recipe    A_{i,t} = A_i + omega (r_t - mean over the group's turns) / (std over them + eps)
    unbiased  A_{i,t} = A_i + omega / max_turns (sum over s >= t of (r_s - b), minus the mean of the same sum over the others)
The second, with rloo and reduction `constant`, follows the gradient of J = E[R + omega sum_t (r_t - b) / max_turns]: b is
frozen (an argument), and a turn with r_t = b adds nothing. A turn without a reward adds nothing in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megatron_nb.records import Group, Rollout, Sample

ADVANTAGES = {  # name -> (compared within, baseline, divided by the spread)
    "grpo": ("group", "mean", True),
    "dr_grpo": ("group", "mean", False),
    "rloo": ("group", "others", False),
    "reinforce_pp": ("batch", "mean", True),
}


@dataclass
class CreditConfig:
    """How rewards become advantages and weights; see the head of the file."""

    advantage: str = "grpo"  # grpo | dr_grpo | rloo | reinforce_pp
    std: str = "population"  # population (1/n) | sample (1/(n-1)): [1,0,0,0] is 1.732/-0.577 or 1.5/-0.5
    eps: float = 1e-6
    reduction: str = "token"  # token | sequence | constant | turn
    max_tokens: int | None = None  # divisor of reduction `constant`
    mask_truncated: bool = False  # answers that ended by length train nothing; their reward still counts in the group
    turn_credit: str | None = None  # recipe | unbiased
    turn_weight: float = 0.0  # omega
    max_turns: int = 600  # N_max of `unbiased`

    def __post_init__(self):
        rules = (
            ("advantage", self.advantage in ADVANTAGES, ", ".join(ADVANTAGES)),
            ("std", self.std in ("population", "sample"), "population or sample"),
            ("eps", self.eps >= 0, "at least 0"),
            ("reduction", self.reduction in ("token", "sequence", "constant", "turn"), "token, sequence, constant or turn"),
            ("max_tokens", self.reduction != "constant" or (self.max_tokens or 0) > 0, "above 0 with reduction=constant"),
            ("turn_credit", self.turn_credit in (None, "recipe", "unbiased"), "recipe, unbiased or null"),
            ("turn_weight", self.turn_weight == 0 or self.turn_credit is not None, "0 without credit.turn_credit"),
            ("max_turns", self.max_turns >= 1, "at least 1"),
            ("advantage", self.turn_credit != "unbiased" or self.advantage == "rloo",
             "rloo with turn_credit=unbiased: a spread or a mean that holds the rollout itself would bias it"),
        )  # fmt: skip
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"credit.{name}={getattr(self, name)!r} must be {rule}")


@dataclass
class _Episode:
    """All rows of one rollout, in order."""

    rows: list[Rollout]
    reward: float | None  # None: invalid
    advantage: float = 0.0
    turns: np.ndarray | None = None  # [turns of all rows] advantage to be added, by turn

    @property
    def turn_rewards(self) -> np.ndarray:
        """[turns of all rows]; NaN where a turn has no reward."""
        return np.array([math.nan if t.reward is None else t.reward for row in self.rows for t in row.turns], np.float64)


def credit(groups: list[Group], config: CreditConfig, turn_baseline: float = 0.0) -> tuple[list[Sample], dict[str, float]]:
    """Training rows of all valid rollouts that train something, and what to log. Writes Rollout.advantage.

    turn_baseline: b of `unbiased`, from earlier steps. Rows keep the order of the groups. Raises ValueError for a rollout
    whose per-token fields are not equally long.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    by_group: dict[str, dict[str, _Episode]] = {}
    for rollout in rollouts:
        _check(rollout)
        episodes = by_group.setdefault(rollout.group_id, {})
        episodes.setdefault(rollout.rollout_id, _Episode([], None)).rows.append(rollout)
    everyone = [episode for episodes in by_group.values() for episode in episodes.values()]
    for episode in everyone:
        episode.rows.sort(key=lambda row: row.segment)
        episode.reward = _reward(episode.rows)
    valid = [[e for e in episodes.values() if e.reward is not None] for episodes in by_group.values()]
    within, baseline, scaled = ADVANTAGES[config.advantage]
    for compared in valid if within == "group" else [[e for group in valid for e in group]]:
        values = advantages([e.reward for e in compared], baseline, scaled, config)
        for episode, value in zip(compared, values):
            episode.advantage = float(value)
    if config.turn_credit is not None:
        for group in valid:
            _credit_turns(group, config, turn_baseline)
    samples = []
    for episode in everyone:
        for row in episode.rows:
            row.advantage = None if episode.reward is None else episode.advantage
        if episode.reward is not None:
            samples += _rows(episode, config)
    return samples, _statistics(everyone, valid)


def advantages(rewards: list[float], baseline: str, scaled: bool, config: CreditConfig) -> np.ndarray:
    """[n] advantages of rewards that are compared with each other."""
    r = np.asarray(rewards, np.float64)
    if len(r) < 2 or r.max() == r.min():
        return np.zeros(len(r))
    centred = r - r.mean()
    if baseline == "others":
        centred = centred * (len(r) / (len(r) - 1))  # r - mean of the others
    return centred / (_spread(r, config) + config.eps) if scaled else centred


def _spread(values: np.ndarray, config: CreditConfig) -> float:
    return float(values.std(ddof=1 if config.std == "sample" else 0))


def _credit_turns(group: list[_Episode], config: CreditConfig, turn_baseline: float) -> None:
    """Write what each turn adds to its rollout's advantage."""
    rewards = [episode.turn_rewards for episode in group]
    if config.turn_credit == "recipe":
        everything = np.concatenate(rewards) if rewards else np.zeros(0)
        known = everything[np.isfinite(everything)]
        flat = len(known) < 2 or known.max() == known.min()
        for episode, r in zip(group, rewards):
            added = np.zeros(len(r)) if flat else (r - known.mean()) / (_spread(known, config) + config.eps)
            episode.turns = config.turn_weight * np.nan_to_num(added)
        return
    longest = max(map(len, rewards), default=0)
    to_go = np.zeros((len(group), longest))  # [n, turns] sum over s >= t of (r_s - b); 0 after the last turn
    for row, r in zip(to_go, rewards):
        row[: len(r)] = np.nan_to_num(r - turn_baseline)[::-1].cumsum()[::-1]
    others = (to_go.sum(0) - to_go) / max(len(group) - 1, 1)
    added = config.turn_weight / config.max_turns * (to_go - others) if len(group) > 1 else np.zeros_like(to_go)
    for episode, r, values in zip(group, rewards, added):
        episode.turns = values[: len(r)]


def _rows(episode: _Episode, config: CreditConfig) -> Iterable[Sample]:
    """One Sample for each row that trains something."""
    if config.mask_truncated and episode.rows[-1].status == "length":
        return
    sampled = [np.asarray(row.sampled_mask, bool) for row in episode.rows]
    trained, counted, first_turn = sum(int(mask.sum()) for mask in sampled), False, 0
    for row, mask in zip(episode.rows, sampled):
        turns = np.asarray(row.turn_id, np.int64)
        value = np.full(len(mask), episode.advantage)
        if episode.turns is not None:
            added = episode.turns[first_turn : first_turn + len(row.turns)]
            value[mask] += added[turns[mask]]
        first_turn += len(row.turns)
        if not mask.any():
            continue
        weight, count = np.zeros(len(mask)), int(not counted)  # a rollout of several rows counts once
        lengths = np.bincount(turns[mask], minlength=1)  # trained tokens by turn
        if config.reduction == "token":
            weight[mask], count = 1.0, int(mask.sum())
        elif config.reduction == "sequence":
            weight[mask] = 1.0 / trained
        elif config.reduction == "constant":
            weight[mask] = 1.0 / config.max_tokens
        else:
            weight[mask], count = 1.0 / lengths[turns[mask]], int(np.count_nonzero(lengths))
        counted = True
        yield _sample(row, weight, np.where(mask, value, 0.0), count)


def _sample(row: Rollout, weight: np.ndarray, advantage: np.ndarray, count: int) -> Sample:
    def stream(values) -> np.ndarray:
        return np.concatenate([np.zeros(len(row.prompt_ids), np.float32), np.asarray(values, np.float32)])

    return Sample(
        ids=np.array([*row.prompt_ids, *row.ids], np.int64),
        loss_weight=stream(weight),
        sample_id=f"{row.rollout_id}/{row.segment}",
        behaviour_logprob=stream(row.logprob),
        advantage=stream(advantage),
        rollout_id=row.rollout_id,
        group_id=row.group_id,
        count=count,
    )


def _check(rollout: Rollout) -> None:
    names = ("ids", "sampled_mask", "logprob", "weight_version", "turn_id")
    lengths = {name: len(getattr(rollout, name)) for name in names}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"rollout {rollout.rollout_id}: {lengths}: per-token fields must be equally long")
    if not rollout.prompt_ids:
        raise ValueError(f"rollout {rollout.rollout_id}: prompt_ids is empty: the first sampled token must follow something")


def _reward(rows: list[Rollout]) -> float | None:
    """The rollout's reward; None where any row or the score is invalid."""
    score = rows[0].score
    if score is None or score.reward is None or not math.isfinite(score.reward) or any(r.status == "invalid" for r in rows):
        return None
    return float(score.reward)


def _statistics(everyone: list[_Episode], valid: list[list[_Episode]]) -> dict[str, float]:
    """Finite numbers for the log; a mean over nothing is left out."""
    rewarded = [episode for group in valid for episode in group]
    stats = {"rollouts": float(len(everyone)), "invalid": float(len(everyone) - len(rewarded)), "groups": float(len(valid))}
    if not rewarded:
        return stats
    rewards = np.array([e.reward for e in rewarded])
    lengths = np.array([sum(sum(row.sampled_mask) for row in e.rows) for e in rewarded], np.float64)
    flat = [len({e.reward for e in group}) < 2 for group in valid]
    stats |= {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "zero_advantage_groups": float(np.mean(flat)),
        "advantage_abs": float(np.mean([abs(e.advantage) for e in rewarded])),
        "length_mean": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "truncated": float(np.mean([e.rows[-1].status == "length" for e in rewarded])),
        "turns_mean": float(np.mean([sum(len(row.turns) for row in e.rows) for e in rewarded])),
    }
    turn_rewards = np.concatenate([e.turn_rewards for e in rewarded])
    if np.isfinite(turn_rewards).any():
        stats["turn_reward_mean"] = float(np.nanmean(turn_rewards))
    for name in sorted({name for e in rewarded for name in e.rows[0].score.parts}):
        parts = [e.rows[0].score.parts[name] for e in rewarded if name in e.rows[0].score.parts]
        stats[f"reward_part/{name}"] = float(np.mean(parts))
    return stats
