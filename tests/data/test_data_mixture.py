"""The order of the data: weights hold, every draw is a pure function of (seed, index), nothing is lost or doubled."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nb.data.mixture import Mixture, check_weights

RECIPE = {"code": 27, "search": 26, "stem": 23, "tools": 13, "general": 10}
SIZES = {name: 500 + 100 * number for number, name in enumerate(RECIPE)}


@pytest.mark.parametrize("start", [0, 1, 777, 123_456])
def test_weights_hold_to_one_percent_over_ten_thousand_draws_from_anywhere(start):
    mixture = Mixture(SIZES, RECIPE, seed=5)
    sources, _ = mixture.draws(start, start + 10_000)
    shares = np.bincount(sources, minlength=5) / 10_000
    for share, weight in zip(shares, RECIPE.values()):
        assert abs(share - weight / 99) < 0.01 * weight / 99


def test_small_weights_are_neither_rounded_away_nor_up():
    sources, _ = Mixture({"a": 5000, "b": 7000}, {"a": 0.0005, "b": 0.9995}).draws(0, 200_000)
    assert abs(np.count_nonzero(sources == 0) - 100) <= 2


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 600), st.booleans())
def test_a_draw_depends_on_seed_and_index_alone(start, count, weighted):
    weights = RECIPE if weighted else None
    whole = Mixture(SIZES, weights, seed=3).draws(0, 4000)
    part = Mixture(SIZES, weights, seed=3).draws(start, start + count)  # asked for first, out of order
    for all_draws, some in zip(whole, part):
        assert all_draws[start : start + count].tolist() == some.tolist()


def test_the_order_is_pinned():
    """A change of this order would silently break the resume of every run made before it."""
    sources, rows = Mixture({"a": 10, "b": 20}, {"a": 1, "b": 3}, seed=1).draws(0, 8)
    again, rows_again = Mixture({"a": 10, "b": 20}, seed=1).draws(0, 8)
    assert (sources.tolist(), rows.tolist()) == PINNED_WEIGHTED
    assert (again.tolist(), rows_again.tolist()) == PINNED_PLAIN


PINNED_WEIGHTED = ([1, 0, 0, 1, 0, 1, 1, 0], [2, 8, 5, 16, 6, 15, 8, 3])
PINNED_PLAIN = ([0, 1, 1, 0, 0, 1, 1, 1], [4, 17, 8, 3, 1, 1, 4, 14])


def test_without_weights_every_row_comes_once_per_epoch_in_a_new_order():
    mixture = Mixture({"a": 30, "b": 50}, seed=2)
    epochs = [list(zip(*(part.tolist() for part in mixture.draws(80 * epoch, 80 * epoch + 80)))) for epoch in range(3)]
    expected = [(0, row) for row in range(30)] + [(1, row) for row in range(50)]
    assert all(sorted(epoch) == expected for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != expected


def test_with_weights_every_row_of_a_source_comes_once_before_any_comes_twice():
    sources, rows = Mixture({"a": 40, "b": 70}, {"a": 1, "b": 1}, seed=2).draws(0, 1000)
    for source, size in enumerate((40, 70)):
        mine = rows[sources == source]
        for epoch in range(len(mine) // size):
            assert sorted(mine[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_without_shuffle_rows_come_as_they_stand():
    sources, rows = Mixture({"a": 3, "b": 2}, shuffle=False).draws(0, 10)
    assert list(zip(sources.tolist(), rows.tolist())) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)] * 2


def test_other_seeds_give_other_orders():
    first, second = (Mixture(SIZES, RECIPE, seed=seed).draws(0, 500) for seed in (1, 2))
    assert first[0].tolist() != second[0].tolist()
    assert first[1].tolist() != second[1].tolist()


def test_a_source_of_weight_zero_is_never_drawn_and_may_be_empty():
    sources, _ = Mixture({"a": 5, "off": 0, "b": 5}, {"a": 1, "off": 0, "b": 1}).draws(0, 2000)
    assert set(sources.tolist()) == {0, 2}


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": 1, "b": -1}, "weight of source 'b' is -1"),
        ({"a": 0, "b": 0}, "sum to 0"),
        ({"a": 1}, "sources b have no weight"),
        ({"a": 1, "b": math.nan}, "weight of source 'b' is nan"),
        ({"a": 1, "b": math.inf}, "weight of source 'b' is inf"),
        ({"a": 1, "b": 1, "bb": 1}, "unknown source 'bb'.*did you mean 'b'"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights, words):
    with pytest.raises(ValueError, match=words):
        check_weights(weights, ["a", "b"])


@pytest.mark.parametrize("weights", [None, {"a": 1, "b": 1}])
def test_an_empty_source_is_refused(weights):
    with pytest.raises(ValueError, match="'b' has no rows left"):
        Mixture({"a": 5, "b": 0}, weights)
