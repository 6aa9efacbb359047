"""A tiny model, synthetic packs and a trainer, for tests that run on the pool's ranks."""
from __future__ import annotations

import torch

from megatron_nb.losses import NextToken
from megatron_nb.model.gpt import build, initialize_weights
from megatron_nb.model.shape import ModelConfig
from megatron_nb.model.sharding import cut_dimension, named_parameters, unshard
from megatron_nb.parallel.topology import ParallelConfig, initialize
from megatron_nb.records import Batch
from megatron_nb.training.optimizer import OptimizerConfig
from megatron_nb.training.trainer import Trainer

# isort: split
import torch.distributed as dist
from megatron.core import parallel_state

LENGTH = 48


def model_config(**changes) -> ModelConfig:
    """Vocabulary 300: padded to 384 at tensor 1, to 512 at tensor 2 and 4."""
    shape = dict(num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2, head_dim=8, ffn_hidden_size=64,
                 vocab_size=300, max_position_embeddings=256, rope_theta=1e4, dtype="fp32")  # fmt: skip
    return ModelConfig(**{**shape, **changes})


def pack(number: int, vocabulary: int = 300) -> Batch:
    """Pack `number` of an endless stream: two documents and random weights of 0 or 1."""
    generator = torch.Generator().manual_seed(1000 + number)
    cut = 10 + number % 20
    ids = torch.randint(0, vocabulary, (LENGTH,), generator=generator)
    cu_seqlens = torch.tensor([0, cut, LENGTH])
    start = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff())
    weight = (torch.rand(LENGTH, generator=generator) < 0.8).float()
    weight[cu_seqlens[1:] - 1] = 0.0
    return Batch(ids, ids.roll(-1), weight, torch.arange(LENGTH), start, cu_seqlens, int(weight.sum()), [f"pack-{number}"])


def packs(step: int, per_step: int = 4) -> list[Batch]:
    """This data rank's packs of one global batch of `per_step` packs."""
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    return [pack(number) for number in range(step * per_step + rank, (step + 1) * per_step, size)]


def trainer(model: dict, parallel: dict, optimizer: dict | None = None, num_steps: int = 20, seed: int = 7) -> Trainer:
    """A trainer whose weights depend on `seed` alone."""
    parallel = dict(parallel)
    distributed = parallel.get("distributed_optimizer", True)
    shape, layout = model_config(**model), ParallelConfig(**parallel)
    topology = initialize(layout, seed=1)
    chunks = build(shape, layout)
    initialize_weights(chunks, shape, seed)
    config = OptimizerConfig(**{"lr": 1e-2, "warmup_steps": 2, **(optimizer or {})})
    return Trainer(chunks, config, topology, num_steps, distributed_optimizer=distributed)


def train(trainer_: Trainer, steps: range) -> list[tuple[float, float, float]]:
    """(loss, gradient norm, learning rate) of each step."""
    results = [trainer_.step(packs(step), NextToken()) for step in steps]
    return [(result.loss, result.grad_norm, result.lr) for result in results]


def whole(values: dict[str, tuple[torch.Tensor, int | None]]) -> dict[str, torch.Tensor]:
    """{global name: (this rank's part, cut dimension)} -> whole tensors on every rank, vocabulary padding cut away."""
    group, stages = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()
    gathered = {}
    for name, (value, dimension) in values.items():
        pieces = [torch.empty_like(value) for _ in range(group.size())]
        dist.all_gather(pieces, value.contiguous(), group=group)
        full = unshard(name, pieces, dimension)
        gathered[name] = full[:300] if full.shape[0] in (384, 512) else full
    parts: list = [None] * stages.size()
    dist.all_gather_object(parts, gathered, group=stages)
    return {name: value for part in parts for name, value in part.items()}


def weights(trainer_: Trainer) -> dict[str, torch.Tensor]:
    """Whole parameters on every rank."""
    named = named_parameters(trainer_.chunks)
    return whole({name: (value.detach().clone(), cut_dimension(value)) for name, value in named})
