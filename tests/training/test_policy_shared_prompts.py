"""A prompt that the rows of a group share is computed once, and nothing else changes."""

import numpy as np
import pytest
import torch

from megatron_nb.data.balance import balanced
from megatron_nb.data.packing import pack
from megatron_nb.data.prefix import common_prefix, units
from megatron_nb.records import Sample
from tests.training.test_policy import make, whole_gradients

PROMPTS = {"a": 19, "b": 2, "c": 33, "alone": 8}  # group -> tokens


def rows(seed=0):
    """Four groups of rows with a common prompt; streams are NaN where nothing was sampled; group c has answers of 1 token."""
    random, made = np.random.default_rng(seed), []
    for group, length in PROMPTS.items():
        prompt = random.integers(0, 300, length)
        for i in range(1 if group == "alone" else 4):
            answer = random.integers(0, 300, 1 if group == "c" and i else int(random.integers(3, 20)))
            ids = np.concatenate([prompt, answer])
            weight = np.r_[np.zeros(length), np.ones(len(answer))].astype(np.float32)
            noise = np.where(weight > 0, random.normal(-5.7, 0.1, len(ids)), np.nan).astype(np.float32)
            made.append(Sample(
                ids, weight, f"{group}/{i}/0", behaviour_logprob=noise, advantage=noise * (i - 1.5), rollout_id=f"{group}/{i}",
                group_id=group, count=len(answer),
            ))  # fmt: skip
    return made


def gradients(share, ratio, parallel, max_tokens, model):
    settings = dict(ratio=ratio, importance_cap=1.5)
    policy = make(settings, dict(share_prompts=share, pack_tokens=max_tokens), parallel=parallel, **model)
    samples = rows()
    policy.logprobs(samples)
    tokens = sum(int(batch.cu_seqlens[-1]) for batch in policy.packs(samples))
    loss, metrics, gradient = whole_gradients(policy, samples)
    return loss, metrics, gradient, [sample.old_logprob for sample in samples], tokens


@pytest.mark.parametrize(
    ("world", "parallel", "model"),
    [
        (1, {}, {}),
        (2, {"distributed_optimizer": False}, {}),  # with it every rank holds the sum of its slice only
        (2, {"tensor": 2}, {}),
        (2, {"pipeline": 2}, {}),
        (1, {"recompute": "full"}, {"qk_norm": True}),
    ],
    ids=["one", "dp2", "tp2", "pp2", "recompute"],
)
@pytest.mark.parametrize(("ratio", "max_tokens"), [("token", 400), ("sequence", 60)])
def test_shared_prompts_change_neither_log_probs_nor_gradients(ranks, world, parallel, model, ratio, max_tokens):
    found = [ranks.run(world, gradients, share, ratio, parallel, max_tokens, model) for share in (True, False)]
    for shared, whole in zip(*found):
        assert shared[0] == pytest.approx(whole[0], rel=1e-5)
        assert shared[1] == pytest.approx(whole[1], rel=1e-5)
        assert float((shared[2] - whole[2]).norm() / whole[2].norm()) < 1e-5
        for mine, theirs in zip(shared[3], whole[3]):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        if world == 1 and max_tokens == 400:
            saved = sum((PROMPTS[group] - 1) * 3 for group in "abc")
            assert whole[4] - shared[4] == saved, "the prompts of three groups of four are computed once"


def test_rows_of_a_prefix_pack_are_those_of_whole_rows_token_for_token():
    samples = rows()
    shared = units(samples, 1000)
    assert [sample.sample_id for unit in shared for sample in unit if sample.sample_id] == [s.sample_id for s in samples]
    for unit in shared:
        batch = pack(unit, streams=["advantage"])
        bounds = batch.cu_seqlens.tolist()
        for at, tail in enumerate(unit):
            if not tail.prefix:
                continue
            whole = next(sample for sample in samples if sample.sample_id == tail.sample_id)
            place = slice(bounds[at], bounds[at + 1])
            assert unit[0].ids.tolist() + tail.ids.tolist() == whole.ids.tolist()
            assert batch.positions[place].tolist() == list(range(len(whole)))[tail.prefix :], "positions go on from the prompt"
            kept = batch.loss_weight[place] != 0
            assert batch.targets[place][kept].tolist() == whole.ids[whole.loss_weight != 0].tolist()
        trained = sum(int((sample.loss_weight != 0).sum()) for sample in unit)
        assert int((batch.loss_weight != 0).sum()) == trained == batch.count


def test_an_answer_sees_the_prompt_and_itself_but_no_other_answer(ranks):
    before, after = ranks.run(1, _with_another_first_answer)[0]
    assert not torch.equal(before[0], after[0])
    for mine, theirs in zip(before[1:], after[1:]):
        assert torch.equal(mine, theirs), "a change in one answer reached another"


def _with_another_first_answer():
    policy, found = make(update=dict(pack_tokens=400)), []
    for change in (0, 1):
        samples = [sample for sample in rows() if sample.group_id == "a"]
        samples[0].ids[-2] = (samples[0].ids[-2] + change) % 300
        policy.logprobs(samples)
        found.append([torch.from_numpy(sample.old_logprob) for sample in samples])
    return found


@pytest.mark.parametrize(
    ("rule", "change", "length"),
    [
        ("all rows begin alike", lambda rows: None, 18),
        ("a row with another token", lambda rows: rows[2].ids.__setitem__(7, 301), 7),
        ("a row that trains its prompt", lambda rows: rows[1].loss_weight.__setitem__(5, 1), 4),
        ("a row that begins otherwise", lambda rows: rows[3].ids.__setitem__(0, 301), 0),
    ],
)
def test_only_what_no_row_trains_on_is_shared(rule, change, length):
    group = [sample for sample in rows() if sample.group_id == "a"]
    change(group)
    assert common_prefix(group) == length, rule
    assert bool(length) == any(sample.prefix for unit in units(group, 1000) for sample in unit)


def test_a_group_longer_than_a_unit_is_cut_and_every_part_has_the_prompt():
    group = [sample for sample in rows() if sample.group_id == "a"]
    parts = units(group, 50)
    assert len(parts) > 1 and all(sum(map(len, part)) <= 50 for part in parts)
    assert all(len(part[0]) == 18 and all(sample.prefix == 18 for sample in part[1:]) for part in parts)


def test_few_groups_are_still_dealt_to_all_data_ranks():
    settings = dict(data_size=4, max_tokens=400, attention_length=1e9, share_prefixes=True)
    trained = [sum(batch.count for batch in balanced(rows(), data_rank=rank, **settings)) for rank in range(4)]
    assert sum(trained) == sum(sample.count for sample in rows()) and min(trained) > 0
