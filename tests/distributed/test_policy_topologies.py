"""A policy step is the same at every topology: gradients of each algorithm and reduction, and all updates of a batch."""

import copy

import numpy as np
import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_nb.data.packing import pack
from megatron_nb.losses import policy_gradient
from megatron_nb.losses.policy_gradient import PolicyConfig, PolicyGradient
from megatron_nb.model.gpt import build, initialize_weights
from megatron_nb.parallel import topology
from megatron_nb.parallel.topology import ParallelConfig
from megatron_nb.rewards.advantage import CreditConfig, credit
from megatron_nb.training.optimizer import OptimizerConfig
from megatron_nb.training.policy import Policy, UpdateConfig
from megatron_nb.training.reference import Reference
from megatron_nb.training.trainer import Trainer
from tests.rewards.made_rollouts import grouped, rollout
from tools.verify_matrix import LLAMA, TOLERANCE, VISIBLE, _true_rows, gathered, relative

PACK = 128
CONSTANT = dict(reduction="constant", max_tokens=50)
SETTINGS = {  # name -> (credit, policy); "on-policy" has no old log-probs
    "grpo-token": (dict(), dict(clip_high=0.2)),
    "grpo-sequence": (dict(reduction="sequence"), dict(clip_high=0.2)),
    "grpo-turn": (dict(reduction="turn", turn_credit="recipe", turn_weight=0.3), dict(clip_high=0.2)),
    "dr_grpo": (dict(advantage="dr_grpo", **CONSTANT), dict()),
    "dapo-kl-entropy": (dict(), dict(kl="k3", kl_coefficient=0.1, kl_grad="unbiased", entropy_coefficient=0.01, dual_clip=2.0)),
    "gspo": (dict(reduction="sequence"), dict(ratio="sequence", clip_low=0.02, clip_high=0.02)),
    "gspo-token": (dict(), dict(ratio="sequence", kl="k2", kl_coefficient=0.1)),
    "cispo": (dict(), dict(objective="cispo", clip_low=1.0)),
    "rloo-on-policy": (dict(advantage="rloo", **CONSTANT), dict(importance_cap=None)),
    "reinforce_pp": (dict(advantage="reinforce_pp"), dict()),
}
FEW = ["dapo-kl-entropy", "gspo"]
LAYOUTS = {  # name -> (ranks, layout, settings)
    "dp2": (2, dict(), list(SETTINGS)),
    "tp2": (2, dict(tensor=2), list(SETTINGS)),
    "pp2": (2, dict(pipeline=2), list(SETTINGS)),
    "cp2": (2, dict(context=2), list(SETTINGS)),
    "pp2-vpp2": (2, dict(pipeline=2, virtual_pipeline=2), FEW),
    "cp4": (4, dict(context=4), FEW),
    "dp2-cp2": (4, dict(context=2), FEW),
}


def rollouts():
    """Groups of 4 and 3 rollouts of 12 to 70 tokens; one became two rows, one has a turn that was not sampled."""
    random = np.random.default_rng(3)
    made = []
    for group, lengths in (("a", (60, 9, 33, 41)), ("b", (17, 52, 28))):
        for index, length in enumerate(lengths):
            answer = random.integers(0, 200, length).tolist()
            prompt, reward = random.integers(0, 200, 3 + index * 2).tolist(), float(random.normal())
            if (group, index) == ("a", 2):
                parts = [answer[:13], answer[13:]]
                made += [rollout(group, index, reward, part, prompt=prompt, segment=k) for k, part in enumerate(parts)]
            elif (group, index) == ("b", 1):
                turns = [(20, 0.5), (10, None), (22, -0.5)]
                made.append(rollout(group, index, reward, answer, prompt=prompt, turns=turns, tools=(1,)))
            else:
                made.append(rollout(group, index, reward, answer, prompt=prompt, turns=[(length, float(random.normal()))]))
    return made


def a_policy(parallel, loss=None, update=None, reference=False):
    place = topology.initialize(parallel, seed=5)
    chunks = build(LLAMA, parallel)
    initialize_weights(chunks, LLAMA, seed=7, std=0.15)
    # Adam far below its eps is plain gradient descent with rate lr / eps, so that updates can be compared
    config = OptimizerConfig(lr=3e5, eps=1e6, schedule="constant", weight_decay=0.0)
    frozen = Reference(chunks) if reference else None
    trainer = Trainer(chunks, config, place, num_steps=20, distributed_optimizer=False)
    return Policy(trainer, PolicyConfig(**loss or {}), UpdateConfig(**dict(pack_tokens=PACK) | (update or {})), frozen)


def near(samples, own):
    """Log-prob streams about the model's own: most ratios inside the clip, some outside."""
    for sample in samples:
        random = np.random.default_rng([len(sample), *sample.sample_id.encode()])
        for stream, scale in (("behaviour_logprob", 0.1), ("old_logprob", 0.2), ("ref_logprob", 0.5)):
            noise = random.normal(0, scale, len(sample))
            setattr(sample, stream, (own[sample.sample_id] + noise).astype(np.float32))
    return samples


