"""Over-optimisation: the rules fire on curves that went too far, not on noise or on honest progress, and survive a resume."""

from __future__ import annotations

import json

import numpy as np
import pytest
from matplotlib.image import imread

from megatron_nb.training.watch import Watch, WatchConfig


def stops(config: WatchConfig, proxy, heldout, *, error=0.1, kl=None, length=None) -> list[int]:
    """The evaluations that give a reason to stop."""
    watch, n = Watch(config), len(proxy)
    kl, length = kl if kl is not None else [None] * n, length if length is not None else [100.0] * n
    rows = enumerate(zip(proxy, heldout, kl, length))
    return [step for step, (p, h, k, l) in rows if watch.observe(step, p, h, k, l, heldout_error=error)]


RISING = np.linspace(0, 3, 20)
HUMP = np.concatenate([np.linspace(0, 1, 8), np.linspace(1, -1, 12)])  # the judge turns at evaluation 7


def test_a_judge_that_falls_while_the_reward_rises_stops_the_run_and_the_best_step_is_named():
    watch = Watch(WatchConfig(patience=3))
    reasons = [watch.observe(10 * i, RISING[i], HUMP[i], None, 100.0, heldout_error=0.1) for i in range(20)]
    first = next(i for i, reason in enumerate(reasons) if reason)
    assert 9 <= first <= 13 and all(reasons[first:])
    best = int(reasons[first].rpartition("step ")[2])
    assert 70 <= best <= 100 and best < 10 * first


@pytest.mark.parametrize(
    ("proxy", "heldout", "why"),
    [
        (RISING, RISING, "both rise"),
        (RISING[::-1], HUMP, "both fall: training fails, but not by over-optimisation"),
        (RISING, HUMP * 0.02, "the fall is within the error"),
        (RISING, [None] * 20, "nobody judges"),
    ],
)
def test_other_curves_do_not_stop_the_run(proxy, heldout, why):
    assert stops(WatchConfig(patience=3), proxy, heldout) == [], why


def test_noise_around_a_flat_judge_rarely_stops_even_a_long_run():
    draw, runs = np.random.default_rng(0), 60
    found = [bool(stops(WatchConfig(), np.linspace(0, 1, 60), draw.normal(0, 0.1, 60))) for _ in range(runs)]
    assert sum(found) / runs < 0.05


@pytest.mark.parametrize("fall", [0.5, 1.0])
def test_noise_does_not_hide_a_real_fall(fall):
    draw, runs = np.random.default_rng(1), 50
    curve = np.concatenate([np.zeros(10), np.full(20, -fall)])
    found = [stops(WatchConfig(), np.linspace(0, 1, 30), curve + draw.normal(0, 0.1, 30)) for _ in range(runs)]
    assert sum(bool(steps) and steps[0] >= 10 for steps in found) / runs > 0.95


def test_no_drop_rule_no_stop():
    assert stops(WatchConfig(drop=None), RISING, HUMP) == []


def test_the_threshold_is_the_stated_one():
    """One evaluation a level, four of them: allowed = (2 + sqrt(2 ln 4)) * hypot(.1, .1)."""
    allowed = (2 + np.sqrt(2 * np.log(4))) * np.hypot(0.1, 0.1)
    for fall, expected in ((allowed - 1e-6, []), (allowed + 1e-6, [3])):
        assert stops(WatchConfig(patience=1), [0, 1, 2, 3], [0.0, 1.0, 1.0, 1.0 - fall]) == expected


@pytest.mark.parametrize(
    ("kl", "expected"), [([0.1, 0.3, 0.3, 0.3, 0.1], [3]), ([0.1, 0.1, 0.5, 0.1, 0.1], []), ([None, 0.9, None, 0.9, 0.1], [4])]
)
def test_kl_stops_above_its_ceiling_when_it_stays_there(kl, expected):
    assert stops(WatchConfig(patience=3, kl_ceiling=0.25), [0.0] * 5, [None] * 5, kl=kl) == expected


def test_length_stops_beyond_its_factor():
    length = [100, 150, 210, 230, 190, 100]
    assert stops(WatchConfig(patience=2, length_factor=2.0), [0.0] * 6, [None] * 6, length=length) == [3, 4]


def test_what_is_not_finite_counts_as_not_known():
    watch = Watch(WatchConfig(patience=1, kl_ceiling=0.5))
    assert watch.observe(1, 0.0, float("nan"), float("inf"), 10.0) is None
    assert watch.observe(2, float("nan"), 1.0, 9.0, 10.0) is None
    assert [row.step for row in watch.seen] == [1] and watch.seen[0].heldout is None and watch.seen[0].kl is None


def test_a_resumed_watch_says_what_an_uninterrupted_one_says():
    config = WatchConfig(patience=2, kl_ceiling=0.8, length_factor=3.0)
    rows = [(i, RISING[i], HUMP[i], 0.05 * i, 100.0 + 15 * i) for i in range(20)]
    straight = Watch(config)
    expected = [straight.observe(*row, heldout_error=0.1) for row in rows]
    assert any(expected)
    for cut in (1, 9, 14):
        before = Watch(config)
        for row in rows[: cut + 2]:  # two evaluations beyond the checkpoint are lost and made again
            before.observe(*row, heldout_error=0.1)
            if row[0] == cut - 1:
                saved = json.loads(json.dumps(before.state()))
        after = Watch(config, saved)
        assert [after.observe(*row, heldout_error=0.1) for row in rows[cut:]] == expected[cut:]
        assert after.state() == straight.state()


def test_a_step_seen_again_replaces_what_followed():
    watch = Watch(WatchConfig())
    for step in (1, 2, 3, 2):
        watch.observe(step, float(step), 0.0, None, 1.0)
    assert [row.step for row in watch.seen] == [1, 2]


@pytest.mark.parametrize("settings", [{"patience": 0}, {"drop": 0.0}, {"kl_ceiling": -1.0}, {"length_factor": 1.0}])
def test_settings_that_could_not_work_are_refused(settings):
    with pytest.raises(ValueError, match=f"watch.{next(iter(settings))}"):
        WatchConfig(**settings)


@pytest.mark.parametrize("kl", [None, 0.1])
def test_the_plot_is_drawn_from_the_first_evaluation_on(tmp_path, kl):
    (tmp_path / "run" / "plots").mkdir(parents=True)
    watch = Watch(WatchConfig())
    for step, judge in ((0, 0.5), (10, None), (20, 0.7)):
        watch.observe(step, 0.1 * step, judge, kl, 100.0, heldout_error=0.1)
        watch.plot(tmp_path / "run" / "plots" / "overoptimisation.png")
    assert imread(tmp_path / "run" / "plots" / "overoptimisation.png").std() > 0.05
