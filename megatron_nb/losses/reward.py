"""Losses of reward models over the scores [S] of a pack's documents; both documents of a pair lie in one pack.

Batch.documents says what belongs together, [S] each (data/pairs.py fills it):
    pair   number of the pair in the pack, -1 where the document is in none
    sign   point-wise: +1 the better answer, -1 the other; pair-wise: +1 the order (x, better, other), -1 the swapped one
    label  of a pair: 1, or 0.5 for a tie; of a graded answer: its grade; NaN for the fill
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from megatron_nb.records import Batch

Result = tuple[torch.Tensor, int, dict[str, torch.Tensor]]


def paired(scores: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """([P] scores of sign +1, [P] of sign -1, [P] labels) of the pack's pairs, in the order of their numbers."""
    pair, sign = batch.documents["pair"], batch.documents["sign"]
    first, second = ((sign == value).nonzero()[:, 0] for value in (1, -1))
    first, second = (rows[pair[rows].argsort()] for rows in (first, second))
    return scores[first], scores[second], batch.documents["label"][first]


def preference(margin: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """[P] cross-entropy of sigmoid(margin) with the label: 1 the first is better, 0.5 a tie (Bradley-Terry)."""
    return -label * logsigmoid(margin) - (1 - label) * logsigmoid(-margin)


class Pointwise:
    """Sum over pairs of -log sigmoid(r+ - r-), and over graded answers of (r - grade)^2; count = pairs + graded answers."""

    output = "score"

    def __call__(self, scores: torch.Tensor, batch: Batch) -> Result:
        """scores [S] -> sum, count, metrics as sums: `correct` over the `strict` pairs (those that are no ties)."""
        better, other, label = paired(scores, batch)
        grade = batch.documents["label"]
        graded = (batch.documents["pair"] < 0) & ~grade.isnan()
        errors = (scores[graded] - grade[graded]).square()
        margin, strict = better - other, label == 1
        total = preference(margin, label).sum() + errors.sum()
        sums = {"loss": total, "strict": strict, "correct": (margin > 0) & strict, "margin": margin * strict}
        sums |= {"squared_error": errors, "graded": graded}
        return _by_first_rank(total, scores, batch, sums)


@dataclass
class PairwiseConfig:
    """The constants of the pair-wise loss."""

    bound: float = 20.0  # s <- bound * tanh(s / bound): a hard clamp would kill the gradient of confidently wrong pairs
    swap: float = 0.5  # lambda: weight of (s_ab + s_ba)^2, ramped over the first half of training
    magnitude: float = 1e-3  # mu: weight of (s_ab^2 + s_ba^2) / 2

    def __post_init__(self):
        if self.bound <= 0:
            raise ValueError(f"loss.bound={self.bound} must be positive: it is the largest score")
        for name in ("swap", "magnitude"):
            if getattr(self, name) < 0:
                raise ValueError(f"loss.{name}={getattr(self, name)} must not be negative; 0 switches it off")


def bounded(scores: torch.Tensor, bound: float) -> torch.Tensor:
    """s <- bound * tanh(s / bound)."""
    return bound * torch.tanh(scores / bound)


def ramp(step: int, num_steps: int) -> float:
    """Share of lambda in force at `step` (from 1): linear over the first half of training, then 1."""
    return min(1.0, 2 * step / num_steps)


class Pairwise:
    """Sum over pairs of L_pref + ramp * lambda * L_swap + mu * L_magnitude; count = pairs.

    With s_ab = s(x, better, other) and s_ba = s(x, other, better), both bounded:
    L_pref = -(log sigmoid(s_ab) + log sigmoid(-s_ba)) / 2, for a tie the mean over both labels;
    L_swap = (s_ab + s_ba)^2, zero exactly when swapping the answers negates the score; L_magnitude = (s_ab^2 + s_ba^2) / 2.
    """

    output = "score"

    def __init__(self, config: PairwiseConfig, ramp: float = 1.0):
        self.config, self.ramp = config, ramp

    def __call__(self, scores: torch.Tensor, batch: Batch) -> Result:
        """scores [S], unbounded -> sum, count, metrics as sums: `correct` and `agree` over the `strict` pairs (no ties)."""
        ab, ba, label = paired(bounded(scores, self.config.bound), batch)
        likelihood = (preference(ab, label) + preference(-ba, label)) / 2
        swap, magnitude = (ab + ba).square(), (ab.square() + ba.square()) / 2
        total = (likelihood + self.ramp * self.config.swap * swap + self.config.magnitude * magnitude).sum()
        strict = label == 1
        sums = {"loss": total, "preference_loss": likelihood, "swap_loss": swap, "magnitude": magnitude, "strict": strict}
        sums |= {"correct": (ab > ba) & strict, "agree": (ab * ba < 0) & strict, "position_bias": (ab + ba) / 2}
        return _by_first_rank(total, scores, batch, sums)


def _by_first_rank(total: torch.Tensor, scores: torch.Tensor, batch: Batch, sums: dict[str, torch.Tensor]) -> Result:
    """Every context rank has all scores; the one with the count contributes, the others only take part in the gradient."""
    sums = {name: values.detach().float().sum() for name, values in sums.items()}
    if batch.count == 0:
        return (scores * 0).sum(), 0, {name: torch.zeros_like(value) for name, value in sums.items()}
    return total, batch.count, sums