def own_logprobs():
    policy = a_policy(ParallelConfig())
    samples, _ = credit(grouped(*rollouts()), CreditConfig())
    policy.logprobs(samples)
    return {sample.sample_id: sample.old_logprob for sample in samples}


def gradients(parallel, own, names, alone=False, fault=None):
    """Setting -> (loss, gradients, metrics); alone: every row in a pack of its own."""
    policy, found = a_policy(parallel), {}
    group = parallel_state.get_context_parallel_group()
    for name in names:
        credit_settings, loss_settings = SETTINGS[name]
        samples = near(credit(grouped(*rollouts()), CreditConfig(**credit_settings))[0], own)
        if "on-policy" in name:
            for sample in samples:
                sample.old_logprob = None
        policy.loss = PolicyGradient(PolicyConfig(**loss_settings), None if fault == "no-group" else group)
        packs = [pack([sample], PACK) for sample in samples] if alone else policy.packs(samples)
        total, count, metrics, *_ = policy.trainer.gradients(packs, policy.loss)
        found[name] = total / count, gathered(policy.trainer, lambda p: p.main_grad), metrics
    return found if dist.get_rank() == 0 else None


@pytest.fixture(scope="module")
def own(ranks):
    return ranks.run(1, own_logprobs)[0]


@pytest.fixture(scope="module")
def one_process(ranks, own):
    return ranks.run(1, gradients, ParallelConfig(), own, list(SETTINGS), True)[0]


def worst(found, expected):
    """Setting -> largest relative difference of loss, gradients and metrics."""
    rows = {}
    for name in found:
        loss, grads, metrics = expected[name]
        assert set(found[name][1]) == set(grads) and set(found[name][2]) == set(metrics)
        gaps = [abs(found[name][0] - loss)]  # a sum of terms of order 1 that cancel
        gaps += [relative(_true_rows(found[name][1][n], grads[n]), grads[n]) for n in grads]
        gaps += [abs(found[name][2][n] - metrics[n]) / max(abs(metrics[n]), metrics["tokens"]) for n in metrics]
        rows[name] = max(gaps)
    return rows


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_every_algorithm_and_reduction_equal_one_process(ranks, own, one_process, layout):
    world, parallel, names = LAYOUTS[layout]
    rows = worst(ranks.run(world, gradients, ParallelConfig(**parallel), own, names)[0], one_process)
    assert set(rows) == set(names) and max(rows.values()) <= TOLERANCE, rows


def test_the_data_meets_clips_caps_and_context_ranks(one_process):
    """Else equal gradients would prove little."""
    for name in ("grpo-token", "gspo", "dapo-kl-entropy"):
        metrics = one_process[name][2]
        assert 0 < metrics["clip_low"] + metrics["clip_high"] < metrics["tokens"], name
    assert max(len(one.prompt_ids) + len(one.ids) for one in rollouts()) > PACK // 4 + 10


def test_a_sequence_ratio_without_its_reduction_over_context_ranks_is_seen(ranks, own, one_process):
    names = ["gspo", "grpo-token"]
    rows = worst(ranks.run(2, gradients, ParallelConfig(context=2), own, names, False, "no-group")[0], one_process)
    assert rows["gspo"] > VISIBLE and rows["grpo-token"] <= TOLERANCE, rows


def updates(parallel):
    """All updates of a batch with a KL term: what is told, and the log-probs that were written."""
    loss = dict(kl="k3", kl_coefficient=0.05, temperature=0.8)
    policy = a_policy(parallel, loss, dict(epochs=2, mini_batches=3), reference=True)
    samples, _ = credit(grouped(*rollouts()), CreditConfig())
    policy.logprobs(samples, "behaviour_logprob")
    told = policy.update(samples)
    return told, {s.sample_id: copy.copy((s.old_logprob, s.ref_logprob)) for s in samples}


@pytest.fixture(scope="module")
def updates_alone(ranks):
    return ranks.run(1, updates, ParallelConfig())[0]


@pytest.mark.parametrize("layout", ["dp2", "pp2", "cp2", "tp2"])
def test_all_updates_of_a_batch_equal_one_process_on_every_rank(ranks, updates_alone, layout):
    world, parallel, _ = LAYOUTS[layout]
    expected, streams = updates_alone
    assert expected["updates"] == 6 and expected["skipped"] == 0 and expected["kl_old"] > 1e-5
    for told, found in ranks.run(world, updates, ParallelConfig(**parallel)):
        assert told == pytest.approx(expected, rel=2e-4, abs=1e-6)
        for sample_id, pair in streams.items():
            for a, b in zip(found[sample_id], pair):
                np.testing.assert_allclose(a, b, atol=2e-5)


def test_the_local_bounds_of_a_split_pack_count_its_tokens():
    from megatron_nb.parallel.context import split

    samples, _ = credit(grouped(*rollouts()), CreditConfig())
    whole = pack(samples[:3], PACK)
    parts = [split(whole, 2, rank) for rank in range(2)]
    counts = [policy_gradient.local_bounds(part).diff() for part in parts]
    assert (sum(counts) == whole.cu_seqlens.diff()).all() and all(c[0] > 0 for c in counts)
