"""Credit: which rollouts are compared, what they get, and how much their rows weigh."""

import math

import numpy as np
import pytest

from megatron_nb.data.packing import pack
from megatron_nb.rewards.advantage import ADVANTAGES, CreditConfig, credit
from tests.rewards.made_rollouts import grouped, rollout


def given(rewards, group="g", **settings):
    """Advantages that rollouts of one group with these rewards get."""
    rollouts = [rollout(group, i, reward) for i, reward in enumerate(rewards)]
    credit(grouped(*rollouts), CreditConfig(**settings))
    return [one.advantage for one in rollouts]


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.7, float(np.float32(0.7)), 1e9, 0.0])
def test_equal_rewards_give_an_advantage_of_exactly_zero(advantage, reward):
    assert given([reward] * 8, advantage=advantage, eps=0.0) == [0.0] * 8


@pytest.mark.parametrize("std, high, low", [("population", 1.732, -0.577), ("sample", 1.5, -0.5)])
def test_the_spread_is_the_one_that_is_named(std, high, low):
    assert given([1, 0, 0, 0], std=std) == pytest.approx([high, low, low, low], abs=1e-3)


@pytest.mark.parametrize(
    "advantage, expected",
    [
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_baselines_without_a_spread(advantage, expected):
    assert given([1, 0, 0, 0], advantage=advantage) == pytest.approx(expected)


def test_reinforce_pp_compares_with_the_whole_batch():
    rows = [rollout(g, i, r) for g, i, r in (("a", 0, 1), ("a", 1, 1), ("b", 0, 0), ("b", 1, 4))]
    credit(grouped(*rows), CreditConfig(advantage="reinforce_pp"))
    r = np.array([1, 1, 0, 4.0])
    assert [one.advantage for one in rows] == pytest.approx(list((r - r.mean()) / r.std()), abs=1e-5)


def test_groups_go_by_id_shuffled_and_uneven_and_one_alone_gets_zero():
    rewards = {"a": [1, 0, 0, 0], "b": [5, 3], "c": [9], "d": [2, 1, 0]}
    rows = [rollout(g, i, r) for g, values in rewards.items() for i, r in enumerate(values)]
    order = np.random.default_rng(0).permutation(len(rows))
    scattered = grouped(*rows[:1])[0]
    scattered.rollouts = [rows[i] for i in order]  # all in one list: only their ids tell
    credit([scattered], CreditConfig())
    for group, values in rewards.items():
        found = [one.advantage for one in rows if one.group_id == group]
        assert found == given(values)
    assert [one.advantage for one in rows if one.group_id == "c"] == [0.0]


@pytest.mark.parametrize("bad", [None, "invalid", math.nan, math.inf])
@pytest.mark.parametrize("advantage", ["dr_grpo", "grpo", "rloo"])
def test_an_invalid_rollout_is_in_no_mean_no_spread_and_no_row(bad, advantage):
    rows = [rollout("g", i, r) for i, r in enumerate([1, 3, 2, bad])]
    samples, stats = credit(grouped(*rows), CreditConfig(advantage=advantage))
    assert [one.advantage for one in rows] == [*given([1, 3, 2], advantage=advantage), None]
    assert [s.rollout_id for s in samples] == ["g/0", "g/1", "g/2"]
    assert stats["invalid"] == 1 and stats["reward_mean"] == 2.0 and all(map(math.isfinite, stats.values()))


def test_a_status_of_invalid_is_enough_even_in_a_later_row():
    rows = [rollout("g", 0, 1), rollout("g", 0, 1, segment=1, status="invalid"), rollout("g", 1, 0), rollout("g", 2, 4)]
    samples, stats = credit(grouped(*rows), CreditConfig())
    assert {s.rollout_id for s in samples} == {"g/1", "g/2"} and stats["invalid"] == 1 and stats["reward_mean"] == 2.0


def test_a_batch_without_a_valid_rollout_trains_nothing_and_says_so():
    samples, stats = credit(grouped(rollout("g", 0, None), rollout("g", 1, "invalid")), CreditConfig())
    assert samples == [] and stats == {"rollouts": 2.0, "invalid": 2.0, "groups": 1.0, "invalid/unknown": 2.0}


def test_a_rollout_in_which_the_model_took_no_turn_is_counted_and_trains_nothing():
    samples, stats = credit(grouped(rollout("g", 0, 1.0, tools=(0,))), CreditConfig())
    assert not samples and stats["rollouts"] == 1 and stats["malformed"] == 0


def three_rows(reduction, **settings):
    """A rollout of rows with 3, 2 and 1 tokens beside one of one row with 6, rewards 1 and 0."""
    parts = [rollout("g", 0, 1, (5,) * n, segment=k) for k, n in enumerate((3, 2, 1))]
    whole = rollout("g", 1, 0, (5,) * 6)
    config = CreditConfig(reduction=reduction, **settings)
    samples, _ = credit(grouped(parts[1], whole, parts[0], parts[2]), config)
    return parts, whole, samples


@pytest.mark.parametrize("reduction, total", [("sequence", 1), ("token", 6), ("constant", 0.75)])
def test_a_rollout_that_became_three_rows_weighs_as_one(reduction, total):
    parts, whole, samples = three_rows(reduction, max_tokens=8)
    assert [one.advantage for one in (*parts, whole)] == pytest.approx([1, 1, 1, -1], abs=1e-5)
    weight = {r: sum(s.loss_weight.sum() for s in samples if s.rollout_id == r) for r in ("g/0", "g/1")}
    count = {r: sum(s.count for s in samples if s.rollout_id == r) for r in ("g/0", "g/1")}
    assert weight["g/0"] == pytest.approx(total) and weight["g/1"] == pytest.approx(total)
    assert count["g/0"] == count["g/1"] == (6 if reduction == "token" else 1)
    assert sorted(s.sample_id for s in samples) == ["g/0/0", "g/0/1", "g/0/2", "g/1/0"]


def test_reduction_by_turn_gives_every_turn_weight_one():
    rows = [rollout("g", 0, 1, (5,) * 9, turns=[(4, None), (3, None), (2, None)], tools=(1,)), rollout("g", 1, 0, (5,) * 3)]
    samples, _ = credit(grouped(*rows), CreditConfig(reduction="turn"))
    assert samples[0].loss_weight.tolist() == pytest.approx([0, 0] + [1 / 4] * 4 + [0] * 3 + [1 / 2] * 2)
    assert [s.count for s in samples] == [2, 1]


def test_the_loss_of_two_answers_of_1_and_3_tokens_is_half_whatever_the_micro_batch():
    rows = [rollout("g", 0, 1, (5,)), rollout("g", 1, -1, (5,) * 3)]
    samples, _ = credit(grouped(*rows), CreditConfig(eps=0.0))
    packs = [pack([s]) for s in samples]
    sums = [-float((p.loss_weight * p.streams["advantage"]).sum()) for p in packs]  # ratio 1
    assert sum(sums) / sum(p.count for p in packs) == pytest.approx(0.5)
    together = pack(samples)
    assert -float((together.loss_weight * together.streams["advantage"]).sum()) / together.count == pytest.approx(0.5)


def test_prompt_and_tool_tokens_are_never_trained_and_streams_belong_to_their_tokens():
    row = rollout("g", 0, 1, (5, 6, 7, 8), turns=[(1, 0.5), (2, None), (1, 0.1)], tools=(1,), logprob=[-0.1, -0.2, -0.3, -0.4])
    samples, _ = credit(grouped(row, rollout("g", 1, 0)), CreditConfig(turn_credit="recipe", turn_weight=0.3))
    sample = samples[0]
    assert sample.ids.tolist() == [1, 2, 5, 6, 7, 8] and sample.loss_weight.tolist() == [0, 0, 1, 0, 0, 1]
    assert sample.behaviour_logprob[[2, 5]].tolist() == pytest.approx([-0.1, -0.4])
    assert sample.advantage[[0, 1, 3, 4]].tolist() == [0] * 4 and sample.advantage[2] != sample.advantage[5] != 0
    assert np.isfinite(pack([sample]).streams["behaviour_logprob"]).all(), "NaN where nothing was sampled is dropped"


def test_truncated_answers_train_nothing_when_masked_but_stay_in_the_mean():
    rows = [rollout("g", i, r, status="length" if i == 2 else "done") for i, r in enumerate([1, 3, 5])]
    samples, stats = credit(grouped(*rows), CreditConfig(mask_truncated=True, advantage="dr_grpo"))
    assert [one.advantage for one in rows] == [-2, 0, 2] and [s.rollout_id for s in samples] == ["g/0", "g/1"]
    assert stats["truncated"] == pytest.approx(1 / 3)
    assert len(credit(grouped(*rows), CreditConfig())[0]) == 3


def test_statistics_count_flat_groups_lengths_and_parts():
    rows = [rollout("a", 0, 1, (5,) * 2), rollout("a", 1, 1, (5,) * 4), rollout("b", 0, 0), rollout("b", 1, 2)]
    for one in rows:
        one.score.parts = {"format": one.score.reward / 2}
    _, stats = credit(grouped(*rows), CreditConfig())
    assert stats["zero_advantage_groups"] == 0.5 and stats["length_mean"] == 3 and stats["length_max"] == 4
    assert stats["reward_mean"] == 1 and stats["reward_std"] == pytest.approx(0.5**0.5) and stats["reward_part/format"] == 0.5


@pytest.mark.parametrize(
    "settings, rule",
    [
        (dict(advantage="gae"), "credit.advantage='gae' must be grpo"),
        (dict(reduction="constant"), "credit.max_tokens=None must be above 0"),
        (dict(turn_weight=0.3), "credit.turn_weight=0.3 must be 0 without"),
        (dict(turn_credit="unbiased"), "must be rloo with turn_credit=unbiased"),
        (dict(turn_credit="unbiased", advantage="rloo", mask_truncated=True), "credit.mask_truncated=True must be false"),
        (dict(turn_credit="recipe", turn_weight=math.nan), "credit.turn_weight=nan must be a finite number"),
        (dict(turn_credit="gigpo", states="page"), "credit.states='page' must be history or observation"),
        (dict(turn_credit="gigpo", discount=1.5), "credit.discount=1.5 must be in 0..1"),
    ],
)
def test_bad_settings_are_refused_with_the_rule(settings, rule):
    with pytest.raises(ValueError, match=rule):
        CreditConfig(**settings)


def test_a_rollout_of_unequal_fields_is_refused_by_name():
    row = rollout("g", 0, 1)
    row.logprob.pop()
    with pytest.raises(ValueError, match="rollout g/0: .*'logprob': 2.*equally long"):
        credit(grouped(row), CreditConfig())
