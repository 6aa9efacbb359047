"""The memory plan against bytes that autograd really keeps, and what it refuses."""

import pytest
import torch

from megatron_nb.model.attention import bounds
from megatron_nb.model.gpt import build, initialize_weights
from megatron_nb.model.heads import LogprobRequest, logprob_head
from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel import topology
from megatron_nb.parallel.context import split
from megatron_nb.parallel.topology import ParallelConfig
from megatron_nb.training.memory import check_fits, layer_activation_bytes, plan

LENGTH = 512
MODEL = ModelConfig(
    num_layers=2, hidden_size=64, num_attention_heads=8, num_query_groups=4, head_dim=16, ffn_hidden_size=320, vocab_size=128,
    max_position_embeddings=LENGTH, dtype="fp32",
)  # fmt: skip


def _kept_bytes(layers: int, parallel: ParallelConfig) -> int:
    """Bytes of all distinct storages autograd keeps for one pack of a model with so many layers, weights not counted."""
    from dataclasses import replace

    import numpy as np

    from megatron_nb.data.packing import pack
    from megatron_nb.records import Sample

    place = topology.initialize(parallel, seed=1)
    model = replace(MODEL, num_layers=layers)
    (chunk,) = build(model, parallel)
    initialize_weights([chunk], model, seed=1)
    weights = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
    row = Sample(np.zeros(LENGTH, np.int64), np.ones(LENGTH, np.float32), sample_id="a")
    batch = split(pack([row], LENGTH), place.context_size, place.context_rank)
    kept: dict[int, int] = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        chunk(
            batch.ids[None], None, None, labels=batch.targets[None], packed_seq_params=bounds(batch),
            output_processor=logprob_head, output_processor_context=LogprobRequest(batch.targets, 128),
        )  # fmt: skip
    topology.destroy()
    return sum(kept.values())


def _a_layer(parallel):
    return _kept_bytes(3, parallel) - _kept_bytes(2, parallel)


@pytest.mark.parametrize(
    "parallel, world",
    [(ParallelConfig(), 1), (ParallelConfig(tensor=2), 2), (ParallelConfig(context=2), 2)],
    ids=["one", "tp2-sp", "cp2"],
)
def test_a_layer_keeps_the_bytes_that_the_plan_says_within_5_percent(ranks, parallel, world):
    counted = max(ranks.run(world, _a_layer, parallel))
    planned = sum(layer_activation_bytes(MODEL, parallel).values()) * LENGTH / parallel.context
    assert counted == pytest.approx(planned, rel=0.05)


def test_weights_gradients_and_optimizer_of_the_recipes_model_are_counted_by_hand():
    dense = ModelConfig()
    found = plan(dense, ParallelConfig(context=8, recompute="full"), world=8, pack_length=262144)
    assert found.weights == pytest.approx(2 * 3_933_637_120, rel=1e-3)
    assert found.gradients == pytest.approx(4 * 3_933_637_120, rel=1e-3)
    assert found.optimizer == pytest.approx(12 * 3_933_637_120 / 8, rel=1e-3)


def test_what_does_not_fit_is_refused_with_the_biggest_part_and_a_remedy():
    found = plan(ModelConfig(), ParallelConfig(context=8), world=8, pack_length=262144)
    with pytest.raises(ValueError, match=r"a device has 80 GB .* most is activations .*parallel.recompute=full"):
        check_fits(found, 80)
    check_fits(plan(ModelConfig(), ParallelConfig(context=8, recompute="full"), world=8, pack_length=262144), 80)
