"""Measures of a reward model against hand computations."""

import numpy as np
import pytest

from megatron_nb.training.reliability import Judged, calibration, draw, expected_calibration_error, probabilities, report


def _judged(first, second, strict=None, lengths=None, scores=(), grades=(), grade_lengths=()):
    first, second = np.array(first, float), np.array(second, float)
    strict = np.ones(len(first), bool) if strict is None else np.array(strict)
    lengths = np.array(lengths if lengths is not None else [[1, 1]] * len(first), float).reshape(-1, 2)
    return Judged(first, second, strict, lengths, np.array(scores), np.array(grades), np.array(grade_lengths, float))


def test_calibration_error_equals_a_hand_computation():
    p = np.array([0.9, 0.92, 0.08, 0.55, 0.45, 0.5])  # confidences 0.9, 0.92, 0.92 | 0.55, 0.55, 0.5
    assert [(n, round(c, 4), round(r, 4)) for n, c, r in calibration(p, bins=2)] == [(3, 0.5333, 0.5), (3, 0.9133, 0.6667)]
    expected = 0.5 * (0.53333333 - 0.5) + 0.5 * (0.91333333 - 0.66666667)
    assert expected_calibration_error(p, bins=2) == pytest.approx(expected)
    assert expected_calibration_error(np.ones(5)) == 0 and expected_calibration_error(np.zeros(5)) == 1


def test_pointwise_measures_equal_hand_computations():
    judged = _judged([1.0, 0.0, 2.0, 5.0], [0.0, 1.0, 2.0, 0.0], [True, True, True, False], [[4, 2], [2, 4], [6, 6], [0, 9]])
    found = report(judged, pairwise=False)
    assert found["accuracy"] == pytest.approx((1 + 0 + 0.5) / 3), "ties of the rows are left out, equal scores are half right"
    rewards, lengths = [1, 0, 2, 5, 0, 1, 2, 0], [4, 2, 6, 0, 2, 4, 6, 9]
    assert found["length_bias"] == pytest.approx(np.corrcoef(rewards, lengths)[0, 1])
    assert probabilities(judged, False)[0] == pytest.approx(1 / (1 + np.exp(-1)))
    assert set(found) == {"accuracy", "ece", "length_bias"}


def test_swap_agreement_and_position_bias_come_from_raw_scores():
    judged = _judged([2.0, 1.0, 0.0, -1.0], [-1.0, 3.0, 0.0, 2.0])
    found = report(judged, pairwise=True)
    assert (found["swap_agreement"], found["flip_rate"], found["zero_share"]) == (0.5, 0.5, 0.25)
    assert found["position_bias"] == pytest.approx((1 + 4 + 0 + 1) / 4 / 2)
    assert found["accuracy"] == pytest.approx((1 + 0 + 0.5 + 0) / 4)
    assert probabilities(judged, True)[0] == pytest.approx(1 / (1 + np.exp(-1.5)))


def test_a_collapse_to_zero_is_reported_as_disagreement():
    found = report(_judged([0.0, 0.0], [0.0, 0.0]), pairwise=True)
    assert (found["flip_rate"], found["zero_share"], found["length_bias"]) == (1.0, 1.0, 0.0)


def test_the_pairwise_length_bias_does_not_depend_on_which_side_is_called_better():
    lengths = [[9, 2], [3, 5], [4, 4], [8, 1]]
    found = report(_judged([3.0, -1.0, 1.0, 2.0], [-3.0, 1.0, -1.0, -2.0], lengths=lengths), True)["length_bias"]
    margin, difference = np.array([6.0, -2, 2, 4]), np.array([7.0, -2, 0, 7])
    assert found == pytest.approx((margin * difference).sum() / np.sqrt((margin**2).sum() * (difference**2).sum()))
    swapped = report(_judged([-3.0, -1.0, 1.0, 2.0], [3.0, 1.0, -1.0, -2.0], lengths=[[2, 9], *lengths[1:]]), True)
    assert swapped["length_bias"] == pytest.approx(found)


def test_graded_rows_have_error_and_correlation():
    found = report(_judged([], [], scores=[0.0, 1.0, 2.0], grades=[0.5, 1.0, 1.5], grade_lengths=[3, 2, 1]), pairwise=False)
    assert found == {
        "length_bias": pytest.approx(-1),
        "grade_error": pytest.approx(0.5 / 3),
        "grade_correlation": pytest.approx(1),
    }


def test_the_plot_is_a_png():
    assert draw(np.array([0.2, 0.8, 0.9]), "run").startswith(b"\x89PNG")
