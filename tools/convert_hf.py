"""Convert between a Hugging Face folder and a checkpoint of ours, streaming: a few tensors in memory, whatever the size.

    python tools/convert_hf.py import --hf DIR --out CKPT [--tp N --pp N]
    python tools/convert_hf.py export --checkpoint CKPT --out DIR

A checkpoint holds whole tensors, so it loads at any tensor, pipeline, context and data-parallel size whatever --tp and --pp
say: they are checked against the model's shape, and --tp sets how many rows the vocabulary is padded to in the file.
Rows of padding are zero and are never exported. The output folder appears under its name only when it is complete.
"""
from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import yaml

from megatron_nb.model.global_tensors import CONFIG, HF, Piece, model_objects, row_blocks, write_global_tensors
from megatron_nb.model.gpt import DTYPES, check_layout
from megatron_nb.model.hf import Box, HfSource
from megatron_nb.model.hf_config import config_from_hf
from megatron_nb.model.hf_files import bytes_of, copy_companions, new_folder, parse_size
from megatron_nb.model.hf_names import tensors_of
from megatron_nb.model.progress import GB, Meter
from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel.topology import ParallelConfig
from megatron_nb.training.checkpoint_folder import seal
from megatron_nb.training.export import export_hf, size_in_bytes


def import_hf(hf: Path, out: Path, tensor: int = 1, pipeline: int = 1, dtype: str | None = None) -> Meter:
    """Write `out` from the Hugging Face folder `hf`. ValueError when the model cannot be represented."""
    config = config_from_hf(hf, dtype)
    check_layout(config, ParallelConfig(tensor=tensor, pipeline=pipeline))
    source = HfSource(hf, config, cast=dtype is not None)
    with Meter(f"import {hf}", size_in_bytes(config)) as meter, new_folder(out, meter.total) as partial:
        pieces = _pieces(source, config, tensor, meter)
        meter.total = sum(bytes_of(piece.shape, piece.dtype) for piece in pieces)
        write_global_tensors(partial, pieces, model_objects(config))
        copy_companions(hf, partial / HF)
        (partial / CONFIG).write_text(yaml.safe_dump({"model": asdict(config)}, sort_keys=False))
        seal(partial, out)
    return meter


def _pieces(source: HfSource, config: ModelConfig, tensor: int, meter: Meter) -> list[Piece]:
    """Every box of every global tensor, in the order in which they will be written."""
    dtype = DTYPES[config.dtype]
    pieces = []
    for entry, layer in tensors_of(config):
        shape = entry.shape(config)
        if entry.padded:
            shape = (config.padded_vocab(tensor), *shape[1:])
        stack = (config.num_layers,) if entry.per_layer else ()
        for row, rows in row_blocks(shape, dtype):
            box_shape = (rows, *shape[1:])

            def produce(entry=entry, layer=layer, row=row, box_shape=box_shape):
                values = torch.empty(box_shape, dtype=dtype)
                source.fill(Box(entry, layer, row, 0, values))
                meter.add(values.nbytes)
                return values if layer is None else values[None]

            at = (() if layer is None else (layer,)) + (row,) + (0,) * (len(shape) - 1)
            pieces.append(Piece(entry.key, stack + shape, at, (1,) * len(stack) + box_shape, dtype, produce))
    return pieces


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("import", help="Hugging Face folder -> checkpoint")
    command.add_argument("--hf", type=Path, required=True, help="folder with config.json and safetensors")
    command.add_argument("--out", type=Path, required=True, help="checkpoint folder to make")
    command.add_argument("--tp", type=int, default=1, help="checked against the shape; pads the vocabulary to 128 * tp")
    command.add_argument("--pp", type=int, default=1, help="checked against the shape; does not change the files")
    command.add_argument("--dtype", choices=sorted(DTYPES), help="dtype to convert to (default: the origin's, bit for bit)")
    command = commands.add_parser("export", help="checkpoint -> Hugging Face folder")
    command.add_argument("--checkpoint", type=Path, required=True, help="step folder, or a run (its newest complete step)")
    command.add_argument("--out", type=Path, required=True, help="folder to make")
    command.add_argument("--max-shard-size", default="5GB", help="largest safetensors file, such as 5GB or 500MB (default 5GB)")
    return parser


def main(argv: list[str] | None = None) -> int:
    given = arguments().parse_args(argv)
    try:
        if given.command == "import":
            meter = import_hf(given.hf, given.out, given.tp, given.pp, given.dtype)
        else:
            meter = export_hf(given.checkpoint, given.out, parse_size(given.max_shard_size))
    except (ValueError, OSError) as error:
        print(f"convert_hf: {error}", file=sys.stderr)
        return 1
    print(f"{given.out}: {meter.total / GB:.3f} GB in {meter.seconds:.1f} s, peak anonymous memory {meter.peak / GB:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
