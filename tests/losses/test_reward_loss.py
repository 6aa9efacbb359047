"""Losses of reward models: against the formulas written down again, and what they must and must not depend on."""

import math

import numpy as np
import pytest
import torch

from megatron_nb.data.pairs import Unit, score_pack
from megatron_nb.losses.reward import Pairwise, PairwiseConfig, Pointwise, bounded, paired, ramp
from megatron_nb.records import Sample


def _batch(*labels: float, graded: float | None = None, length: int | None = None):
    """A pack of pairs with these labels, three tokens a document, and perhaps a graded answer."""

    def sample(label):
        return Sample(np.arange(3), np.zeros(3, np.float32), "s", label=label)

    units = [Unit([sample(label), sample(label)], (1, 1)) for label in labels]
    units += [Unit([sample(graded)], (1,))] if graded is not None else []
    used = sum(unit.tokens for unit in units)
    return score_pack(list(enumerate(units)), length or used + 2)


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def test_bradley_terry_ties_and_grades_equal_the_formulas():
    batch = _batch(1.0, 0.5, graded=0.25)
    scores = torch.tensor([1.2, -0.3, 0.4, 0.1, 0.9, 77.0], dtype=torch.float64)  # the last is the fill's
    total, count, sums = Pointwise()(scores, batch)
    expected = -log_sigmoid(1.5) - 0.5 * (log_sigmoid(0.3) + log_sigmoid(-0.3)) + (0.9 - 0.25) ** 2
    assert total.item() == pytest.approx(expected, abs=1e-7) and count == 3
    assert {name: sums[name].item() for name in ("strict", "correct", "graded")} == {"strict": 1, "correct": 1, "graded": 1}
    assert sums["margin"].item() == pytest.approx(1.5) and sums["squared_error"].item() == pytest.approx(0.65**2)


def test_the_pairwise_loss_equals_the_recipe_with_bound_ties_and_ramp():
    batch = _batch(1.0, 0.5)
    raw = [3.0, -1.0, 0.5, 2.0]
    total, count, sums = Pairwise(PairwiseConfig(bound=4.0, swap=0.3, magnitude=0.01), ramp=0.5)(
        torch.tensor([*raw, 9.0]), batch
    )
    a, b, c, d = (4 * math.tanh(s / 4) for s in raw)
    strict = -0.5 * (log_sigmoid(a) + log_sigmoid(-b))
    tie = -0.25 * sum(log_sigmoid(s) + log_sigmoid(-s) for s in (c, d))
    swap, size = (a + b) ** 2 + (c + d) ** 2, (a * a + b * b + c * c + d * d) / 2
    assert total.item() == pytest.approx(strict + tie + 0.15 * swap + 0.01 * size, rel=1e-6) and count == 2
    assert sums["preference_loss"].item() == pytest.approx(strict + tie) and sums["swap_loss"].item() == pytest.approx(swap)
    assert sums["position_bias"].item() == pytest.approx((a + b + c + d) / 2) and sums["agree"].item() == 1


@pytest.mark.parametrize("ab", [-30.0, -1.0, 0.0, 0.7, 5.0])
def test_the_swap_loss_is_zero_exactly_when_swapping_negates_the_score(ab):
    batch, loss = _batch(1.0), Pairwise(PairwiseConfig())
    assert loss(torch.tensor([ab, -ab, 0.0]), batch)[2]["swap_loss"] == 0
    for wrong in (ab, -ab + 0.01, -ab - 1):
        if wrong != -ab:
            assert loss(torch.tensor([ab, wrong, 0.0]), batch)[2]["swap_loss"] > 0


def test_a_confidently_wrong_pair_keeps_a_gradient_within_the_bound():
    scores = torch.tensor([-60.0, 60.0, 0.0], dtype=torch.float64, requires_grad=True)
    total, _, _ = Pairwise(PairwiseConfig(swap=0, magnitude=0))(scores, _batch(1.0))
    total.backward()
    assert scores.grad[0] < 0 < scores.grad[1], "a hard clamp would give zero"
    assert bounded(torch.tensor([1e9, -1e9]), 20.0).tolist() == [20, -20]


def test_fill_and_order_of_documents_change_nothing():
    batch, wide = _batch(1.0, 0.5, 1.0, graded=0.3), _batch(1.0, 0.5, 1.0, graded=0.3, length=40)
    scores = torch.randn(8, generator=torch.Generator().manual_seed(1))
    total, count, _ = Pointwise()(scores, batch)
    moved = torch.cat([scores[:7], torch.tensor([torch.inf])])
    assert Pointwise()(moved, wide)[0] == total and Pointwise()(moved, wide)[1] == count == 4
    order = torch.tensor([5, 2, 6, 0, 3, 4, 1, 7])
    batch.documents = {name: values[order] for name, values in batch.documents.items()}
    assert torch.equal(torch.stack(paired(scores[order], batch)[:2]), torch.stack([scores[0:6:2], scores[1:6:2]]))


def test_a_rank_without_the_count_contributes_nothing_but_takes_part():
    batch = _batch(1.0)
    batch.count = 0  # as on context ranks other than the first
    scores = torch.tensor([0.5, 0.1, 0.0], requires_grad=True)
    for loss in (Pointwise(), Pairwise(PairwiseConfig())):
        total, count, sums = loss(scores, batch)
        assert total == 0 and count == 0 and all(value == 0 for value in sums.values()) and total.requires_grad


def test_lambda_ramps_over_the_first_half():
    assert [ramp(step, 10) for step in (1, 3, 5, 6, 10)] == [0.2, 0.6, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("wrong", [{"bound": 0}, {"swap": -1}, {"magnitude": -0.1}])
def test_constants_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=f"loss.{next(iter(wrong))}="):
        PairwiseConfig(**wrong)
