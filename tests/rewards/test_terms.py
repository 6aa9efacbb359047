"""Composition of terms, verdicts that are no numbers, and a user's own classes."""

import asyncio
import math

import pytest

from megatron_nb.config import ConfigError, build
from megatron_nb.records import Score
from megatron_nb.rewards.reward import RewardConfig, build_reward, check_reward
from tests.rewards.made_groups import group_of, scores, values

OWN = "tests.rewards.own_rewards"


def constant(value, **more):
    return {"kind": f"{OWN}.Constant", "settings": {"value": value}, **more}


# ------------------------------------------------------------------ composition
def test_the_total_is_the_weighted_sum_and_every_part_is_kept():
    terms = {"a": constant(2.0, weight=0.5), "b": constant(-1.0, weight=3.0), "watched": constant(7.0, weight=0.0)}
    assert scores(terms, group_of("x", "y")) == [Score(-2.0, None, {"a": 2.0, "b": -1.0, "watched": 7.0}, "")] * 2


def test_a_gate_of_zero_makes_the_total_zero_and_stops_the_terms_after_it():
    form = {"kind": "format", "gate": True, "weight": 0.1}
    never = {"kind": f"{OWN}.ByTextAsync"}  # it would fail on these texts
    shut, passed = scores({"never": never, "form": form}, group_of("<think>", "ok 2"))
    assert shut == Score(0.0, None, {"form": 0.0}, "form: its thinking is never closed")
    assert passed == Score(2.1, None, {"form": 1.0, "never": 2.0}, "")


def test_what_a_gate_before_it_gave_does_not_count_when_a_gate_is_zero():
    gates = {"first": constant(1.0, weight=0.1, gate=True), "second": constant(0.0, gate=True)}
    assert scores(gates, group_of("x")) == [Score(0.0, None, {"first": 1.0, "second": 0.0}, "")]


def test_a_term_that_compares_the_group_sees_also_those_that_a_gate_shut_out():
    terms = {"form": {"kind": "format", "gate": True, "weight": 0.0}, "rank": {"kind": f"{OWN}.Rank"}}
    found = scores(terms, group_of("a", "", "c"))
    assert [score.reward for score in found] == [0.0, 0.0, 2.0]
    assert found[2].parts == {"form": 1.0, "rank": 2.0, "rank/seen": 3} and found[2].turn_rewards == [0.5]


def test_a_gate_that_fails_makes_the_rollout_invalid_not_zero():
    (score,) = scores({"gate": constant(None, gate=True), "a": constant(1.0)}, group_of("x"))
    assert score == Score(None, None, {}, "gate: it gave None")


def test_invalid_rollouts_are_never_asked_about_and_an_episode_is_scored_once_by_its_last_row():
    group = group_of("first", "second", "", statuses=["done", "done", "invalid"])
    group.rollouts[0].index = group.rollouts[1].index = 0
    group.rollouts[0].segment = 1  # the rows come in any order
    both, invalid = scores({"n": {"kind": f"{OWN}.longer_is_better"}, "rank": {"kind": f"{OWN}.Rank"}}, group)
    assert both.parts == {"n": 5.0, "rank": 0.0, "rank/seen": 1}
    assert invalid.reward is None and "itself is invalid" in invalid.reason


def test_two_terms_with_turn_rewards_are_refused():
    with pytest.raises(ValueError, match="b gives turn rewards, as another term does"):
        scores({"a": {"kind": f"{OWN}.Rank"}, "b": {"kind": f"{OWN}.Rank"}}, group_of("x"))


# ------------------------------------------------------------------ cases 11 and 23
@pytest.mark.parametrize("kind", ["ByText", "ByTextAsync"])
def test_exception_none_and_nan_make_that_rollout_invalid_and_name_term_and_cause(kind):
    found = scores({"mine": {"kind": f"{OWN}.{kind}"}}, group_of("ok 1", "ok 3", "ok 2", "raise", "none", "ok nan", "ok inf"))
    assert [score.reward for score in found] == [1.0, 3.0, 2.0, None, None, None, None]
    assert [score.reason for score in found[3:]] == [
        "mine: ArithmeticError: no such number",
        "mine: it gave None",
        "mine: it gave nan, which is no finite number",
        "mine: it gave inf, which is no finite number",
    ]
    valid = [score.reward for score in found[:4] if score.reward is not None]
    assert sum(valid) / len(valid) == 2.0


def test_a_failing_term_makes_the_rollout_invalid_but_keeps_the_other_parts():
    (score,) = scores({"good": constant(1.0), "bad": constant("text")}, group_of("x"))
    assert score == Score(None, None, {"good": 1.0}, "bad: it gave 'good', which is no finite number")


def test_a_list_of_the_wrong_length_raises_naming_both_counts():
    with pytest.raises(ValueError, match="reward.terms.mine gave 2 rewards for the 3 rollouts of g: one each"):
        scores({"mine": {"kind": f"{OWN}.Short"}}, group_of("a", "b", "c"))


