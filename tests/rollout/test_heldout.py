"""Evaluation on held-out prompts, and the filter by success: same answers for the same weights, nothing asked twice."""

import json
import math

import pytest

from megatron_nb.records import Score
from megatron_nb.rollout.collect import OverlongConfig
from megatron_nb.rollout.heldout import Heldout
from megatron_nb.rollout.prompt_filter import PromptFilterConfig, filter_by_success
from megatron_nb.rollout.store import read_step
from tests.rollout.fake_engine import FakeEngine
from tests.rollout.test_collect import collector, prompts


async def judge(group):
    return [Score(None if rollout.index else float(rollout.ids[0])) for rollout in group.rollouts]


async def longer(group):
    """The first of two answers wins when it is longer; a tie is a half."""
    a, b = (len(rollout.ids) for rollout in group.rollouts)
    return [Score(0.5 + 0.5 * ((a > b) - (a < b))), Score(0.0)]


def heldout(folder, engine, samples=2, **more):
    held = [prompts().at(place) for place in range(4)]
    return Heldout(collector(folder, engine), held, samples, folder, writes=True, **{"judge": judge, "versus": longer, **more})


def test_rewards_judge_length_and_win_rate_are_means_over_prompts(tmp_path):
    one = heldout(tmp_path, engine := FakeEngine())
    start = one.evaluate(0)
    engine.version = 5
    told = one.evaluate(5)
    before, after = read_step(tmp_path, 0, "heldout"), read_step(tmp_path, 5, "heldout")
    by_prompt = [(after[i].score.reward + after[i + 1].score.reward) / 2 for i in range(0, 8, 2)]
    mean = sum(by_prompt) / 4
    assert told["heldout_reward"] == pytest.approx(mean)
    spread = sum((value - mean) ** 2 for value in by_prompt) / 3
    assert told["heldout_reward_error"] == pytest.approx(math.sqrt(spread / 4))
    assert told["heldout_judge"] == pytest.approx(sum(after[i].ids[0] for i in range(0, 8, 2)) / 4)
    wins = [0.5 + 0.5 * ((len(a.ids) > len(b.ids)) - (len(a.ids) < len(b.ids))) for a, b in zip(after, before)]
    assert told["heldout_win_rate"] == pytest.approx(sum(wins) / 8) and start["heldout_win_rate"] == 0.5
    assert told["heldout_length"] == sum(len(rollout.ids) for rollout in after) / 8
    assert after[0].score.parts == {"heldout_judge": float(after[0].ids[0]), "heldout_win_rate": wins[0]}


def test_a_later_attempt_compares_with_the_starting_models_answers(tmp_path):
    first = heldout(tmp_path / "a", FakeEngine())
    first.evaluate(0)
    engine = FakeEngine(version=5)
    expected = heldout(tmp_path / "b", FakeEngine())
    expected.evaluate(0)
    expected.collector.engine.version = 5
    assert heldout(tmp_path / "a", engine).evaluate(5) == expected.evaluate(5)
    assert "heldout_win_rate" not in heldout(tmp_path / "c", FakeEngine(version=5)).evaluate(5)


async def rank(group):
    """Compares the rollouts of a group: the share of the others that an answer is longer than."""
    lengths = [len(rollout.ids) for rollout in group.rollouts]
    assert len({rollout.index for rollout in group.rollouts}) == len(lengths) == 2
    return [Score(sum((a > b) + 0.5 * (a == b) for b in lengths) - 0.5) for a in lengths]


def test_a_reward_that_compares_answers_is_asked_beside_the_starting_models(tmp_path):
    one = heldout(tmp_path, engine := FakeEngine(), samples=2, relative=(True, True), judge=rank)
    one.collector.score = rank
    start = one.evaluate(0)
    assert start["heldout_reward"] == start["heldout_judge"] == start["heldout_win_rate"] == 0.5
    engine.version = 5
    told = one.evaluate(5)
    assert told["heldout_reward"] == told["heldout_judge"] == told["heldout_win_rate"] != 0.5
    assert told["heldout_invalid"] == 0


def test_without_judges_there_are_no_numbers_of_theirs(tmp_path):
    told = heldout(tmp_path, FakeEngine(), judge=None, versus=None).evaluate(0)
    assert set(told) == {"heldout_reward", "heldout_reward_error", "heldout_length", "heldout_truncated", "heldout_invalid"}


async def by_row(group):
    """Prompt row-i succeeds i times (of 8); row-9 is never valid."""
    number = int(group.prompt.conversation.sample_id[4:])
    return [Score(None if number == 9 else float(rollout.index < number)) for rollout in group.rollouts]


@pytest.mark.parametrize(("lo", "hi"), [(1, 5), (0, 0), (8, 8)])
def test_the_filter_keeps_prompts_by_successes_and_is_done_once(tmp_path, lo, hi):
    config = PromptFilterConfig(n=8, lo=lo, hi=hi)
    one = collector(tmp_path, engine := FakeEngine(), score=by_row, concurrency=64)
    kept = filter_by_success(one, one.prompts, config, tmp_path, writes=True)
    assert kept == list(range(lo, hi + 1)) and len(engine.requests) == 80
    assert json.loads((tmp_path / "prompt_filter.json").read_text())["successes"] == [0, 1, 2, 3, 4, 5, 6, 7, 8, None]
    assert not list((tmp_path / "rollouts" / "pending").iterdir())
    again = collector(tmp_path, second := FakeEngine(), score=by_row)
    assert filter_by_success(again, again.prompts, config, tmp_path, writes=True) == kept and not second.requests
    only = one.prompts.only(kept)
    assert {only.at(place).conversation.sample_id for place in range(len(only))} == {f"row-{i}" for i in kept}


def test_a_filter_that_was_killed_asks_only_what_is_missing_and_one_that_keeps_nothing_says_so(tmp_path):
    class Killed(Exception):
        pass

    def dies(request):
        if len(engine.requests) == 30:
            raise Killed

    engine = FakeEngine(on_generate=dies)
    one = collector(tmp_path, engine, score=by_row, concurrency=1)
    with pytest.raises(Killed):
        filter_by_success(one, one.prompts, PromptFilterConfig(), tmp_path, writes=True)
    again = collector(tmp_path, second := FakeEngine(), score=by_row, concurrency=1)
    assert filter_by_success(again, again.prompts, PromptFilterConfig(), tmp_path, writes=True) == [1, 2, 3, 4, 5]
    assert len(second.requests) == 50
    with pytest.raises(ValueError, match="keeps none of 10 prompts: lo=1..hi=5 .*success=9"):
        filter_by_success(again, again.prompts, PromptFilterConfig(success=9.0), tmp_path, writes=True)
    with pytest.raises(ValueError, match="lo=3 <= hi=2"):
        PromptFilterConfig(lo=3, hi=2)


def test_an_overlong_penalty_does_not_turn_a_success_into_a_failure(tmp_path):
    async def right(group):
        return [Score(1.0 if rollout.index < 2 else 0.0) for rollout in group.rollouts]

    one = collector(tmp_path, FakeEngine(), score=right, overlong=OverlongConfig(length=4, cache=3), concurrency=64)
    kept = filter_by_success(one, one.prompts, PromptFilterConfig(n=4, lo=2, hi=2), tmp_path, writes=True)
    assert len(kept) == 10
