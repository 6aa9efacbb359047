"""Updates of a policy: what is recomputed, what is told, what a reference leaves behind."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_nb.records import Sample


def rows(number=6, seed=0):
    """Rows of 12 to 40 tokens, two a rollout; NaN where nothing was sampled."""
    random, made = np.random.default_rng(seed), []
    for i in range(number):
        n = int(random.integers(12, 40))
        weight = np.zeros(n, np.float32)
        weight[5:] = 1
        noise = lambda mean, scale: np.where(weight > 0, random.normal(mean, scale, n), np.nan).astype(np.float32)  # noqa: B023, E731
        made.append(Sample(
            random.integers(0, 300, n), weight, f"g/{i // 2}/{i % 2}", behaviour_logprob=noise(-5.7, 0.1),
            advantage=noise(0, 1), rollout_id=f"g/{i // 2}", group_id="g", count=n - 5,
        ))  # fmt: skip
    return made


def make(loss=None, update=None, reference=False, parallel=None, optimizer=None, **model):
    from megatron_nb.training.policy import Policy, PolicyConfig, UpdateConfig
    from megatron_nb.training.reference import Reference
    from tests.training.tiny import trainer

    made = trainer(model, parallel or {}, {"lr": 1e-3, "warmup_steps": 0} | (optimizer or {}))
    frozen = Reference(made.chunks) if reference else None
    return Policy(made, PolicyConfig(**loss or {}), UpdateConfig(**dict(pack_tokens=96) | (update or {})), frozen)


def whole_gradients(policy, samples):
    total, count, metrics, *_ = policy.trainer.gradients(policy.packs(samples), policy.loss)
    return total, metrics, torch.cat([p.main_grad.flatten() for chunk in policy.trainer.chunks for p in chunk.parameters()])


# ---------------------------------------------------------------------- logits formed once or twice
def _once_and_twice(cap):
    policy = make(dict(importance_cap=cap))
    assert policy.loss.coefficient(policy.packs(rows())[0]) is not None
    once = whole_gradients(policy, rows())
    policy.loss.coefficient = lambda batch: None
    return once, whole_gradients(policy, rows())


@pytest.mark.parametrize("cap", [None, 1.05])
def test_logits_formed_once_give_the_numbers_of_two_passes(ranks, cap):
    (loss, metrics, gradient), (loss2, metrics2, gradient2) = ranks.run(1, _once_and_twice, cap)[0]
    assert loss == pytest.approx(loss2, rel=1e-6) and metrics == pytest.approx(metrics2, rel=1e-6)
    assert float((gradient - gradient2).norm() / gradient.norm()) < 1e-6 and metrics["entropy"] > 0


# ---------------------------------------------------------------------- log-probs
def _logprobs(temperature):
    """(what Policy writes, dense log-softmax of the same logits / temperature) of every trained token."""
    from megatron_nb.data.packing import pack
    from megatron_nb.model.attention import bounds

    policy, samples = make(dict(temperature=temperature)), rows()
    policy.logprobs(samples)
    found, expected = [], []
    for sample in samples:
        batch = pack([sample])
        with torch.no_grad():
            logits = policy.trainer.chunks[0](batch.ids[None], None, None, packed_seq_params=bounds(batch))[0, :, :300].double()
        dense = torch.log_softmax(logits / temperature, -1).gather(1, batch.targets[:, None])[:-1, 0].numpy()
        kept = sample.loss_weight != 0
        found.append(sample.old_logprob[kept])
        expected.append(dense[kept[1:]])
        assert not sample.old_logprob[~kept].any()
    return np.concatenate(found), np.concatenate(expected)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_belong_to_their_tokens_at_the_sampling_temperature(ranks, temperature):
    found, expected = ranks.run(1, _logprobs, temperature)[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.std(expected) > 0.01 and np.abs(found[1:] - expected[:-1]).max() > 0.01, "a shift by one would be seen"


def _unchanged(temperature):
    """Metrics of an unchanged policy with an engine that is right, and with one whose temperature differs."""
    policy, samples = make(dict(temperature=temperature), dict(epochs=2), optimizer=dict(lr=0.0)), rows()
    policy.logprobs(samples, "behaviour_logprob")
    right = policy.update(samples)
    policy.loss.temperature = policy.loss.config.temperature = 1.0
    return right, policy.update(samples)


def test_the_ratio_of_an_unchanged_policy_is_1_and_a_wrong_temperature_is_measured(ranks):
    right, wrong = ranks.run(1, _unchanged, 0.6)[0]
    for name in ("ratio_mean", "importance_mean"):
        assert right[name] == pytest.approx(1, abs=1e-3)
    assert right["mismatch_abs"] < 1e-3 and right["ratio_std"] < 1e-3 and abs(right["mismatch_kl"]) < 1e-6
    assert wrong["mismatch_abs"] > 1e-3


# ---------------------------------------------------------------------- epochs and mini-batches
def _recomputed(update, loss=None):
    policy, taken = make(loss, update), []
    original = policy.logprobs
    policy.logprobs = lambda samples, stream="old_logprob": (taken.append(stream), original(samples, stream))
    seen, step = [], policy.trainer.step
    names = lambda packs: sorted(i for p in packs for i in p.sample_ids if i)  # noqa: E731
    policy.trainer.step = lambda packs, loss: (seen.append(names(packs)), step(packs, loss))[1]
    return taken, seen, policy.update(rows())


@pytest.mark.parametrize(
    "update, loss, taken",
    [(dict(), {}, []), (dict(epochs=2), {}, ["old_logprob"]), (dict(mini_batches=3), {}, ["old_logprob"]),
     (dict(epochs=2), dict(old="behaviour"), [])],
)  # fmt: skip
def test_old_log_probs_are_taken_once_and_only_when_there_is_more_than_one_update(ranks, update, loss, taken):
    found, seen, told = ranks.run(1, _recomputed, update, loss)[0]
    updates = update.get("epochs", 1) * update.get("mini_batches", 1)
    assert found == taken and len(seen) == told["updates"] == updates
    assert (told["ratio_std"] > 1e-5) == (updates > 1), "later updates see how far the policy has moved"


def test_mini_batches_are_whole_rollouts_and_every_epoch_sees_them_all(ranks):
    _, seen, _ = ranks.run(1, _recomputed, dict(epochs=2, mini_batches=2))[0]
    assert seen == [["g/0/0", "g/0/1", "g/1/0", "g/1/1"], ["g/2/0", "g/2/1"]] * 2


def test_mini_batches_need_no_more_rollouts_than_there_are():
    from megatron_nb.training.policy import mini_batches

    assert [len(part) for part in mini_batches(rows(4), 5)] == [2, 2]


def test_an_empty_batch_updates_nothing(ranks):
    assert ranks.run(1, _empty)[0] == {"updates": 0.0}


def _empty():
    return make().update([])


# ---------------------------------------------------------------------- the reference
def _swapped(parallel, optimizer, model):
    """What a pass by the reference, right after an update, leaves behind."""
    from tests.training.tiny import moments, weights

    policy, samples = make(dict(kl="k3", kl_coefficient=0.1), {}, True, parallel, optimizer, **model), rows()
    policy.logprobs(samples, "ref_logprob")
    first = [s.ref_logprob for s in samples]
    policy.update(samples)
    policy.update(samples)
    places = [p.data_ptr() for chunk in policy.trainer.chunks for p in chunk.parameters()]
    state, frozen = moments(policy.trainer), [p.clone() for p in policy.reference.frozen]
    with policy.reference.in_place(policy.trainer.chunks):
        policy.logprobs(samples, "ref_logprob")
        during = weights(policy.trainer)
    after = weights(policy.trainer)  # no rank may be left with what it had not yet gathered
    truth = {n: state[f"master/{n}"].to(after[n].dtype) for n in after}  # the optimizer's own copy
    faults = [n for n in after if not torch.equal(after[n], truth[n])]
    faults += [n for n, value in moments(policy.trainer).items() if not torch.equal(value, state[n])]
    faults += ["frozen"] * any(not torch.equal(a, b) for a, b in zip(frozen, policy.reference.frozen))
    faults += ["places"] * (places != [p.data_ptr() for chunk in policy.trainer.chunks for p in chunk.parameters()])
    faults += ["log-probs"] * any(not np.array_equal(a, s.ref_logprob) for a, s in zip(first, samples))
    policy.logprobs(samples, "old_logprob")
    moved = max(float((after[n] - during[n]).abs().max()) for n in after)
    differs = max(float(np.abs(s.ref_logprob - s.old_logprob).max()) for s in samples)
    return faults, moved, differs, policy.update(samples)["kl_ref"]


@pytest.mark.parametrize(
    "world, parallel, optimizer, model",
    [
        (1, {}, {}, {}),
        (2, {"distributed_optimizer": True}, {"overlap_grad_reduce": True, "overlap_param_gather": True}, {"dtype": "bf16"}),
        (2, {"pipeline": 2}, {}, {"tied_embeddings": True}),
    ],
    ids=["one", "bf16-distributed-overlap", "pp2-tied"],
)
def test_the_reference_gives_the_first_weights_log_probs_and_leaves_everything_bit_for_bit(
    ranks, world, parallel, optimizer, model
):
    for faults, moved, differs, kl in ranks.run(world, _swapped, parallel, optimizer, model):
        assert not faults and moved > 1e-4 and differs > 1e-3 and kl > 0, faults


def _restored_after_a_failure():
    from tests.training.tiny import weights

    policy = make(dict(kl="k3"), {}, True)
    policy.update(rows())
    before = weights(policy.trainer)
    try:
        with policy.reference.in_place(policy.trainer.chunks):
            raise KeyError("in the pass")
    except KeyError:
        pass
    return all(torch.equal(before[n], w) for n, w in weights(policy.trainer).items())


def test_a_failure_in_the_references_pass_restores_the_policy(ranks):
    assert ranks.run(1, _restored_after_a_failure)[0]


def _refused(loss, reference):
    try:
        make(loss, {}, reference)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    "loss, reference, rule", [(dict(kl="k3"), False, "policy.kl=k3 without a ref"), ({}, True, "policy.kl=None with a ref")]
)
def test_a_kl_term_and_a_reference_need_each_other(ranks, loss, reference, rule):
    assert rule in ranks.run(1, _refused, loss, reference)[0]


# ---------------------------------------------------------------------- alarms
def _heard(function, name):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    return function(), messages


def _collapse(floor):
    policy = make({}, dict(entropy_floor=floor))
    return _heard(lambda: policy.update(rows()), "megatron_nb.training.policy")


@pytest.mark.parametrize("floor, alarm", [(0.05, False), (None, False), (6.0, True)])
def test_a_collapsed_entropy_is_told_and_warned_of(ranks, floor, alarm):
    told, messages = ranks.run(1, _collapse, floor)[0]
    assert 5 < told["entropy"] < np.log(300) + 1e-4 and told["entropy_collapsed"] == alarm
    assert any("update.entropy_floor" in m for m in messages) == alarm


def _broken_model(parallel):
    """One token's embedding is NaN; only row g/1/0 holds it."""
    from tests.training.tiny import weights

    # the ring multiplies what stands at keys it may not see by 0, and 0 * NaN is NaN: there, a pack for every row
    policy, samples = make(parallel=parallel, update=dict(pack_tokens=40 if parallel else 96)), rows()
    for sample in samples:
        sample.ids[sample.ids == 299] = 0
    samples[2].ids[8] = 299
    for chunk in policy.trainer.chunks:
        for name, parameter in chunk.named_parameters():
            if "word_embeddings" in name:
                with torch.no_grad():
                    parameter[299] = torch.nan
    before = weights(policy.trainer)
    told, messages = _heard(lambda: policy.update(samples), "megatron_nb.training.policy")
    same = all(torch.equal(before[n], w) or before[n].isnan().any() for n, w in weights(policy.trainer).items())
    return told["skipped"], same, messages


@pytest.mark.parametrize("world, parallel", [(1, {}), (2, {}), (2, {"context": 2})], ids=["one", "dp2", "cp2"])
def test_a_log_prob_that_is_not_finite_refuses_the_update_on_every_rank_naming_the_sample(ranks, world, parallel):
    for skipped, same, messages in ranks.run(world, _broken_model, parallel):
        assert skipped == 1 and same
        assert any("refused" in m and m.rstrip().endswith("samples g/1/0") for m in messages), messages


# ---------------------------------------------------------------------- weights for engines
def _live():
    policy = make()
    source = policy.trainer.weights()
    before = {name: tensor.clone() for name, tensor in source.hf_tensors()}
    policy.update(rows())
    after = dict(source.hf_tensors())
    return len(before), any(not torch.equal(before[n], after[n]) for n in before), before["lm_head.weight"].shape


def test_weights_follow_the_updates(ranks):
    number, moved, shape = ranks.run(1, _live)[0]
    assert number == 39 and moved and shape == (300, 32)


def test_bad_settings_are_refused_with_the_rule():
    from megatron_nb.training.policy import UpdateConfig

    with pytest.raises(ValueError, match="update.epochs=0 must be at least 1"):
        replace(UpdateConfig(), epochs=0)
