"""Re-save a checkpoint (model, optimizer and all) for another topology, streaming, in one process.

    python tools/reshard.py --checkpoint CKPT --out CKPT [--tp N --pp N --vpp N]

A checkpoint of ours holds whole tensors and loads at any topology as it is: `init_from=` and resuming need no resharding.
What this adds: the files are checked against their checksums, the shape against the new topology, padding rows for being
zero; and the vocabulary's rows, of weights and of optimizer moments, are padded to a multiple of 128 * tp as a run at that
topology would have saved them, so that tools which insist on equal shapes load it too. Everything else is copied bit for
bit. Random states of ranks belong to the old topology: a run at the new one starts them afresh, with a warning.
"""
from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch

from megatron_nb.model.global_tensors import CONFIG, HF, GlobalTensors, Piece, row_blocks, write_global_tensors
from megatron_nb.model.gpt import check_layout
from megatron_nb.model.hf_files import bytes_of, copy_companions, new_folder
from megatron_nb.model.hf_names import TABLE
from megatron_nb.model.progress import GB, Meter
from megatron_nb.parallel.topology import ParallelConfig
from megatron_nb.training.checkpoint_folder import DamagedCheckpoint, check_files, resolve, seal

PADDED = tuple(entry.key for entry in TABLE if entry.padded)


def reshard(checkpoint: Path, out: Path, parallel: ParallelConfig) -> Meter:
    """Write `out`. ValueError when the model cannot be cut that way, DamagedCheckpoint when a file is not what was written."""
    folder = resolve(checkpoint) or checkpoint
    source = GlobalTensors(folder)
    config = source.model_config()
    check_layout(config, parallel)
    check_files(folder)
    rows = config.padded_vocab(parallel.tensor)
    total = sum(bytes_of(source.shape(key), source.dtype(key)) for key in source)
    with Meter(f"reshard {folder}", total) as meter, new_folder(out, total) as partial:
        pieces = [piece for key in source for piece in _pieces(source, key, config.vocab_size, rows, meter)]
        meter.total = sum(bytes_of(piece.shape, piece.dtype) for piece in pieces)
        write_global_tensors(partial, pieces, {key: source.object(key) for key in source.objects})
        shutil.copyfile(folder / CONFIG, partial / CONFIG)
        if (folder / HF).is_dir():
            copy_companions(folder / HF, partial / HF)
        seal(partial, out)
    return meter


def _pieces(source: GlobalTensors, key: str, vocabulary: int, rows: int, meter: Meter) -> list[Piece]:
    """The boxes of one tensor as they are stored; those of a vocabulary are cut or continued with zeros."""
    whole, dtype, boxes = source.shape(key), source.dtype(key), source.boxes(key)
    if key.endswith(PADDED):
        boxes = [(offset, (min(shape[0], rows - offset[0]), *shape[1:])) for offset, shape in boxes if offset[0] < rows]
        more = row_blocks((max(0, rows - whole[0]), *whole[1:]), dtype)
        boxes += [((whole[0] + first, *(0,) * (len(whole) - 1)), (count, *whole[1:])) for first, count in more]
        whole, stored = (rows, *whole[1:]), whole[0]
    else:
        vocabulary = stored = whole[0] if whole else 1

    def produce(offset, shape):
        values = torch.zeros(shape, dtype=dtype)
        if not offset or offset[0] < stored:
            source.read(key, offset, values)
        if offset and values[max(0, vocabulary - offset[0]) :].any():
            raise ValueError(
                f"{source.folder}: rows of {key} beyond the vocabulary of {vocabulary} are not zero: correct vocab_size in "
                f"its {CONFIG}, or use another checkpoint"
            )
        meter.add(values.nbytes)
        return values

    return [Piece(key, whole, offset, shape, dtype, lambda o=offset, s=shape: produce(o, s)) for offset, shape in boxes]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="step folder, or a run (its newest complete step)")
    parser.add_argument("--out", type=Path, required=True, help="step folder to make: runs/NEW/checkpoints/step-00000100")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size of the runs to come")
    parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel size; checked, does not change the files")
    parser.add_argument("--vpp", type=int, default=1, help="virtual pipeline size; checked, does not change the files")
    given = parser.parse_args(argv)
    try:
        parallel = ParallelConfig(tensor=given.tp, pipeline=given.pp, virtual_pipeline=given.vpp)
        meter = reshard(given.checkpoint, given.out, parallel)
    except (ValueError, OSError, DamagedCheckpoint) as error:
        print(f"reshard: {error}", file=sys.stderr)
        return 1
    print(f"{given.out}: {meter.total / GB:.3f} GB in {meter.seconds:.1f} s, peak anonymous memory {meter.peak / GB:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
