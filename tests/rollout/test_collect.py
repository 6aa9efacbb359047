"""Batches: the same groups whatever happens on the way, nothing generated twice, bounds that hold."""

import asyncio
import json
import logging

import numpy as np
import pytest

from megatron_nb.data.prompts import PromptSet
from megatron_nb.records import Conversation, Prompt, Score
from megatron_nb.rollout.agent import seed_of
from megatron_nb.rollout.collect import CollectConfig, Collector, Interrupted, OverlongConfig, all_equal
from megatron_nb.rollout.engine import Sampling
from megatron_nb.rollout.produce import soft_overlong
from tests.data.data_tokenizers import tiny
from tests.rollout.fake_engine import EOS, FakeEngine

TOKENIZER = tiny()
SAMPLING = Sampling(12, stop_ids=(EOS,))


def prompts(count=10, seed=3):
    said = [Conversation([{"role": "user", "content": f"q{i}"}], f"row-{i}", "s") for i in range(count)]
    return PromptSet([Prompt(one, [100 + i, 7]) for i, one in enumerate(said)], [], seed)


async def by_ids(group):
    return [Score(sum(rollout.ids) / 100 + rollout.ids[0]) for rollout in group.rollouts]


def collector(folder, engine=None, score=by_ids, sets=None, num_steps=9, stopping=lambda: False, **config):
    settings = CollectConfig(**{"num_prompts": 4, "group_size": 3, "concurrency": 2, **config})
    return Collector(engine or FakeEngine(), sets or prompts(), score, settings, SAMPLING, TOKENIZER, folder,
                     seed=5, num_steps=num_steps, stopping=stopping)  # fmt: skip


def told(groups):
    return [(group.group_id, [(r.index, r.ids, r.score.reward) for r in group.rollouts]) for group in groups]


