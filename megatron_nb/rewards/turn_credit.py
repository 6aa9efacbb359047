"""Turn credit: what each assistant turn of a rollout gets beside the rollout's own advantage A_i.

Legend: i one of n rollouts of a group, t its turns (assistant turns, over all its rows), r_t the turn reward, omega the weight
(credit.turn_weight), N = credit.max_turns, b a baseline frozen from earlier steps. A turn without a reward counts as r = b.

    recipe    A_{i,t} = A_i + omega (r_t - mean over the group's turns) / (std over them + eps)
    unbiased  A_{i,t} = A_i + omega / N (G_{i,t} - mean of G_{j,t} over j != i),   G_{i,t} = sum over s >= t of (r_s - b),
              0 after the last turn
    gigpo     A_{i,t} = A_i + omega (Q_{i,t} - mean of Q over the turns of the group that began in the same state) / spread,
              Q_{i,t} = sum over s >= t of gamma^(s-t) (r_s - b) + gamma^(T-t) R_i, T the last turn      (arXiv 2505.10978)

Why `unbiased` (with advantage rloo) follows J = E[R + omega/N sum_t (r_t - b)]. Let a_t be what the policy samples in turn t
after h_t, everything before it, and S_t = grad log pi(a_t | h_t). The end of an episode is one of its actions, N a constant.
1. Score function: grad J = E[ sum_t S_t (R + omega/N sum_s (r_s - b)) ]; b is a number from earlier steps: no gradient.
2. E[S_t | h_t] = 0. A reward r_s of a turn s < t is known in h_t, so E[S_t r_s] = 0: the sum over s >= t is enough.
3. The rollouts of a group are drawn independently. R_j and G_{j,t} of the others, which are 0 once j has ended, do not depend
   on a_t of i: E[S_t times any function of them] = 0. So both leave-one-out means lower the variance and nothing else.
4. What is summed is sum_t S_t A_{i,t}, divided by constants: reduction `constant`, whose count is the number of rollouts.
A turn with r = b adds 0 to every G: neither it nor the turns that led to it are paid for its existence, and it moves nobody's
baseline. What the proof needs: r_t depends on nothing after turn t's own results; sampled by the weights that are trained
(ratio 1); invalid rollouts are invalid for reasons outside the policy; none is masked for its length.

Where the others differ. `recipe`: (a) a turn is paid for itself alone, not for what it leads to, so going on earns whatever the
turn in which it was decided earns; (b) the mean holds the rollout's own turns and a random number of them, so a turn is
paid or fined for existing beside worse or better ones; (c) the std blows any gap up to size 1. `gigpo`: the mean holds the turn
itself; the std as in (c); states that nobody shares get nothing. The reductions token, sequence and turn divide by numbers
that depend on the actions. tests/rewards/test_turn_credit.py prints these biases on a bandit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Turns = Sequence[np.ndarray]  # [n] of [turns of rollout i]
Spread = Callable[[np.ndarray], float]  # of values that differ; 1 for no scaling


def recipe(rewards: Turns, spread: Spread) -> list[np.ndarray]:
    """[n] of [turns]: the reward against all turns of the group; NaN rewards get 0."""
    everything = np.concatenate([*rewards, np.zeros(0)])
    known = everything[np.isfinite(everything)]
    if len(known) < 2 or known.max() == known.min():
        return [np.zeros(len(r)) for r in rewards]
    return [np.nan_to_num((r - known.mean()) / spread(known)) for r in rewards]


def unbiased(rewards: Turns, baseline: float | None, max_turns: int) -> list[np.ndarray]:
    """[n] of [turns]: what is still to come, against the mean of the same over the others. baseline None: not yet known, 0."""
    to_go = np.zeros((len(rewards), max(map(len, rewards), default=0)))
    for row, r in zip(to_go, rewards):
        row[: len(r)] = _to_go(above(r, baseline), 1.0)
    if len(rewards) < 2:
        return [np.zeros(len(r)) for r in rewards]
    added = (to_go - (to_go.sum(0) - to_go) / (len(rewards) - 1)) / max_turns
    return [values[: len(r)] for values, r in zip(added, rewards)]


def gigpo(
    rewards: Turns, totals: Sequence[float], states: Sequence[Sequence[Hashable]], baseline: float | None, discount: float,
    spread: Spread,
) -> list[np.ndarray]:  # fmt: skip
    """[n] of [turns]: the discounted rest of a turn against the turns of the group that began in its state.

    totals: R by rollout. states: [n][turns]; a state of one turn alone, or of equal ones, gives 0.
    """
    rests = []
    for r, total in zip(rewards, totals):
        own = above(r, baseline)
        own[-1:] += total
        rests.append(_to_go(own, discount))
    by_state: dict[Hashable, list[tuple[int, int]]] = {}
    for i, its in enumerate(states):
        for t, state in enumerate(its):
            by_state.setdefault(state, []).append((i, t))
    added = [np.zeros(len(r)) for r in rewards]
    for places in by_state.values():
        values = np.array([rests[i][t] for i, t in places])
        if values.max() > values.min():
            for (i, t), value in zip(places, (values - values.mean()) / spread(values)):
                added[i][t] = value
    return added


def above(rewards: np.ndarray, baseline: float | None) -> np.ndarray:
    """[turns] r - b, 0 where a turn has no reward; 0 everywhere while there is no baseline."""
    return np.zeros(len(rewards)) if baseline is None else np.nan_to_num(rewards - baseline)


def _to_go(values: np.ndarray, discount: float) -> np.ndarray:
    """[turns] sum over s >= t of discount^(s-t) values[s]."""
    if discount == 1.0:
        return values[::-1].cumsum()[::-1]
    rest, total = np.zeros(len(values)), 0.0
    for t in range(len(values) - 1, -1, -1):
        rest[t] = total = values[t] + discount * total
    return rest


@dataclass
class TurnBaseline:
    """b: the running mean of the turn rewards of earlier steps; a step weighs `decay` times as much as the one after it.

    None before the first step with turn rewards: then they add nothing, since any guess would pay or fine turns for existing.
    """

    decay: float
    total: float = 0.0
    weight: float = 0.0

    @property
    def value(self) -> float | None:
        return self.total / self.weight if self.weight else None

    def observe(self, mean: float | None) -> None:
        """Take in the mean turn reward of a step that has been credited; None: it had none."""
        if mean is not None:
            self.total, self.weight = self.decay * self.total + mean, self.decay * self.weight + 1.0

    def state(self) -> dict[str, Any]:
        """Plain JSON, for the checkpoint."""
        return {"total": self.total, "weight": self.weight}

    def restore(self, state: dict[str, Any]) -> None:
        self.total, self.weight = state["total"], state["weight"]