@pytest.mark.parametrize(("failures", "retries", "reward"), [(1, 1, 1.0), (2, 1, None), (1, 0, None)])
def test_exceptions_are_tried_again_a_bounded_number_of_times(failures, retries, reward):
    (score,) = scores({"a": {"kind": f"{OWN}.Flaky", "settings": {"failures": failures}}}, group_of("x"), retries=retries)
    assert score.reward == reward and ("ConnectionError: busy" in score.reason) == (reward is None)


# ------------------------------------------------------------------ a user's own
@pytest.mark.parametrize(
    ("term", "expected"),
    [
        ({"kind": f"{OWN}.Mentions", "settings": {"word": "fish"}}, [1.0, 0.0]),  # dataclass, plain, per rollout
        ({"kind": f"{OWN}.Mentions", "settings": {"word": "fish", "times": 2}}, [0.0, 0.0]),
        ({"kind": f"{OWN}.longer_is_better", "settings": {"scale": 0.5}}, [4.0, 1.5]),  # a function
        ({"kind": f"{OWN}.Constant"}, [1.0, 1.0]),  # async, a batch of texts
        ({"kind": f"{OWN}.Ids"}, [21.0, 10.0]),  # plain, a batch of token ids, numpy out
        ({"kind": f"{OWN}.Rank"}, [0.0, 1.0]),  # async, the group
    ],
)
def test_yaml_names_a_class_or_function_of_ones_own(term, expected):
    assert values({"mine": term}, group_of("one fish", "two", ids=[[10, 11], [10]])) == expected


@pytest.mark.parametrize(
    ("term", "complaint"),
    [
        ({"kind": "fromat"}, r"reward.terms.a.kind='fromat' must be one of pointwise, .*, or your own package.module.Class"),
        ({"kind": "no.such.Thing"}, r"kind='no.such.Thing' cannot be imported \(ModuleNotFoundError.*PYTHONPATH"),
        ({"kind": f"{OWN}.Nothing"}, r"cannot be imported \(AttributeError.*has no 'Nothing'"),
        ({"kind": f"{OWN}.NoMethod"}, r"NoMethod must have one of the methods score\(group\), score_rollout"),
        ({"kind": f"{OWN}.WrongSignature"}, r"WrongSignature.score_rollout.* must take \(prompt, rollout\)"),
        ({"kind": f"{OWN}.Mentions"}, r"reward.terms.a.settings.word must be given"),
        ({"kind": f"{OWN}.Mentions", "settings": {"wrod": "x"}}, r"key 'reward.terms.a.settings.wrod'.*nearest is '.*\.word'"),
        ({"kind": f"{OWN}.Mentions", "settings": {"word": "x", "times": "two"}}, r"settings.times must be int, found the str"),
        ({"kind": f"{OWN}.Flaky", "settings": {"failures": 1.5}}, r"settings.failures must be int"),
        ({"kind": f"{OWN}.longer_is_better", "settings": {"skale": 1}}, r"unknown key .*nearest is '.*\.scale'"),
        ({"kind": "length", "settings": {"max_tokens": 4, "cache": 8}}, r"cache=8 must be between 0 and max_tokens=4"),
        ({"kind": "regex", "settings": {"pattern": "("}}, r"is no regular expression"),
        ({"kind": "format", "settings": {"thinking": "maybe"}}, r"thinking must be one of optional, required, forbidden"),
        ({"kind": "pass_rate", "settings": {"judge": {"workers": 0}}}, r"reward.terms.a.settings.judge: workers=0 must be"),
        ({"kind": "format", "wieght": 1}, r"unknown key 'reward.terms.a.wieght'.*nearest is '.*weight'"),
        ({"kind": "format", "weight": math.nan}, r"weight=nan must be a finite number"),
        ({"kind": f"{OWN}.Unsendable"}, r"plain method runs in worker processes, and Unsendable cannot be sent.*async def"),
    ],
)
def test_bad_yaml_is_refused_before_any_work(term, complaint):
    with pytest.raises(ValueError, match=complaint):
        build_reward(build(RewardConfig, {"terms": {"a": term}}, "reward"), None, "cpu")


def test_no_terms_and_bad_bounds_are_refused():
    with pytest.raises(ConfigError, match="reward.terms is empty"):
        check_reward(RewardConfig())
    with pytest.raises(ValueError, match="reward.timeout_s=0 must be more than 0"):
        RewardConfig(timeout_s=0)


def test_a_reward_serves_one_event_loop_after_another():
    reward = build_reward(build(RewardConfig, {"terms": {"a": constant(1.0)}, "concurrency": 1}), None, "cpu")

    async def many():
        return await asyncio.gather(*(reward.score(group_of("x")) for _ in range(4)))

    for _ in range(2):
        assert [group[0].reward for group in asyncio.run(many())] == [1.0] * 4
