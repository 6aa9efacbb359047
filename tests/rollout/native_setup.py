"""A native engine over a Hugging Face folder, for tests that run on the pool's ranks."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import torch

from megatron_nb.model.gpt import build
from megatron_nb.model.hf import LiveWeights, load_hf
from megatron_nb.model.hf_config import config_from_hf
from megatron_nb.parallel.topology import ParallelConfig, current, initialize
from megatron_nb.rollout.engine import Completion, Request, Sampling
from megatron_nb.rollout.native import NativeConfig, NativeEngine


def engine_of(folder: Path, layout: dict | None = None, **config) -> tuple[NativeEngine, LiveWeights]:
    """An engine with the folder's weights as version 0, and the training weights they came from."""
    parallel, model = ParallelConfig(**(layout or {})), config_from_hf(folder, "fp32")
    initialize(parallel, seed=1)
    chunks = build(model, parallel)
    load_hf(folder, chunks, model)
    source = LiveWeights(chunks, model)
    return another(source, **config), source


def another(source: LiveWeights, **config) -> NativeEngine:
    """One more engine with these weights as version 0."""
    engine = NativeEngine(NativeConfig(**{"kv_cache_gb": 0.002, "block_size": 16, **config}), source.config, current())
    engine.load_weights(source, 0)
    return engine


def sample(engine: NativeEngine, prompts: list[list[int]], sampling: Sampling, seeds=None) -> list[Completion] | None:
    """One completion per prompt, all at once; None on ranks that do not lead."""

    async def main():
        requests = [Request(f"r{i}", ids, sampling, seeds[i] if seeds else i) for i, ids in enumerate(prompts)]
        return await asyncio.gather(*map(engine.generate, requests))

    return engine.run(main)


def prompts_of(lengths: list[int], vocabulary: int = 301, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def perturb(source: LiveWeights, seed: int, size: float = 0.05) -> None:
    """Another model: every matrix moved by noise that depends on the seed alone. For one rank."""
    generator = torch.Generator().manual_seed(seed)
    for module in source.modules:
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=size)


def bytes_alive() -> tuple[int, int]:
    """Of all tensors' storages in this process, and of tensors in oneDNN's layout, which have none."""
    gc.collect()
    storages, packed = {}, 0
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.is_mkldnn:
            packed += thing.numel() * thing.element_size()
        elif isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values()), packed