# ---------------------------------------------------------------------- order and seeds
def test_every_epoch_takes_every_prompt_once_in_another_order_and_a_place_is_all_a_resume_needs():
    sets = prompts(10)
    order = [sets.at(place).conversation.sample_id for place in range(30)]
    epochs = [order[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) == 3
    assert [prompts(10).at(place).conversation.sample_id for place in reversed(range(30))] == order[::-1]
    assert prompts(10, seed=4).at(0) != sets.at(0) or prompts(10, seed=4).at(1) != sets.at(1)


def test_a_step_has_its_groups_in_the_order_of_their_prompts_with_seeds_of_their_own(tmp_path):
    engine = FakeEngine(delay=0.001)
    one = collector(tmp_path, engine)
    groups, stats = one.collect(1)
    assert [g.prompt.conversation.sample_id for g in groups] == [prompts().at(p).conversation.sample_id for p in range(4)]
    assert [r.seed for r in groups[1].rollouts] == [
        seed_of(5, 1, 1, "s", groups[1].prompt.conversation.sample_id, i) for i in range(3)
    ]
    assert engine.most == 2 and len(engine.requests) == 12  # collect.concurrency
    assert (stats["groups_tried"], stats["reused"], stats["rounds"], stats["staleness_max"]) == (4, 0, 1, 0)


def test_a_prompt_that_comes_twice_in_a_step_is_two_groups_with_other_answers(tmp_path):
    groups, _ = collector(tmp_path, sets=prompts(2)).collect(1)
    same = [g for g in groups if g.prompt.conversation.sample_id == "row-0"]
    assert len(same) == 2 and same[0].group_id != same[1].group_id and same[0].rollouts[0].ids != same[1].rollouts[0].ids


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_share_the_prompts_and_generate_what_one_would(tmp_path, replicas):
    whole = told(collector(tmp_path / "whole").collect(1)[0])
    parts = [collector(tmp_path / "parts", FakeEngine(replica=i, replicas=replicas)) for i in range(replicas)]
    shares = [part._start(1, [0, 1, 2, 3]).future.result() for part in parts]  # what the ranks gather from each other
    found = {name: rollouts for share in shares for name, rollouts in share.rollouts.items()}
    assert sum(len(share.rollouts) for share in shares) == 4 and all(share.rollouts for share in shares)
    assert [(name, [(r.index, r.ids, r.score.reward) for r in found[name]]) for name, _ in whole] == whole


# ---------------------------------------------------------------------- kills
class Killed(Exception):
    pass


def dies_at(number, engine):
    def on_generate(request):
        if len(engine.requests) == number:
            raise Killed

    engine.on_generate = on_generate
    return engine


@pytest.mark.parametrize("number", [0, 1, 5, 11])
def test_what_was_generated_before_a_kill_is_used_unchanged_and_not_generated_again(tmp_path, number):
    whole = told(collector(tmp_path / "whole").collect(1)[0])
    with pytest.raises(Killed):
        collector(tmp_path / "killed", dies_at(number, FakeEngine()), concurrency=1).collect(1)
    engine = FakeEngine()
    groups, stats = collector(tmp_path / "killed", engine, concurrency=1).collect(1)
    assert told(groups) == whole
    assert (stats["reused"], len(engine.requests)) == (number, 12 - number)


def test_scores_before_a_kill_are_used_unchanged_and_not_asked_again(tmp_path):
    calls = []

    async def dying(group):
        calls.append(group.group_id)
        if len(calls) == 3:
            raise Killed
        return await by_ids(group)

    whole = told(collector(tmp_path / "whole").collect(1)[0])
    with pytest.raises(Killed):
        collector(tmp_path / "killed", score=dying, concurrency=1).collect(1)
    scored = calls[:2]
    engine = FakeEngine()
    groups, stats = collector(tmp_path / "killed", engine, score=dying, concurrency=1).collect(1)
    assert told(groups) == whole and sorted(scored + calls[3:]) == sorted(g.group_id for g in groups)
    assert stats["reused"] >= 9 and not {r.request_id.rsplit("/", 2)[0] for r in engine.requests} & set(scored)


@pytest.mark.parametrize("change", ["prompt_ids", "seed", "sampling", "weight_version"])
def test_a_rollout_of_another_prompt_seed_sampling_or_of_old_weights_is_generated_again(tmp_path, change):
    groups, _ = collector(tmp_path, FakeEngine(version=6)).collect(7)
    (path,) = (tmp_path / "rollouts" / "pending").iterdir()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    victim = next(row["rows"][0] for row in rows if "rows" in row)
    victim[change] = {"prompt_ids": [1], "seed": 1, "sampling": {}, "weight_version": [5] * len(victim["ids"])}[change]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = FakeEngine(version=6)  # a rollout of step 7 by weights 5 is too old without staleness
    assert told(collector(tmp_path, engine).collect(7)[0]) == told(groups)
    assert len(engine.requests) == 1


def test_the_state_of_a_step_leads_to_the_next_steps_batch_and_other_prompts_are_refused(tmp_path):
    one = collector(tmp_path / "one", engine := FakeEngine())
    one.collect(1)
    engine.version = 1
    state, expected = json.loads(json.dumps(one.state())), told(one.collect(2)[0])
    other = collector(tmp_path / "other", engine)
    other.restore(state)
    assert told(other.collect(2)[0]) == expected
    with pytest.raises(ValueError, match="prompts are not those of the checkpoint"):
        collector(tmp_path / "third", sets=prompts(9)).restore(state)


def test_a_job_that_is_asked_to_stop_leaves_at_once_and_keeps_what_is_finished(tmp_path):
    engine = FakeEngine(delay=0.02)
    with pytest.raises(Interrupted):
        collector(tmp_path, engine, stopping=lambda: len(engine.requests) > 4).collect(1)
    assert 4 < len(engine.requests) < 12
    groups, stats = collector(tmp_path).collect(1)
    assert stats["reused"] >= 2 and told(groups) == told(collector(tmp_path / "whole").collect(1)[0])


# ---------------------------------------------------------------------- dynamic sampling
@pytest.mark.parametrize("flat", [range(0, 30, 3), range(6)], ids=["a third", "the first six"])
def test_all_equal_groups_are_replaced_from_further_prompts_in_order(tmp_path, flat):
    names = [prompts(30).at(place).conversation.sample_id for place in range(30)]
    dull = {names[place] for place in flat}

    async def by_prompt(group):
        equal = group.prompt.conversation.sample_id in dull
        return [Score(0.7 if equal else float(rollout.index)) for rollout in group.rollouts]

    groups, stats = collector(tmp_path, score=by_prompt, sets=prompts(30), dynamic_sampling=True, num_prompts=8).collect(1)
    assert [group.prompt.conversation.sample_id for group in groups] == [name for name in names if name not in dull][:8]
    assert stats["rounds"] >= 2 and 0 < stats["groups_equal"] < 1 and not any(map(all_equal, groups))


def test_dynamic_sampling_stops_at_its_bound_with_the_rates(tmp_path):
    async def flat(group):
        return [Score(0.7) for _ in group.rollouts]

    engine = FakeEngine()
    with pytest.raises(RuntimeError, match=r"kept 0 of 12 groups \(0.0%\), 4 are needed .*max_generation_batches=3 .*0.7"):
        collector(tmp_path, engine, score=flat, dynamic_sampling=True, max_generation_batches=3).collect(1)
    assert len(engine.requests) == 36


def test_without_dynamic_sampling_equal_groups_stay(tmp_path):
    async def flat(group):
        return [Score(0.7) for _ in group.rollouts]

    groups, stats = collector(tmp_path, score=flat).collect(1)
    assert len(groups) == 4 and stats["groups_equal"] == 1.0


# ---------------------------------------------------------------------- invalid rollouts
def test_a_rollout_that_hangs_is_cut_by_its_time_out_named_and_not_shown_to_the_reward(tmp_path, caplog):
    name = f"step1.2.{prompts().at(2).conversation.sample_id}"
    seen = []

    async def watching(group):
        seen.extend(rollout.rollout_id for rollout in group.rollouts)
        return await by_ids(group)

    engine = FakeEngine(hangs=[f"{name}/1"])
    with caplog.at_level(logging.WARNING):
        groups, stats = collector(tmp_path, engine, score=watching, timeout_s=0.2, concurrency=12).collect(1)
    bad = groups[2].rollouts[1]
    assert bad.status == "invalid" and bad.score.reward is None and "collect.timeout_s=0.2" in bad.score.reason
    assert stats["invalid_share"] == 1 / 12 and len(seen) == 11 and bad.rollout_id not in seen
    assert f"{name}/1 is invalid: no end within" in caplog.text and engine.aborted == [f"{name}/1/0.0"]
    again = FakeEngine()
    assert told(collector(tmp_path, again, score=watching).collect(1)[0]) == told(groups) and not again.requests


def test_an_engine_that_is_out_of_reach_makes_the_rollout_invalid_and_a_request_it_can_never_serve_stops_the_job(tmp_path):
    def refuse(error):
        def on_generate(request):
            if request.request_id.endswith("/1/0.0"):
                raise error

        return on_generate

    groups, _ = collector(tmp_path / "a", FakeEngine(on_generate=refuse(ConnectionError("gone")))).collect(1)
    reasons = [rollout.score.reason for group in groups for rollout in group.rollouts if rollout.status == "invalid"]
    assert reasons == ["generation: ConnectionError: gone"] * 4
    with pytest.raises(ValueError, match="too long"):
        collector(tmp_path / "b", FakeEngine(on_generate=refuse(ValueError("too long")))).collect(1)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_invalid_and_a_batch_without_any_stops_the_job(tmp_path, reward):
    async def some(group):
        return [Score(reward if rollout.index == 1 else 1.0 * rollout.index) for rollout in group.rollouts]

    async def never(group):
        return [Score(reward, reason="judge is down") for _ in group.rollouts]

    groups, stats = collector(tmp_path / "some", score=some).collect(1)
    assert stats["invalid_share"] == 1 / 3 and [r.score.reward for r in groups[0].rollouts] == [0.0, None, 2.0]
    with pytest.raises(RuntimeError, match="no rollout has a reward"):
        collector(tmp_path / "never", score=never).collect(1)


def test_a_list_of_scores_of_the_wrong_length_is_an_error_with_both_counts(tmp_path):
    async def short(group):
        return [Score(1.0)] * (len(group.rollouts) - 1)

    with pytest.raises(ValueError, match="2 scores for the 3 rollouts"):
        collector(tmp_path, score=short).collect(1)


def test_turn_rewards_are_written_into_the_turns(tmp_path):
    async def turns(group):
        return [Score(1.0 * rollout.index, [0.25]) for rollout in group.rollouts]

    groups, _ = collector(tmp_path, score=turns).collect(1)
    assert {turn.reward for g in groups for r in g.rollouts for turn in r.turns} == {0.25}


def test_the_overlong_penalty_is_soft_and_a_part_of_the_score(tmp_path):
    config = OverlongConfig(length=10, cache=4)
    assert [soft_overlong(n, config) for n in (0, 6, 7, 8, 10, 99)] == [0, 0, -0.25, -0.5, -1, -1]
    groups, _ = collector(tmp_path, overlong=config).collect(1)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        penalty = soft_overlong(len(rollout.ids), config)
        assert rollout.score.parts == {"overlong": penalty}
        assert rollout.score.reward == pytest.approx(sum(rollout.ids) / 100 + rollout.ids[0] + penalty)


# ---------------------------------------------------------------------- staleness
def run_steps(one, engine, steps=4):
    """What a job does: collect, train (here: wait for something to be generated meanwhile), new weights."""
    batches = []
    for step in range(1, steps + 1):
        batches.append(one.collect(step))
        asyncio.run(asyncio.sleep(0.03))
        engine.load_weights(None, step)
    return batches


@pytest.mark.parametrize("k", [1, 2])
def test_with_staleness_k_later_batches_run_while_training_and_no_token_is_older(tmp_path, k):
    engine = FakeEngine(delay=0.004)
    batches = run_steps(collector(tmp_path, engine, staleness=k, concurrency=6, num_steps=4), engine)
    lags, mixed = [], 0
    for step, (groups, stats) in enumerate(batches, 1):
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            assert rollout.weight_version == sorted(rollout.weight_version) and len(rollout.weight_version) == len(rollout.ids)
            lags += [step - 1 - version for version in rollout.weight_version]
            mixed += len(set(rollout.weight_version)) > 1
            _replay(rollout)
        assert stats["staleness_max"] <= k
    assert min(lags) == 0 and 0 < max(lags) <= k and mixed  # some went on with new weights
    places = [[int(group.group_id.split(".")[1]) for group in groups] for groups, _ in batches]
    assert places == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    engine.close()


def _replay(rollout):
    """Every token is the one that the version marked on it draws after what stands before it."""
    from megatron_nb.rollout.engine import Request

    engine, start, part = FakeEngine(), 0, 0
    marks = rollout.weight_version
    for at, version in enumerate(marks):
        if at and version != marks[at - 1]:
            start, part = at, part + 1
        engine.version = version
        ids = rollout.prompt_ids + rollout.ids[:start]
        seeds = [rollout.seed] + [seed_of(rollout.seed, 1, extra) for extra in range(1, 8)]
        draws = [engine._draw(Request("", ids, SAMPLING, seed), rollout.ids[start:at]) for seed in seeds]
        assert rollout.ids[at] in [draw % 50 + (1 if draw % 7 == 0 else 2) for draw in draws]


def test_staleness_0_is_the_synchronous_run(tmp_path):
    first, second = FakeEngine(delay=0.001), FakeEngine()
    batches = run_steps(collector(tmp_path / "a", first, staleness=0), first)
    alone = []
    for step in range(1, 5):
        second.version = step - 1
        fresh = collector(tmp_path / f"b{step}", second)
        fresh.cursor = 4 * (step - 1)
        alone.append(fresh.collect(step)[0])
    assert [told(groups) for groups, _ in batches] == list(map(told, alone))
    assert {version for groups, _ in batches[2:3] for g in groups for r in g.rollouts for version in r.weight_version} == {2}


def test_batches_under_way_come_back_with_their_prompts_after_a_kill(tmp_path):
    engine = FakeEngine(delay=0.002)
    one = collector(tmp_path, engine, staleness=2, num_steps=5)
    one.collect(1)
    engine.load_weights(None, 1)
    state = json.loads(json.dumps(one.state()))
    assert sorted(state["ahead"]) == ["2", "3"] and state["cursor"] == 12
    asyncio.run(asyncio.sleep(0.1))
    engine.close()
    files = (tmp_path / "rollouts" / "pending").glob("step-0000000[23]*")
    pending = sum('"rows"' in line for path in files for line in path.read_text().splitlines())
    again = collector(tmp_path, second := FakeEngine(version=1), staleness=2, num_steps=5)
    again.restore(state)
    groups, _ = again.collect(2)
    assert [group.group_id.split(".")[1] for group in groups] == ["4", "5", "6", "7"]
    again.collect(3)
    assert pending and 0 < len([r for r in second.requests if r.request_id.startswith(("step2", "step3"))]) <= 24 - pending
    second.close()


def test_answers_to_held_out_prompts_use_the_same_seeds_at_every_evaluation_and_no_place_of_the_order(tmp_path):
    one = collector(tmp_path, engine := FakeEngine())
    held = [prompts().at(place) for place in range(3)]
    first, _ = one.answers("heldout", 0, held, 2)
    engine.version = 7
    later, _ = one.answers("heldout", 7, held, 2)
    assert [[r.seed for r in g.rollouts] for g in first] == [[r.seed for r in g.rollouts] for g in later] and one.cursor == 0
    assert first[0].rollouts[0].ids != later[0].rollouts[0].ids

    async def judge(group):
        return [Score(9.0) for _ in group.rollouts]

    assert [[s.reward for s in scores] for scores in one.judge(first, judge)] == [[9.0, 9.0]] * 3
    assert np.isfinite([r.score.reward for g in first for r in g.rollouts]).all()
