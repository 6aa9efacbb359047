"""Do all layouts compute the same numbers? Every layout of the matrix against one process, on gloo ranks of this machine.

    python tools/verify_matrix.py [--json FILE] [--only NAME ...] [--plant FAULT]

Per layout the largest relative difference ||a - b|| / ||b|| (worst tensor) of loss, gathered gradients, per-token
log-probabilities, and weights after one step of relative size >= 1e-2, all in fp32. The reference runs every document
alone in one process, so it knows neither packing nor padding nor any group. Exit 1 when a difference exceeds 1e-5; with
--plant, exit 1 when the planted fault stays below 1e-3 in every layout it concerns.

Rotary positions are compared by the table itself: RoPE is relative, a missing restart would change no loss.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from megatron_nb.data.packing import collate, pack
from megatron_nb.losses.next_token import NextToken
from megatron_nb.model.gpt import build, initialize_weights
from megatron_nb.model.shape import ModelConfig
from megatron_nb.model.sharding import cut_dimension, named_parameters, unshard
from megatron_nb.parallel import topology
from megatron_nb.parallel.topology import ParallelConfig
from megatron_nb.records import Batch, Sample
from megatron_nb.training import trainer as trainer_module
from megatron_nb.training.optimizer import OptimizerConfig
from megatron_nb.training.trainer import Trainer
from tools.rank_pool import RankPool

LENGTH, TOLERANCE, VISIBLE = 128, 1e-5, 1e-3
LLAMA = ModelConfig(
    num_layers=4, hidden_size=64, num_attention_heads=8, num_query_groups=4, head_dim=16, ffn_hidden_size=160, vocab_size=200,
    rope_theta=1e4, max_position_embeddings=LENGTH, dtype="fp32",
)  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tied_embeddings=True),
    "qwen3": replace(LLAMA, qk_norm=True, qkv_bias=True),
}
FAULTS = {  # fault -> layouts in which it must be visible
    "loss-times-cp": ("cp2", "cp4", "tp2-sp-cp2", "pp2-cp2"),
    "shift-after-split": ("cp2", "cp4", "tp2-sp-cp2", "pp2-cp2"),
    "no-document-mask": ("dp2", "cp2", "cp4", "tp2-sp-cp2", "pp2-cp2"),
    "no-gradient-all-reduce": ("dp2", "cp2", "dp2-tp2-sp", "dp2-pp2"),
    "no-norm-all-reduce": ("tp2-sp", "tp4-sp", "tp2-sp-pp2"),
}


@dataclass(frozen=True)
class Layout:
    name: str
    parallel: ParallelConfig
    world: int
    model: str = "llama"
    packed: bool = True
    micro_batch_size: int = 1
    distributed_optimizer: bool = False


def _layout(
    name: str, world: int, model: str = "llama", packed: bool = True, micro: int = 1, dist_opt: bool = False, **parallel
) -> Layout:
    return Layout(name, ParallelConfig(**parallel), world, model, packed, micro, dist_opt)


def layouts() -> list[Layout]:
    """The matrix: every kind of parallelism alone, the combinations that fit 4 ranks, packing, recompute, model kinds."""
    L = _layout
    return [
        L("one-packed", 1),
        L("one-padded-micro4", 1, packed=False, micro=4),
        L("one-packed-full-recompute", 1, recompute="full"),
        L("one-packed-selective-recompute", 1, recompute="selective"),
        L("dp2", 2),
        L("dp4-padded-micro2", 4, packed=False, micro=2),
        L("dp4-distopt", 4, dist_opt=True),
        L("tp2", 2, tensor=2, sequence_parallel=False),
        L("tp2-sp", 2, tensor=2),
        L("tp4-sp", 4, tensor=4),
        L("tp4-padded-micro3", 4, tensor=4, sequence_parallel=False, packed=False, micro=3),
        L("tp2-sp-selective", 2, tensor=2, recompute="selective"),
        L("pp2", 2, pipeline=2),
        L("pp4", 4, pipeline=4),
        L("pp2-vpp2", 2, pipeline=2, virtual_pipeline=2),
        L("pp2-vpp2-full", 2, pipeline=2, virtual_pipeline=2, recompute="full"),
        L("cp2", 2, context=2),
        L("cp4", 4, context=4),
        L("cp2-all-gather", 2, context=2, context_method="all_gather"),
        L("cp4-all-gather-padded", 4, context=4, context_method="all_gather", packed=False),
        L("cp2-full", 2, context=2, recompute="full"),
        L("tp2-cp2", 4, tensor=2, context=2, sequence_parallel=False),
        L("tp2-sp-cp2", 4, tensor=2, context=2),
        L("tp2-sp-cp2-full", 4, tensor=2, context=2, recompute="full"),
        L("tp2-sp-pp2", 4, tensor=2, pipeline=2),
        L("tp2-sp-pp2-vpp2", 4, tensor=2, pipeline=2, virtual_pipeline=2),
        L("pp2-cp2", 4, pipeline=2, context=2),
        L("pp2-vpp2-cp2-full", 4, pipeline=2, virtual_pipeline=2, context=2, recompute="full"),
        L("dp2-tp2-sp", 4, tensor=2),
        L("dp2-pp2", 4, pipeline=2),
        L("dp2-cp2-micro2", 4, context=2, micro=2),
        L("dp2-cp2-distopt", 4, context=2, dist_opt=True),
        L("tied-pp2-tp2-sp", 4, model="tied", pipeline=2, tensor=2),
        L("tied-cp2-dp2-distopt", 4, model="tied", context=2, dist_opt=True),
        L("qwen3-tp2-sp-cp2", 4, model="qwen3", tensor=2, context=2),
        L("qwen3-tp2-pp2", 4, model="qwen3", tensor=2, pipeline=2, sequence_parallel=False),
    ]  # fmt: skip


def samples() -> list[Sample]:
    """24 documents of 1 to 90 tokens, some tokens masked."""
    random = np.random.default_rng(11)
    rows = []
    for number in range(24):
        length = int(random.integers(1, 4)) if number % 6 == 0 else int(random.integers(4, 91))
        rows.append(Sample(
            ids=random.integers(0, LLAMA.vocab_size, length),
            loss_weight=(random.random(length) < 0.8).astype(np.float32),
            sample_id=f"doc{number}",
        ))  # fmt: skip
    return rows


def packs(layout: Layout, data_size: int) -> list[Batch]:
    """All micro-batches of the global batch, in order; a multiple of data ranks and of pipeline stages."""
    multiple = layout.parallel.pack_multiple
    bins: list[list[Sample]] = []
    for sample in samples():
        room = [b for b in bins if layout.packed and sum(map(len, b)) + len(sample) <= LENGTH]
        (room[0] if room else bins.append([]) or bins[-1]).append(sample)
    whole = [pack(b, LENGTH, multiple) for b in bins]
    unit = layout.micro_batch_size * data_size * layout.parallel.pipeline
    while len(whole) % unit:
        whole.append(pack([], LENGTH, multiple))  # a filler: weight zero
    size = layout.micro_batch_size
    return [collate(whole[i : i + size]) for i in range(0, len(whole), size)]


# ---------------------------------------------------------------------------------------------- on the ranks
class _Scaled(NextToken):
    def __init__(self, factor: float):
        self.factor = factor

    def coefficient(self, batch):
        return super().coefficient(batch) * self.factor

    def __call__(self, logprob, batch):
        total, count, metrics = super().__call__(logprob, batch)
        return total * self.factor, count, metrics


def _plant(fault: str | None, layout: Layout, trainer: Trainer) -> NextToken:
    """Break one thing; returns the loss to use."""
    split = trainer_module.split
    if fault == "shift-after-split":
        trainer_module.split = lambda *a: (b := split(*a)) and replace(b, targets=b.ids.roll(-1))
    if fault == "no-document-mask":
        trainer_module.split = lambda *a: (
            (b := split(*a)) and replace(b, start=torch.zeros_like(b.start), cu_seqlens=torch.tensor([0, b.pack_length]))
        )
    if fault == "no-gradient-all-reduce":
        for chunk in trainer.chunks:
            chunk.finish_grad_sync = lambda force_all_reduce=False: None
    if fault == "no-norm-all-reduce":
        for _, parameter in named_parameters(trainer.chunks):
            if getattr(parameter, "sequence_parallel", False):
                parameter.sequence_parallel = False
    return _Scaled(layout.parallel.context) if fault == "loss-times-cp" else NextToken()


def gathered(trainer: Trainer, take, strict: bool = True) -> dict[str, torch.Tensor]:
    """Whole tensors by global name, joined over tensor and pipeline ranks. Replicas must agree to the bit when `strict`."""
    mine = {name: (take(p).detach().clone(), cut_dimension(p)) for name, p in named_parameters(trainer.chunks)}
    t = trainer.topology
    everyone = topology.everywhere((t.tensor_rank, t.data_rank, t.context_rank, mine))
    whole: dict[str, torch.Tensor] = {}
    for name in {name for *_, held in everyone for name in held}:
        copies: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        for tensor_rank, data_rank, context_rank, held in everyone:
            if name in held:
                copies.setdefault((data_rank, context_rank), {})[tensor_rank] = held[name][0]
                dimension = held[name][1]
        joined = [unshard(name, [pieces[r] for r in sorted(pieces)], dimension) for pieces in copies.values()]
        assert not strict or all(torch.equal(joined[0], other) for other in joined[1:]), f"replicas of {name} differ"
        whole[name] = joined[0]
    return whole


def run_layout(layout: Layout, fault: str | None = None) -> dict | None:
    """One layout on this rank; the first rank returns loss, gradients, log-probs by sample, weights."""
    t = topology.initialize(layout.parallel, seed=5)
    model = MODELS[layout.model]
    chunks = build(model, layout.parallel)
    initialize_weights(chunks, model, seed=7, std=0.15)  # wide enough that attention looks at everything
    # Adam far below its eps is plain gradient descent with rate lr / eps, through core's own optimizers
    config = OptimizerConfig(lr=1e7, eps=1e6, schedule="constant", weight_decay=0.0, clip_grad=1.0)
    trainer = Trainer(chunks, config, t, num_steps=1, distributed_optimizer=layout.distributed_optimizer)
    before = gathered(trainer, lambda p: p)
    original = trainer_module.split
    try:
        loss = _plant(fault, layout, trainer)
        batches = packs(layout, t.data_size)
        mine = batches[t.data_rank :: t.data_size]
        logprobs: dict[str, torch.Tensor] = {}
        for batch, row in zip(mine, trainer.logprobs(mine, loss)):
            ends = batch.cu_seqlens.tolist()
            for sample_id, begin, end in zip(batch.sample_ids, ends[:-1], ends[1:]):
                logprobs[sample_id] = row[begin : end - 1].clone()
        total, count, *_ = trainer.gradients(mine, loss)
        gradients = {} if layout.distributed_optimizer else gathered(trainer, lambda p: p.main_grad, strict=fault is None)
        result = trainer.step(mine, loss)
        assert result.skipped is None, f"the step was refused: {result.skipped}"
    finally:
        trainer_module.split = original
    weights = gathered(trainer, lambda p: p, strict=fault is None)
    parts = topology.everywhere(logprobs)
    if t.rank:
        return None
    moved = min(float((weights[n] - before[n]).norm() / before[n].norm()) for n in weights if before[n].dim() > 1)
    return {
        "loss": total / count, "count": count, "gradients": gradients, "weights": weights, "moved": moved,
        "grad_norm": result.grad_norm,
        "logprob": {k: v for part in parts for k, v in part.items() if k},
    }  # fmt: skip


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    scale = float(expected.double().norm())
    gap = float((found.double() - expected.double()).norm())
    return gap / scale if scale else gap


def compare(found: dict, expected: dict) -> dict[str, float]:
    """Largest relative difference by kind.

    The distributed optimizer leaves every rank a slice of the summed gradients: there the norm over all slices is compared.
    """
    assert found["count"] == expected["count"], f"{found['count']} trained tokens, expected {expected['count']}"
    row = {"loss": abs(found["loss"] - expected["loss"]) / abs(expected["loss"])}
    for kind in ("gradients", "logprob", "weights"):
        if found[kind]:
            assert set(found[kind]) == set(expected[kind]), f"{kind}: {set(found[kind]) ^ set(expected[kind])}"
            row[kind] = max(relative(_true_rows(found[kind][n], expected[kind][n]), expected[kind][n]) for n in expected[kind])
        else:
            assert kind == "gradients", f"no {kind} came back"
            row[kind] = abs(found["grad_norm"] - expected["grad_norm"]) / expected["grad_norm"]
    return row


def _true_rows(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Vocabulary tables are padded by topology: compare the rows both have, and the rest must be untouched zeros."""
    if found.shape == expected.shape:
        return found
    rows = min(len(found), len(expected))
    assert not found[rows:].any(), "a padding row of the vocabulary was trained"
    return torch.cat([found[:rows], torch.zeros_like(expected[rows:])])


