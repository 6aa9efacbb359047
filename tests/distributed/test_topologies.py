"""The same numbers at every topology. `tools/verify_matrix.py` runs all layouts; here are one of each kind, and faults."""

import numpy as np
import pytest
import torch

from megatron_nb.data.packing import pack
from megatron_nb.losses.next_token import NextToken
from megatron_nb.model.gpt import build, initialize_weights
from megatron_nb.parallel import topology
from megatron_nb.parallel.topology import ParallelConfig
from megatron_nb.records import Sample
from megatron_nb.training.optimizer import OptimizerConfig
from megatron_nb.training.trainer import Trainer
from tools.verify_matrix import FAULTS, LLAMA, TOLERANCE, VISIBLE, compare, layouts, reference, run_layout

BY_NAME = {layout.name: layout for layout in layouts()}
QUICK = [
    "one-packed", "one-padded-micro4", "one-packed-selective-recompute", "dp2", "dp4-distopt", "tp2-sp", "pp2-vpp2", "cp2",
    "cp4-all-gather-padded", "tp2-sp-cp2-full", "pp2-vpp2-cp2-full", "tied-pp2-tp2-sp", "qwen3-tp2-sp-cp2",
]  # fmt: skip


@pytest.fixture(scope="module")
def one_process(ranks):
    """model -> what one process computes, every document in a pack of its own."""
    cache = {}
    return lambda model: cache.get(model) or cache.setdefault(model, reference(ranks, model))


@pytest.mark.parametrize("name", QUICK)
def test_loss_gradients_logprobs_and_weights_equal_one_process(ranks, one_process, name):
    layout = BY_NAME[name]
    expected = one_process(layout.model)
    found = ranks.run(layout.world, run_layout, layout)[0]
    assert found["moved"] >= 1e-2, "a step that moves nothing proves nothing"
    worst = compare(found, expected)
    assert max(worst.values()) <= TOLERANCE, worst


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(ranks, one_process, fault):
    layout = BY_NAME["tp2-sp" if fault == "no-norm-all-reduce" else "cp2"]
    worst = compare(ranks.run(layout.world, run_layout, layout, fault)[0], one_process("llama"))
    assert max(worst.values()) > VISIBLE, worst


def _trainer(parallel):
    place = topology.initialize(parallel, seed=1)
    chunks = build(LLAMA, parallel)
    initialize_weights(chunks, LLAMA, seed=3, std=0.15)
    return Trainer(chunks, OptimizerConfig(lr=1e-3, schedule="constant"), place, num_steps=10, distributed_optimizer=False)


def _documents(lengths, seed=0):
    random = np.random.default_rng(seed)
    return [Sample(random.integers(0, 200, n), np.ones(n, np.float32), sample_id=f"d{i}") for i, n in enumerate(lengths)]


def _leak(parallel):
    """Log-probs of a pack, and again with one token of the middle document changed."""
    trainer, rows = _trainer(parallel), _documents([20, 21, 23])
    before = trainer.logprobs([pack(rows, 64, 8)], NextToken())[0]
    rows[1].ids[10] = (rows[1].ids[10] + 1) % 200
    return before, trainer.logprobs([pack(rows, 64, 8)], NextToken())[0]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_changed_token_leaves_other_documents_of_the_pack_bit_identical(ranks, size):
    before, after = ranks.run(size, _leak, ParallelConfig(context=size))[0]
    assert torch.equal(before[:20], after[:20]) and torch.equal(before[41:], after[41:])
    assert torch.equal(before[20:29], after[20:29]), "tokens before the change see nothing of it"
    assert (before[29:40] != after[29:40]).all(), "its own document does"


def _loss_of(parallel, lengths_by_micro_batch):
    """Loss and count of one step whose micro-batches hold these documents, and the gradients' norm."""
    trainer = _trainer(parallel)
    documents = _documents([n for part in lengths_by_micro_batch for n in part])
    packs = []
    for part in lengths_by_micro_batch:
        packs.append(pack([documents.pop(0) for _ in part], 64, 8))
    mine = packs[trainer.topology.data_rank :: trainer.topology.data_size]
    total, count, *_ = trainer.gradients(mine, NextToken())
    gradient = torch.cat([p.main_grad.flatten() for chunk in trainer.chunks for p in chunk.parameters()])
    return total, count, gradient


