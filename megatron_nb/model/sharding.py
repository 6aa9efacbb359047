"""How a parameter of the whole model is cut over tensor ranks, and what it is called in the whole model.

The gated MLP's linear_fc1 holds gate rows, then up rows, on every rank: cutting it means cutting both halves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

Module = torch.nn.Module


def bare(module: Module) -> Module:
    """The GPTModel inside core's data-parallel wrapper."""
    return module.module if hasattr(module, "ddp_config") else module


def global_name(module: Module, name: str) -> str:
    """A local parameter name with the layer's number in the whole model (pipeline stages count from 0 each)."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(module.decoder.layers[int(parts[2])].layer_number - 1)
    if name == "output_layer.weight" and module.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"  # the last pipeline stage's copy of a tied table
    if name == "output_layer.weight" and hasattr(module.output_layer, "scores"):
        return "score.weight"
    return ".".join(parts)


def named_parameters(modules: list[Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(global name, parameter) of all chunks on this rank."""
    for module in map(bare, modules):
        for name, parameter in module.named_parameters():
            yield global_name(module, name), parameter


def cut_dimension(parameter: torch.Tensor) -> int | None:
    """Dimension that tensor parallelism cuts, or None for a replicated parameter."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def _fused_parts(name: str) -> int:
    return 2 if "linear_fc1" in name else 1


def shard(name: str, full: torch.Tensor, dimension: int | None, size: int, rank: int) -> torch.Tensor:
    """The part of `full` that tensor rank `rank` of `size` holds."""
    if dimension is None or size == 1:
        return full
    parts = full.chunk(_fused_parts(name), dimension)
    return torch.cat([part.chunk(size, dimension)[rank] for part in parts], dimension)


def unshard(name: str, pieces: list[torch.Tensor], dimension: int | None) -> torch.Tensor:
    """Inverse of `shard` over all ranks' pieces."""
    if dimension is None or len(pieces) == 1:
        return pieces[0]
    fused = _fused_parts(name)
    split = [piece.chunk(fused, dimension) for piece in pieces]
    return torch.cat([split[rank][part] for part in range(fused) for rank in range(len(pieces))], dimension)