# ---------------------------------------------------------------------------------------------- the command
def reference(pool: RankPool, model: str) -> dict:
    """Every document in a pack of its own, one process, no group larger than one."""
    return pool.run(1, run_layout, Layout(f"reference-{model}", ParallelConfig(), 1, model, packed=False))[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the table as JSON")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these layouts only")
    parser.add_argument("--plant", choices=FAULTS, help="break one thing on purpose: the differences must show it")
    parser.add_argument("--list", action="store_true", help="print the layouts and stop")
    options = parser.parse_args()
    chosen = [x for x in layouts() if x.name in (options.only or [x.name])]
    unknown = set(options.only or []) - {x.name for x in layouts()}
    if unknown:
        parser.error(f"no layout named {', '.join(sorted(unknown))}: --list shows them")
    if options.plant:
        chosen = [x for x in chosen if x.name in FAULTS[options.plant]]
    if options.list:
        print("\n".join(f"{x.name:34} {x.world} ranks  {x.model}" for x in layouts()))
        return 0

    pool, begun, rows, references = RankPool(), time.monotonic(), [], {}
    kinds = ("loss", "gradients", "logprob", "weights")
    print(f"{'layout':34}" + "".join(f"{kind:>11}" for kind in kinds) + "   step size   seconds")
    try:
        for number, layout in enumerate(chosen, 1):
            started = time.monotonic()
            if layout.model not in references:
                references[layout.model] = reference(pool, layout.model)
                assert references[layout.model]["moved"] >= 1e-2, references[layout.model]["moved"]
            found = pool.run(layout.world, run_layout, layout, options.plant)[0]
            row = compare(found, references[layout.model])
            rows.append({"name": layout.name, **row})
            left = (time.monotonic() - begun) / number * (len(chosen) - number)
            marks = "".join(f"{row[kind]:11.1e}" for kind in kinds)
            print(
                f"{layout.name:34}{marks}{found['moved']:12.3f}{time.monotonic() - started:10.1f}   {left:.0f} s left",
                flush=True,
            )
    finally:
        pool.close()
    worst = {kind: max(row[kind] for row in rows) for kind in kinds}
    print(f"{'worst':34}" + "".join(f"{worst[kind]:11.1e}" for kind in kinds))
    if options.json:
        options.json.write_text(json.dumps({"layouts": rows, "plant": options.plant, "tolerance": TOLERANCE}, indent=1))
    if options.plant:
        blind = [row["name"] for row in rows if max(row[kind] for kind in kinds) <= VISIBLE]
        print(
            f"fault {options.plant!r}: " + (f"NOT SEEN in {', '.join(blind)}" if blind else f"seen in all {len(rows)} layouts")
        )
        return int(bool(blind))
    failed = [row["name"] for row in rows if max(row[kind] for kind in kinds) > TOLERANCE]
    print(
        f"{len(rows) - len(failed)} of {len(rows)} layouts within {TOLERANCE:g}"
        + (f"; FAILED: {', '.join(failed)}" if failed else "")
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
