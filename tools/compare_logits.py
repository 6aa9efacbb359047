"""Compare the logits of two models on the same tokens.

    python tools/compare_logits.py --a DIR --b DIR [--prompts FILE] [--dtype fp32|bf16] [--tolerance 1e-5]

Each side is a Hugging Face folder, which transformers evaluates, or a checkpoint (or run) of ours, which our own model
evaluates.
Printed per case: largest absolute difference, relative difference ||a - b|| / ||b||, largest KL(a || b) of a position in
nats, share of positions with the same argmax. Exits with 1 when a relative difference exceeds the tolerance.

Without --prompts the cases are random tokens: from position 0, at positions that cross the end of the original context,
and, where that context is short, a whole sequence longer than it.
"""
from __future__ import annotations

import argparse
import gc
import math
import sys
from dataclasses import replace
from pathlib import Path

import torch

from megatron_nb.model.attention import bounds
from megatron_nb.model.global_tensors import COMPLETE, HF, GlobalTensors
from megatron_nb.model.gpt import DTYPES, build
from megatron_nb.model.hf import CheckpointWeights, load_weights
from megatron_nb.model.hf_config import config_from_hf
from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel import topology
from megatron_nb.records import Batch
from megatron_nb.training.checkpoint_folder import resolve

Case = tuple[str, torch.Tensor, int]  # name, ids [T], position of the first token
LONG = 2048  # a context up to here is exceeded by a real sequence


def shape_of(folder: Path) -> ModelConfig:
    return GlobalTensors(folder).model_config() if (folder / COMPLETE).is_file() else config_from_hf(folder, "fp32")


def cases(config: ModelConfig, folder: Path, prompts: Path | None) -> list[Case]:
    """What both models are asked."""
    if prompts is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder / HF if (folder / COMPLETE).is_file() else folder)
        lines = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not lines:
            raise ValueError(f"{prompts} holds no prompt: write one a line")
        return [(line[:24], torch.tensor(tokenizer(line)["input_ids"]), 0) for line in lines]
    context = config.max_position_embeddings
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (max(256, min(context, LONG) + 64),), generator=generator)
    found = [("start", ids[:256], 0), (f"around position {context}", ids[:256], max(0, context - 128))]
    if context <= LONG:
        found.append((f"{len(ids)} tokens", ids, 0))
    return found


@torch.no_grad()
def our_logits(folder: Path, config: ModelConfig, asked: list[Case], dtype: str) -> list[torch.Tensor]:
    """[T, V] float32 per case, by our model in this process."""
    config = replace(config, dtype=dtype)
    parallel = topology.ParallelConfig()
    topology.initialize(parallel, seed=0)
    try:
        (model,) = build(config, parallel)
        load_weights(CheckpointWeights(folder, config), [model], config)
        results = []
        for _, ids, first in asked:
            length = len(ids)
            start = torch.zeros(length, dtype=torch.int64)
            pack = Batch(
                ids, torch.zeros_like(ids), torch.zeros(length), index=torch.arange(length) + first, start=start,
                cu_seqlens=torch.tensor([0, length]), count=0,
            ).to(next(model.parameters()).device)  # fmt: skip
            logits = model(pack.ids[None], None, None, packed_seq_params=bounds(pack))
            results.append(logits[0, :, : config.vocab_size].float().cpu())
        return results
    finally:
        topology.destroy(world=True)


@torch.no_grad()
def their_logits(folder: Path, asked: list[Case], dtype: str) -> list[torch.Tensor]:
    """[T, V] float32 per case, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
    return [
        model(ids[None], position_ids=torch.arange(first, first + len(ids))[None], use_cache=False).logits[0].float()
        for _, ids, first in asked
    ]


def logits_of(folder: Path, asked: list[Case], dtype: str) -> list[torch.Tensor]:
    if (folder / COMPLETE).is_file():
        return our_logits(folder, shape_of(folder), asked, dtype)
    return their_logits(folder, asked, dtype)


def difference(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """Of two [T, V] logits."""
    log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
    return {
        "absolute": (a - b).abs().max().item(),
        "relative": ((a - b).norm() / b.norm()).item(),
        "kl": (log_a.exp() * (log_a - log_b)).sum(-1).max().item(),
        "argmax": (a.argmax(-1) == b.argmax(-1)).float().mean().item(),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--a", type=Path, required=True, help="Hugging Face folder, checkpoint folder, or run")
    parser.add_argument("--b", type=Path, required=True, help="the other one")
    parser.add_argument("--prompts", type=Path, help="text file, a prompt a line; a's tokenizer is used")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32", help="of both models (default fp32)")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative difference (default 1e-5)")
    given = parser.parse_args(argv)
    try:
        given.a, given.b = resolve(given.a) or given.a, resolve(given.b) or given.b
        shape, other = shape_of(given.a), shape_of(given.b)
        if shape.vocab_size != other.vocab_size:
            raise ValueError(f"vocabularies differ: {shape.vocab_size} in {given.a}, {other.vocab_size} in {given.b}")
        asked = cases(shape, given.a, given.prompts)
        a = logits_of(given.a, asked, given.dtype)
        gc.collect()
        b = logits_of(given.b, asked, given.dtype)
    except (ValueError, OSError) as error:
        print(f"compare_logits: {error}", file=sys.stderr)
        return 2
    worst = 0.0
    print(f"{'case':26} {'tokens':>7} {'absolute':>10} {'relative':>10} {'KL':>10} {'argmax':>8}")
    for (name, ids, _), one, two in zip(asked, a, b):
        d = difference(one, two)
        worst = max(worst, d["relative"] if math.isfinite(d["relative"]) else math.inf)
        print(f"{name:26} {len(ids):7} {d['absolute']:10.2e} {d['relative']:10.2e} {d['kl']:10.2e} {d['argmax']:8.2%}")
    verdict = "ok" if worst <= given.tolerance else "TOO LARGE"
    print(f"largest relative difference {worst:.2e}, tolerance {given.tolerance:.0e}: {verdict}")
    return 0 if verdict == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
