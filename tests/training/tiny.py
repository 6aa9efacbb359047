"""A tiny model, synthetic packs and a trainer, for tests that run on the pool's ranks."""
from __future__ import annotations

import torch

from megatron_nb.losses.next_token import NextToken
from megatron_nb.model.gpt import build, initialize_weights
from megatron_nb.model.shape import ModelConfig
from megatron_nb.model.sharding import cut_dimension, named_parameters, unshard
from megatron_nb.parallel.topology import ParallelConfig, initialize
from megatron_nb.records import Batch
from megatron_nb.training.optimizer import OptimizerConfig, inner_optimizers
from megatron_nb.training.trainer import Trainer

# isort: split
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

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
    """{global name: (this rank's part, cut dimension)} -> whole tensors of this stage, vocabulary padding cut away."""
    group = parallel_state.get_tensor_model_parallel_group()
    gathered = {}
    for name, (value, dimension) in values.items():
        pieces = [torch.empty_like(value) for _ in range(group.size())]
        dist.all_gather(pieces, value.contiguous(), group=group)
        full = unshard(name, pieces, dimension)
        gathered[name] = full[:300] if full.shape[0] in (384, 512) else full
    return gathered


def over_stages(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every pipeline stage's entries, on every rank."""
    stages = parallel_state.get_pipeline_model_parallel_group()
    parts: list = [None] * stages.size()
    dist.all_gather_object(parts, values, group=stages)
    return {name: value for part in parts for name, value in part.items()}


def weights(trainer_: Trainer) -> dict[str, torch.Tensor]:
    """Whole parameters on every rank."""
    named = named_parameters(trainer_.chunks)
    return over_stages(whole({name: (value.detach().clone(), cut_dimension(value)) for name, value in named}))


def moments(trainer_: Trainer) -> dict[str, torch.Tensor]:
    """Whole Adam moments and fp32 master weights, "exp_avg/NAME" etc., on every rank, put together from what ranks hold."""
    (inner,) = inner_optimizers(trainer_.optimizer)
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    found = {}
    for name, parameter in named_parameters(trainer_.chunks):
        part, held = slice(None), getattr(parameter, "main_param", None)
        sharded = isinstance(inner, DistributedOptimizer)
        if sharded:
            held = None
            if parameter in inner.model_param_group_index_map:
                group, order = inner.model_param_group_index_map[parameter]
                held = inner.optimizer.param_groups[group]["params"][order]
                bounds = inner._get_model_param_range_map(parameter)["param"]
                part = slice(bounds.start, bounds.end)
        elif held is None:
            held = parameter
        for key in ("exp_avg", "exp_avg_sq", "master"):
            full = torch.zeros(parameter.numel())
            if held is not None:
                value = held if key == "master" else inner.optimizer.state[held][key]
                full[part] = value.detach().float().flatten()
            if sharded:
                dist.all_reduce(full, group=replicas)
            gathered = whole({name: (full.view(parameter.shape), cut_dimension(parameter))})
            found[f"{key}/{name}"] = gathered[name]
    return over_stages(found)
