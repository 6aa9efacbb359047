"""Packs: nothing split, lost or doubled, nearly full, nearly in order, the same on every rank and resume."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nb.data.plan import BLOCK, Plan


def planned(lengths, cap, **options):
    lengths = np.asarray(lengths)
    plan = Plan(lambda start, stop: lengths[start:stop], cap, len(lengths), **options)
    return [plan.pack(number) for number in range(len(plan))]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=200), st.integers(64, 300), st.integers(1, 40))
def test_every_sample_is_in_exactly_one_pack_and_no_pack_overflows(lengths, cap, lookahead):
    packs = planned(lengths, cap, lookahead=lookahead)
    assert sorted(draw for pack in packs for draw in pack) == list(range(len(lengths)))
    assert all(pack and sum(lengths[draw] for draw in pack) <= cap for pack in packs)


def test_eight_samples_of_seven_at_cap_eight_are_eight_packs():
    assert planned([7] * 8, 8) == [[number] for number in range(8)]


def test_the_last_partial_pack_is_emitted():
    assert planned([4, 4, 4], 8) == [[0, 1], [2]]


RANDOM = np.random.default_rng(0)
DISTRIBUTIONS = {
    "log-normal": RANDOM.lognormal(6, 0.8, 6000),
    "narrow": RANDOM.normal(400, 20, 6000),
    "uniform": RANDOM.uniform(200, 600, 6000),
    "heavy tail": RANDOM.pareto(1.2, 6000) * 200 + 50,
    "two kinds": np.where(RANDOM.random(6000) < 0.9, RANDOM.normal(300, 30, 6000), RANDOM.normal(3000, 200, 6000)),
    "constant": np.full(6000, 401),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("times", [16, 64, 1000])
def test_packs_are_99_percent_full_at_a_cap_of_16_times_the_median(name, times):
    lengths = DISTRIBUTIONS[name].astype(int)
    cap = int(times * np.median(lengths))
    lengths = np.clip(lengths, 2, cap)
    filled = [lengths[pack].sum() for pack in planned(lengths, cap)[:-1]]
    assert np.mean(filled) / cap >= 0.99


def test_the_order_is_kept_within_the_lookahead():
    lengths = DISTRIBUTIONS["log-normal"].astype(int).clip(2, 6400)
    order = np.array([draw for pack in planned(lengths, 6400, lookahead=128) for draw in pack])
    moved = order - np.arange(len(order))
    assert moved.min() >= -128 and moved.max() <= 128
    assert np.mean(np.abs(moved)) < 32  # most samples go where the mixture put them


def test_a_plan_from_a_snapshot_continues_an_endless_one():
    lengths = DISTRIBUTIONS["log-normal"].astype(int).clip(2, 2000)

    def endless(start, stop):
        return lengths[np.arange(start, stop) % len(lengths)]

    first = Plan(endless, 2000)
    number = 3 * BLOCK + 17
    expected = [first.pack(number + i) for i in range(2 * BLOCK)]
    assert [Plan(endless, 2000).pack(number + i) for i in range(5)] == expected[:5]  # from the beginning
    asked = []

    def watched(start, stop):
        asked.append(start)
        return endless(start, stop)

    resumed = Plan(watched, 2000, snapshot=first.snapshot(number))
    assert [resumed.pack(number + i) for i in range(2 * BLOCK)] == expected
    assert min(asked) > first.pack(2 * BLOCK)[0]  # without planning what was before
    assert first.pack(3) == Plan(endless, 2000).pack(3)  # earlier packs can be asked for again


def test_without_packing_every_sample_is_a_pack():
    assert planned([3, 9, 5], 10, packing=False) == [[0], [1], [2]]
    assert Plan(lambda start, stop: np.ones(stop - start, int), 10, packing=False).pack(7) == [7]
