"""Process groups of one job: tensor, pipeline, context and data parallel ranks over NCCL or gloo.

world = data * pipeline * context * tensor. Ranks of one tensor group are neighbours, then context, then data, then
pipeline (megatron-core's order tp-cp-dp-pp), so the chattiest group sits inside a node.
"""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_nb.parallel import cpu, mends

ON_CPU = cpu.install()  # before any other module of megatron.core

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402

mends.mend()


@dataclass
class ParallelConfig:
    """How one model copy is cut; the data-parallel size is what the world size leaves."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1  # model chunks per pipeline rank (interleaved schedule when > 1)
    context: int = 1
    context_method: str = "ring"  # ring | all_gather (short documents on slow links)
    sequence_parallel: bool | None = None  # None: on when tensor > 1
    recompute: str = "none"  # none | selective (MLP and norms) | full (every layer)
    distributed_optimizer: bool = True  # optimizer state sharded over data * context ranks
    offload_activations: bool = False  # keep layer inputs in host memory between forward and backward (GPU only)
    communication: str = "gloo"  # gloo | nccl
    timeout_minutes: int = 30
    world: int | None = None  # processes this layout is made for; None: any number that divides
    device_memory_gb: float | None = None  # what a rank may use; a configuration that does not fit is refused

    def __post_init__(self):
        for name in ("tensor", "pipeline", "virtual_pipeline", "context"):
            size = getattr(self, name)
            if size < 1:
                raise ValueError(f"parallel.{name}={size} must be at least 1")
        if self.sequence_parallel is None:
            self.sequence_parallel = self.tensor > 1
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError(
                "parallel.sequence_parallel=true needs parallel.tensor > 1: it splits activations over tensor ranks"
            )
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(f"parallel.virtual_pipeline={self.virtual_pipeline} needs parallel.pipeline > 1")
        for name, choices in (
            ("context_method", ("ring", "all_gather")),
            ("recompute", ("none", "selective", "full")),
            ("communication", ("gloo", "nccl")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"parallel.{name}={getattr(self, name)!r} must be one of {', '.join(choices)}")

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def pack_multiple(self) -> int:
        """A pack's length must be a multiple: two chunks per context rank, and tokens that scatter over tensor ranks."""
        scatter = self.tensor if self.sequence_parallel else 1
        return math.lcm(2 * self.context if self.context > 1 else 1, self.context * scatter)

    def check_pack_length(self, seq_len: int) -> None:
        """ValueError when a pack of seq_len tokens cannot be cut this way."""
        if seq_len % self.pack_multiple:
            raise ValueError(
                f"seq_len={seq_len} must be a multiple of {self.pack_multiple} with parallel.context={self.context} and "
                f"tensor={self.tensor}: zig-zag gives each rank two chunks, which scatter over tensor ranks"
            )

    def data_size(self, world: int) -> int:
        """Data-parallel ranks in a world; ValueError when the world does not divide."""
        if self.world is not None and world != self.world:
            raise ValueError(
                f"parallel.world={self.world} but {world} processes run: start {self.world} (torchrun --nproc-per-node), "
                "or choose another parallel= layout"
            )
        if world % self.model_ranks:
            raise ValueError(
                f"{world} processes cannot hold parallel.tensor={self.tensor} * pipeline={self.pipeline} * "
                f"context={self.context} = {self.model_ranks} ranks per model copy: start a multiple of {self.model_ranks}"
            )
        return world // self.model_ranks


@dataclass(frozen=True)
class Topology:
    """This process's place. Sizes come from the groups, so they are the truth, not the wish."""

    rank: int
    world: int
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    context_rank: int
    context_size: int
    data_rank: int
    data_size: int
    device: torch.device


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def join_world(config: ParallelConfig) -> None:
    """Start torch.distributed from torchrun's environment, or as a world of one. ValueError for a back end of other devices."""
    if config.communication == "gloo" and not ON_CPU and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "parallel.communication=gloo is for ranks on CPUs, but there are GPUs here, and models would be put on them: "
            "use parallel.communication=nccl, or CUDA_VISIBLE_DEVICES= (empty) to compute on the CPU"
        )
    if dist.is_initialized():
        return
    if config.communication == "nccl":
        if not torch.cuda.is_available() or ON_CPU:
            raise ValueError("parallel.communication=nccl needs CUDA devices; on a machine without use parallel=cpu1 or cpu2")
        if local_rank() >= (seen := torch.cuda.device_count()):
            raise ValueError(
                f"LOCAL_RANK={local_rank()} but this process sees {seen} GPUs: start as many ranks on a node as it has, "
                "or ask for as many GPUs as launch.slurm.ranks_per_node (gpus in the site file)"
            )
        torch.cuda.set_device(local_rank())
    timeout = timedelta(minutes=config.timeout_minutes)
    if "RANK" in os.environ:
        dist.init_process_group(config.communication, timeout=timeout)
    else:
        dist.init_process_group(config.communication, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def initialize(config: ParallelConfig, seed: int) -> Topology:
    """Build the groups and seed every generator. May be called again after `destroy`."""
    join_world(config)
    world = dist.get_world_size()
    config.data_size(world)
    parallel_state.initialize_model_parallel(
        config.tensor,
        config.pipeline,
        config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        context_parallel_size=config.context,
        create_gloo_process_groups=config.communication == "nccl",
        distributed_timeout_minutes=config.timeout_minutes,
    )
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    # identical on tensor ranks where weights are replicated, different where they are cut; dropout is not used
    model_parallel_cuda_manual_seed(seed + 100 * parallel_state.get_pipeline_model_parallel_rank(), force_reset_rng=True)
    return current()


def current() -> Topology:
    """The topology of the groups that are up."""
    p = parallel_state
    return Topology(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        tensor_rank=p.get_tensor_model_parallel_rank(),
        tensor_size=p.get_tensor_model_parallel_world_size(),
        pipeline_rank=p.get_pipeline_model_parallel_rank(),
        pipeline_size=p.get_pipeline_model_parallel_world_size(),
        context_rank=p.get_context_parallel_rank(),
        context_size=p.get_context_parallel_world_size(),
        data_rank=p.get_data_parallel_rank(),
        data_size=p.get_data_parallel_world_size(),
        device=cpu.CPU if ON_CPU else torch.device("cuda", torch.cuda.current_device()),
    )


def everywhere(value: Any) -> list:
    """[value of every rank], on every rank. Collective."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def destroy(world: bool = False) -> None:
    """Tear the model groups down (and torch.distributed too, when `world`)."""
    parallel_state.destroy_model_parallel()
    if world and dist.is_initialized():
        dist.destroy_process_group()