def test_the_divisor_is_the_global_token_count_under_accumulation(ranks):
    """10 trained tokens in one micro-batch and 6 in the next: sum / 16, not a mean of means."""
    total, count, gradient = ranks.run(1, _loss_of, ParallelConfig(), [[11], [7]])[0]
    together = ranks.run(1, _loss_of, ParallelConfig(), [[11, 7]])[0]
    assert count == 16 and total == pytest.approx(together[0], rel=1e-6)
    assert float((gradient - together[2]).norm() / gradient.norm()) < 1e-6


def test_data_ranks_with_1_and_7_tokens_weigh_by_tokens(ranks):
    alone = ranks.run(1, _loss_of, ParallelConfig(), [[2, 8]])[0]
    for total, count, gradient in ranks.run(2, _loss_of, ParallelConfig(), [[2], [8]]):
        assert count == 8 and total == pytest.approx(alone[0], rel=1e-6)
        assert float((gradient - alone[2]).norm() / alone[2].norm()) < 1e-6


class _Two(NextToken):
    def __call__(self, logprob, batch):
        return super().__call__(logprob, batch)[:2]


class _Fraction(NextToken):
    def __call__(self, logprob, batch):
        total, count, metrics = super().__call__(logprob, batch)
        return total, count / 2, metrics


def _refused(kind):
    try:
        _trainer(ParallelConfig()).gradients([pack(_documents([5]), 8, 1)], kind())
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    "kind, rule", [(_Two, "found 2: with two values megatron-core counts zero tokens"), (_Fraction, "integer count")]
)
def test_a_loss_that_core_would_misread_is_refused(ranks, kind, rule):
    assert rule in ranks.run(1, _refused, kind)[0]


def _masked(parallel):
    import logging

    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("megatron_nb.training.trainer").addHandler(handler)
    trainer, rows = _trainer(parallel), _documents([20, 21])
    for row in rows:
        row.loss_weight[:] = 0
    packs = [pack(rows, 64, 8)]
    total, count, *_ = trainer.gradients(packs, NextToken())
    largest = max(float(p.main_grad.abs().max()) for chunk in trainer.chunks for p in chunk.parameters())
    before = [p.clone() for chunk in trainer.chunks for p in chunk.parameters()]
    result = trainer.step(packs, NextToken())
    weights_move = any(not torch.isfinite(p).all() for chunk in trainer.chunks for p in chunk.parameters())
    return total, count, largest, result, messages, weights_move, len(before)


@pytest.mark.parametrize(
    "parallel, world", [(ParallelConfig(), 1), (ParallelConfig(context=2), 2), (ParallelConfig(tensor=2), 2)]
)
def test_a_fully_masked_step_has_loss_and_gradients_of_exactly_zero_and_names_its_samples(ranks, parallel, world):
    total, count, largest, result, messages, not_finite, _ = ranks.run(world, _masked, parallel)[0]
    assert (total, count, largest) == (0.0, 0, 0.0) and not not_finite
    assert result.loss == 0.0 and result.skipped is None
    assert any("d0" in message and "masked" in message for message in messages)


def _poisoned(parallel):
    """A step whose loss is NaN on one micro-batch of one rank."""
    trainer = _trainer(parallel)

    class Poison(NextToken):
        def __call__(self, logprob, batch):
            total, count, metrics = super().__call__(logprob, batch)
            return (total * torch.nan if "d1" in batch.sample_ids else total), count, metrics

    packs = [pack([row], 64, 8) for row in _documents([20, 21, 22, 23])]
    before = [p.clone() for chunk in trainer.chunks for p in chunk.parameters()]
    result = trainer.step(packs[trainer.topology.data_rank :: trainer.topology.data_size], Poison())
    after = [p for chunk in trainer.chunks for p in chunk.parameters()]
    return result.skipped, all(torch.equal(a, b) for a, b in zip(before, after))


@pytest.mark.parametrize(
    "parallel, world", [(ParallelConfig(), 2), (ParallelConfig(pipeline=2), 2), (ParallelConfig(tensor=2), 4)]
)
def test_a_step_with_a_nan_changes_nothing_on_any_rank_and_names_its_sample(ranks, parallel, world):
    for skipped, unchanged in ranks.run(world, _poisoned, parallel):
        assert skipped == ["d1"] and unchanged
