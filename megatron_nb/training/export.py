"""From a checkpoint to a Hugging Face folder, streaming: a few tensors in memory, whatever the size."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_nb.model.global_tensors import HF
from megatron_nb.model.gpt import DTYPES
from megatron_nb.model.hf import CheckpointWeights
from megatron_nb.model.hf_config import config_to_hf, read_json
from megatron_nb.model.hf_files import bytes_of, copy_companions, new_folder, write_safetensors
from megatron_nb.model.hf_names import hf_shapes
from megatron_nb.model.progress import Meter
from megatron_nb.model.shape import ModelConfig
from megatron_nb.training.checkpoint_folder import resolve


def export_hf(checkpoint: Path, out: Path, max_shard_bytes: int = 5 * 10**9) -> Meter:
    """Write the Hugging Face folder `out` from a checkpoint, or from the newest checkpoint of a run.

    The folder appears under its name only when it is complete. Rows of padding are never exported.
    """
    checkpoint = resolve(checkpoint) or checkpoint
    source = CheckpointWeights(checkpoint)
    config, total = source.config, size_in_bytes(source.config)
    with Meter(f"export {checkpoint}", total) as meter, new_folder(out, total) as partial:
        origin = checkpoint / HF
        if origin.is_dir():
            copy_companions(origin, partial)
        carried = partial / "config.json"
        raw = config_to_hf(config, read_json(carried) if carried.is_file() else None)
        carried.write_text(json.dumps(raw, indent=2, ensure_ascii=False) + "\n")
        tensors = _metered(source.hf_tensors(), meter)
        write_safetensors(partial, hf_shapes(config), DTYPES[config.dtype], tensors, max_shard_bytes)
    return meter


def _metered(tensors, meter: Meter):
    for name, tensor in tensors:
        yield name, tensor
        meter.add(tensor.nbytes)


def size_in_bytes(config: ModelConfig) -> int:
    """Of all tensors of a Hugging Face folder."""
    return sum(bytes_of(shape, DTYPES[config.dtype]) for shape in hf_shapes(config).values())
