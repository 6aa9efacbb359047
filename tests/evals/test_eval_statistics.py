"""Numbers of evaluations against exact fractions and known values."""

import math
from fractions import Fraction

import numpy as np
import pytest

from megatron_nb.evals.code import passes
from megatron_nb.evals.math import majority
from megatron_nb.evals.statistics import bootstrap, mean_with_bounds, pass_at_k, pass_hat_k, ratio_with_bounds, wilson

CASES = [(n, c, k) for n in (1, 2, 5, 10, 200) for c in {0, 1, n // 2, n - 1, n} for k in {1, 2, n // 2, n} if 1 <= k <= n]


@pytest.mark.parametrize(("n", "c", "k"), CASES)
def test_pass_at_k_equals_the_chance_in_exact_fractions_and_the_published_product(n, c, k):
    none_right = Fraction(1)  # drawn one after the other without replacement
    for drawn in range(k):
        none_right *= Fraction(max(n - c - drawn, 0), n - drawn)
    assert abs(pass_at_k(n, c, k) - float(1 - none_right)) < 1e-15
    product = 1.0 if n - c < k else 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))  # the reference implementation's
    assert abs(pass_at_k(n, c, k) - product) < 1e-12


@pytest.mark.parametrize(("n", "c", "k"), CASES)
def test_pass_hat_k_equals_the_chance_that_all_drawn_are_right(n, c, k):
    all_right = Fraction(1)
    for drawn in range(k):
        all_right *= Fraction(max(c - drawn, 0), n - drawn)
    assert abs(pass_hat_k(n, c, k) - float(all_right)) < 1e-15


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, 2, 5), (4, 2, 0), (4, -1, 1)])
def test_impossible_counts_are_refused(n, c, k):
    for function in (pass_at_k, pass_hat_k):
        with pytest.raises(ValueError, match="are needed"):
            function(n, c, k)


def test_pass_at_k_over_problems_is_their_mean_and_leaves_out_those_with_too_few_samples():
    told = passes([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1]], [1, 4])
    assert told["pass@1"] == pytest.approx((0.5 + 0 + 1) / 3) and told["pass@4"] == pytest.approx(0.5)


def test_bounds_of_shares_are_wilsons_and_of_means_over_items():
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)  # a published table
    assert wilson(0, 20)[0] == 0 and wilson(0, 20)[1] == pytest.approx(0.1611, abs=1e-4)
    told = mean_with_bounds("a", [[1], [0], [1], [1]])
    assert told["a"] == 0.75 and (told["a_low"], told["a_high"]) == wilson(3, 4)
    told = mean_with_bounds("a", [[1, 0], [1, 1], [0, 0]] * 2)  # attempts at one item are one draw
    error = 1.959964 * np.std([0.5, 1, 0] * 2, ddof=1) / math.sqrt(6)
    assert told["a_high"] - told["a"] == pytest.approx(error, rel=1e-6)
    assert mean_with_bounds("a", []) == {}


def test_items_that_do_not_differ_promise_no_certainty_and_bounds_of_shares_stay_within_0_and_1():
    told = mean_with_bounds("a", [[1, 1]] * 5)
    assert (told["a_low"], told["a_high"]) == wilson(5, 5) and told["a_low"] < 0.6
    one = mean_with_bounds("a", [[1, 0]])
    assert (one["a_low"], one["a_high"]) == wilson(0.5, 1)
    assert mean_with_bounds("a", [[7.0], [7.0]]) == {"a": 7.0}  # no share: its scale is not known
    told = mean_with_bounds("a", [[0, 0]] * 20 + [[0, 1]])
    assert told["a_low"] == 0 < told["a"] < told["a_high"]


def test_ninety_five_of_a_hundred_bounds_hold_the_true_share():
    rng, hits = np.random.default_rng(0), 0
    for _ in range(400):
        low, high = wilson(int((rng.random(40) < 0.3).sum()), 40)
        hits += low <= 0.3 <= high
    assert 0.92 <= hits / 400 <= 0.98


def test_a_bootstrap_of_the_mean_is_as_wide_as_its_normal_bounds():
    values = np.random.default_rng(1).normal(size=400)
    low, high = bootstrap(values)
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.1)


@pytest.mark.parametrize(
    ("votes", "score"),
    [
        ([("3", 1), ("4", 0), ("3", 1)], 1), ([("4", 0), ("4", 0), ("3", 1)], 0), ([("", 0), ("", 0), ("3", 1)], 1),
        ([("3", 1), ("4", 0)], 0.5), ([("", 0)], 0),
        ([("sqrt(8)", 1), ("2*sqrt(2)", 1), ("3", 0), ("3", 0), ("x", 1)], 1),
    ],
    ids=["right", "wrong", "none is no vote", "a tie is shared", "nobody votes", "all right ones are one answer"],
)  # fmt: skip
def test_a_majority_votes(votes, score):
    assert majority(votes) == score


def test_a_ratio_s_bounds_are_over_items_so_that_attempts_and_parts_that_go_together_do_not_narrow_them():
    items = [(2, 2), (0, 3), (1, 1), (0, 2), (3, 3), (1, 2)]
    once = ratio_with_bounds("x", items)
    assert once["x"] == 7 / 13
    thrice = ratio_with_bounds("x", [(3 * right, 3 * of) for right, of in items])
    assert thrice == pytest.approx(once)  # the same three times says nothing new
    low, high = wilson(7, 13)  # as if each part were drawn by itself
    assert once["x_low"] < low and high < once["x_high"]


def test_a_ratio_s_bounds_hold_the_truth_as_often_as_they_promise():
    rng, held = np.random.default_rng(0), 0
    for _ in range(500):
        of = rng.integers(1, 4, 100)
        chance = rng.choice([0.2, 0.9], 100)  # of an item: its parts go together
        told = ratio_with_bounds("x", list(zip(rng.binomial(of, chance), of)))
        held += told["x_low"] <= 0.55 <= told["x_high"]
    assert 0.92 <= held / 500 <= 0.98


@pytest.mark.parametrize(
    ("items", "right", "of"), [([(2, 2), (1, 1)], 2, 2), ([(0, 3)], 0, 1), ([(1, 1), (0, 1), (1, 1)], 2, 3)]
)
def test_a_ratio_that_does_not_differ_between_items_or_is_one_yes_or_no_each_has_wilson_s_bounds(items, right, of):
    told = ratio_with_bounds("x", items)
    assert (told["x_low"], told["x_high"]) == wilson(right, of) and told["x"] == right / of
    assert ratio_with_bounds("x", []) == {}
