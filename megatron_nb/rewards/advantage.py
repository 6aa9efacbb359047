"""Credit: scores -> advantages and loss weights on training rows. What makes one algorithm another is written here.

    advantage        baseline                    scale             source
    grpo             mean of the group           std of the group  arXiv 2402.03300
    dr_grpo          mean of the group           1                 arXiv 2503.20783
    rloo             mean of the group's others  1                 arXiv 2402.14740
    reinforce_pp     mean of the batch           std of the batch  arXiv 2501.03262

A_i = (r_i - baseline) / (scale + eps). Rewards that are all equal (max = min, decided before dividing) give exactly 0, and so
does a group of one. Groups go by id. An advantage belongs to a rollout, however many rows it became; invalid rollouts (no
score, no finite reward, status "invalid") are in no mean, no spread and no row.

    reduction       loss weight of a token                        count (the divisor is the sum over the batch)
    token           1                                             trained tokens
    sequence        1 / trained tokens of its rollout             1 a rollout
    constant        1 / max_tokens (Dr.GRPO)                      1 a rollout
    turn            1 / trained tokens of its turn                turns with trained tokens
    turn_constant   1 / (trained tokens of its turn * max_turns)  1 a rollout

A rollout of several rows weighs as it would in one: its first row that trains carries the count. The last two normalise each
turn's length; `turn` lets a rollout weigh as much as it has turns, by a divisor that depends on them, `turn_constant` does not.
Turn credit (turn_credit: recipe | unbiased | gigpo) adds to A_i what turn_credit.py says; with turn_weight 0 nothing at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megatron_nb.records import Group, Rollout, Sample
from megatron_nb.rewards import turn_credit
from megatron_nb.rewards.episodes import Episode, episodes_of, statistics

ADVANTAGES = {  # name -> (compared within, baseline, divided by the spread)
    "grpo": ("group", "mean", True),
    "dr_grpo": ("group", "mean", False),
    "rloo": ("group", "others", False),
    "reinforce_pp": ("batch", "mean", True),
}
REDUCTIONS = ("token", "sequence", "constant", "turn", "turn_constant")


@dataclass
class CreditConfig:
    """How rewards become advantages and weights; see the head of the file."""

    advantage: str = "grpo"  # grpo | dr_grpo | rloo | reinforce_pp
    std: str = "population"  # population (1/n) | sample (1/(n-1)): [1,0,0,0] is 1.732/-0.577 or 1.5/-0.5
    eps: float = 1e-6
    reduction: str = "token"  # token | sequence | constant | turn | turn_constant
    max_tokens: int | None = None  # divisor of reduction `constant`
    mask_truncated: bool = False  # answers that ended by length train nothing; their reward still counts in the group
    turn_credit: str | None = None  # recipe | unbiased | gigpo
    turn_weight: float = 0.0  # omega
    max_turns: int = 600  # N of `unbiased` and of reduction `turn_constant`
    baseline_decay: float = 0.9  # of b, the running mean of the turn rewards of earlier steps
    discount: float = 0.95  # gamma of gigpo
    states: str = "history"  # of gigpo, equal where the model was told the same: history (since the start) | observation (last)

    def __post_init__(self):
        rules = (
            ("advantage", self.advantage in ADVANTAGES, ", ".join(ADVANTAGES)),
            ("std", self.std in ("population", "sample"), "population or sample"),
            ("eps", self.eps >= 0, "at least 0"),
            ("reduction", self.reduction in REDUCTIONS, ", ".join(REDUCTIONS)),
            ("max_tokens", self.reduction != "constant" or (self.max_tokens or 0) > 0, "above 0 with reduction=constant"),
            ("turn_credit", self.turn_credit in (None, "recipe", "unbiased", "gigpo"), "recipe, unbiased, gigpo or null"),
            ("turn_weight", self.turn_weight >= 0 and math.isfinite(self.turn_weight), "a finite number, at least 0"),
            ("turn_weight", self.turn_weight == 0 or self.turn_credit is not None, "0 without credit.turn_credit"),
            ("max_turns", self.max_turns >= 1, "at least 1"),
            ("baseline_decay", 0 <= self.baseline_decay <= 1, "in 0..1"),
            ("discount", 0 <= self.discount <= 1, "in 0..1"),
            ("states", self.states in ("history", "observation"), "history or observation"),
            ("advantage", self.turn_credit != "unbiased" or self.advantage == "rloo",
             "rloo with turn_credit=unbiased: a spread or a mean that holds the rollout itself would bias it"),
            ("mask_truncated", not self.mask_truncated or self.turn_credit != "unbiased",
             "false with turn_credit=unbiased: leaving rollouts out by how they ended would bias it"),
        )  # fmt: skip
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"credit.{name}={getattr(self, name)!r} must be {rule}")


def credit(
    groups: list[Group], config: CreditConfig, turn_baseline: float | None = None
) -> tuple[list[Sample], dict[str, float]]:
    """Training rows of all valid rollouts that train something, and what to log. Writes Rollout.advantage.

    turn_baseline: b, from earlier steps; None: not known yet, so `unbiased` adds nothing. Rows keep the order of the groups.
    Raises ValueError for a rollout whose per-token fields are not equally long.
    """
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        _check(rollout)
    by_group = episodes_of(groups)
    everyone = [episode for episodes in by_group for episode in episodes]
    valid = [[episode for episode in episodes if episode.reward is not None] for episodes in by_group]
    within, baseline, scaled = ADVANTAGES[config.advantage]
    for compared in valid if within == "group" else [[e for group in valid for e in group]]:
        values = advantages([e.reward for e in compared], baseline, scaled, config)
        for episode, value in zip(compared, values):
            episode.advantage = float(value)
    if config.turn_credit is not None and config.turn_weight != 0:
        for group in valid:
            _credit_turns(group, config, turn_baseline)
    samples = []
    for episode in everyone:
        for row in episode.rows:
            row.advantage = None if episode.reward is None else episode.advantage
        if episode.reward is not None:
            samples += _rows(episode, config)
    stats = statistics(everyone, valid)
    if turn_baseline is not None:
        stats["turn_baseline"] = turn_baseline
    return samples, stats


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


def _credit_turns(group: list[Episode], config: CreditConfig, turn_baseline: float | None) -> None:
    """Write what each turn adds to its rollout's advantage."""
    rewards = [episode.turn_rewards for episode in group]
    scaled = config.turn_credit == "recipe" or ADVANTAGES[config.advantage][2]

    def spread(values: np.ndarray) -> float:
        return _spread(values, config) + config.eps if scaled else 1.0

    if config.turn_credit == "recipe":
        added = turn_credit.recipe(rewards, spread)
    elif config.turn_credit == "unbiased":
        added = turn_credit.unbiased(rewards, turn_baseline, config.max_turns)
    else:
        totals, states = [episode.reward for episode in group], [episode.states(config.states) for episode in group]
        added = turn_credit.gigpo(rewards, totals, states, turn_baseline, config.discount, spread)
    for episode, values in zip(group, added):
        acts = episode.acts
        episode.turns = np.zeros(len(acts))
        episode.turns[acts] = config.turn_weight * values


def _rows(episode: Episode, config: CreditConfig) -> Iterable[Sample]:
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
        elif config.reduction == "turn":
            weight[mask], count = 1.0 / lengths[turns[mask]], int(np.count_nonzero(lengths))
        else:
            weight[mask] = 1.0 / (lengths[turns[mask]] * config.max_turns)
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
