"""Packed log-probabilities equal those of transformers, which runs every document alone: a reference from outside."""

import numpy as np
import pytest
import torch

from megatron_nb.data.packing import pack
from megatron_nb.losses.next_token import NextToken
from megatron_nb.records import Sample

LENGTHS = [9, 1, 40, 14]


def _ours(folder):
    from megatron_nb.model.gpt import build
    from megatron_nb.model.hf import load_hf
    from megatron_nb.model.hf_config import config_from_hf
    from megatron_nb.parallel import topology
    from megatron_nb.parallel.topology import ParallelConfig
    from megatron_nb.training.optimizer import OptimizerConfig
    from megatron_nb.training.trainer import Trainer

    parallel = ParallelConfig(tensor=torch.distributed.get_world_size())
    place = topology.initialize(parallel, seed=1)
    model = config_from_hf(folder)
    chunks = build(model, parallel)
    load_hf(folder, chunks, model)
    trainer = Trainer(chunks, OptimizerConfig(schedule="constant"), place, num_steps=1)
    return trainer.logprobs([pack(_documents(), 64, 8)], NextToken())[0]


def _documents():
    random = np.random.default_rng(0)
    return [Sample(random.integers(0, 300, n), np.ones(n, np.float32), sample_id=f"d{i}") for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("world", [1, 2])
def test_packed_logprobs_equal_transformers_on_each_document_alone(ranks, tmp_path, kind, world):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, rope_theta=1e4, rms_norm_eps=1e-5, max_position_embeddings=64, tie_word_embeddings=kind == "Qwen2",
        initializer_range=0.2, dtype="float32",
    )  # fmt: skip
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    theirs.save_pretrained(tmp_path)
    expected = []
    for row in _documents():
        ids = torch.from_numpy(row.ids)[None]
        with torch.no_grad():
            logprobs = theirs(ids).logits[0].log_softmax(-1)
        expected.append(torch.cat([logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0], torch.zeros(1)]))
    assert (ranks.run(world, _ours, str(tmp_path))[0] - torch.cat(expected)).abs().max() < 1e-5


def _loss_and_gradients(kernels):
    """One step of a small model in fp32 with this implementation of every kernel."""
    from megatron_nb.model.gpt import build, initialize_weights
    from megatron_nb.model.shape import ModelConfig
    from megatron_nb.parallel import topology
    from megatron_nb.parallel.topology import ParallelConfig
    from megatron_nb.training.optimizer import OptimizerConfig
    from megatron_nb.training.trainer import Trainer

    model = ModelConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, head_dim=64, ffn_hidden_size=96,
        vocab_size=300, rope_theta=1e4, max_position_embeddings=64, dtype="fp32", qk_norm=True, kernels=kernels,
    )  # fmt: skip
    place = topology.initialize(ParallelConfig(), seed=1)
    chunks = build(model, ParallelConfig())
    initialize_weights(chunks, model, seed=1, std=0.15)
    trainer = Trainer(chunks, OptimizerConfig(schedule="constant"), place, num_steps=1, distributed_optimizer=False)
    total, count, *_ = trainer.gradients([pack(_documents(), 64, 8)], NextToken())
    return total / count, {name: p.main_grad.clone() for name, p in trainer.chunks[0].named_parameters()}


def test_triton_kernels_and_torch_path_give_the_same_loss_and_gradients(ranks):
    """The switch model.kernels; on a machine without a GPU the kernels run in Triton's interpreter."""
    loss, gradients = ranks.run(1, _loss_and_gradients, "triton")[0]
    expected_loss, expected = ranks.run(1, _loss_and_gradients, "torch")[0]
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, gradient in expected.items():
        assert float((gradients[name] - gradient).norm() / gradient.norm()) < 1e-5, name
