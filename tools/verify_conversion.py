"""Convert the full 3.93B shape from Hugging Face to a checkpoint and back, with random bits, and compare bit for bit.

    python tools/verify_conversion.py [--layers N] [--scratch DIR]

Needs three times the model on disk (23.6 GB for all 32 layers) under --scratch, which is emptied at the end, and a few
minutes. Prints time and peak anonymous memory of both directions; exits with 1 on a difference or above 4 GB. Writes
runs/verify_conversion/summary.json.
"""
from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_nb.model.global_tensors import row_blocks
from megatron_nb.model.gpt import DTYPES
from megatron_nb.model.hf_config import config_to_hf
from megatron_nb.model.hf_files import HfFolder, write_safetensors
from megatron_nb.model.hf_names import hf_shapes
from megatron_nb.model.progress import GB
from megatron_nb.model.shape import ModelConfig
from megatron_nb.run import write_summary

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script sees its own folder only
from tools.convert_hf import export_hf, import_hf  # noqa: E402

SEED = 1234
LIMIT = 4e9  # bytes of anonymous memory


def random_tensors(config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Every bit random: what arithmetic would spoil (NaN payloads, denormals) must survive too."""
    generator = torch.Generator().manual_seed(SEED)
    for name, shape in hf_shapes(config).items():
        bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator)
        yield name, bits.view(torch.bfloat16)


def differences(a: Path, b: Path) -> list[str]:
    """Names of tensors that are not the same bits."""
    one, two = HfFolder(a), HfFolder(b)
    found = sorted(set(one) ^ set(two))
    for name in sorted(set(one) & set(two)):
        shape = one.shape(name)
        same = shape == two.shape(name) and one.dtype(name) == two.dtype(name)
        for first, rows in row_blocks(shape, one.dtype(name)) if same else ():
            box = slice(first, first + rows), slice(None) if len(shape) == 2 else None
            same = same and torch.equal(one.read(name, *box).view(torch.int16), two.read(name, *box).view(torch.int16))
        if not same:
            found.append(name)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32, help="fewer for a quick look (default 32: 3.93B parameters)")
    parser.add_argument("--scratch", type=Path, help="folder on a disk with room (default: the system's temporary folder)")
    given = parser.parse_args(argv)
    begin, config = time.monotonic(), ModelConfig(num_layers=given.layers)
    with tempfile.TemporaryDirectory(dir=given.scratch) as scratch:
        hf, checkpoint, back = (Path(scratch) / name for name in ("hf", "checkpoint", "back"))
        hf.mkdir()
        (hf / "config.json").write_text(json.dumps(config_to_hf(config)))
        write_safetensors(hf, hf_shapes(config), DTYPES["bf16"], random_tensors(config))
        print(f"{config.num_parameters:,} parameters written in {time.monotonic() - begin:.0f} s")
        imported, exported = import_hf(hf, checkpoint, tensor=4), export_hf(checkpoint, back)
        wrong = differences(hf, back)
    peak = max(imported.peak, exported.peak)
    for name, meter in (("import", imported), ("export", exported)):
        print(f"{name}: {meter.total / GB:.2f} GB in {meter.seconds:.1f} s, peak anonymous memory {meter.peak / GB:.2f} GB")
    print(f"different tensors: {len(wrong)} {wrong[:3]}")
    folder = Path("runs/verify_conversion")
    folder.mkdir(parents=True, exist_ok=True)
    write_summary(
        folder, seed=SEED, wall_s=time.monotonic() - begin, parameters=config.num_parameters,
        different_tensors=len(wrong), import_s=imported.seconds, export_s=exported.seconds, peak_anonymous_gb=peak / GB,
    )  # fmt: skip
    return 1 if wrong or peak > LIMIT else 0


if __name__ == "__main__":
    sys.exit(main())
