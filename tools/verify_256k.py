"""One real forward and backward pass at 262144 tokens under context parallelism, against one process.

    python tools/verify_256k.py [--length 262144] [--context 4] [--kind single packed rl_agentic]

One layer, one head of 16, a small vocabulary, fp32 on gloo: the length is real, the width is not. Documents of next-token
loss, packed and single, and one episode of 600 turns as rl_agentic trains it: turn credit, policy gradient. Prints the largest
relative difference of loss, log-probabilities and gathered gradients, seconds, and the peak memory of each rank; writes
runs/test-256k/summary.json. Exit 1 above 1e-5.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from megatron_nb.data.packing import pack
from megatron_nb.losses.next_token import NextToken
from megatron_nb.losses.policy_gradient import PolicyConfig
from megatron_nb.model.gpt import build, initialize_weights
from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel import topology
from megatron_nb.parallel.topology import ParallelConfig
from megatron_nb.records import Batch, Conversation, Group, Prompt, Rollout, Sample, Score, Turn
from megatron_nb.rewards.advantage import CreditConfig, credit
from megatron_nb.run import write_summary
from megatron_nb.training.optimizer import OptimizerConfig
from megatron_nb.training.policy import Policy, UpdateConfig
from megatron_nb.training.trainer import Trainer
from tools.rank_pool import RankPool
from tools.verify_matrix import TOLERANCE, gathered, relative

KINDS = ("packed", "single", "rl_agentic")


def documents(length: int, kind: str) -> list[Sample]:
    """A single document of `length` tokens, or documents from 1 token to a third of the pack that fill it."""
    random = np.random.default_rng(3)
    lengths = [length]
    if kind == "packed":
        lengths, left = [1, length // 3], length - 1 - length // 3
        while left:
            lengths.append(min(left, int(np.exp(random.uniform(np.log(8), np.log(length / 8))))))
            left -= lengths[-1]
    return [
        Sample(random.integers(0, 64, n), np.ones(n, np.float32), sample_id=f"doc{i}") for i, n in enumerate(lengths)
    ]  # fmt: skip


def episode(length: int, turns: int, index: int, reward: float) -> Rollout:
    """An episode of exactly `length` tokens with its prompt: `turns` of the model, tool results between them, all random."""
    random = np.random.default_rng(index)
    row = Rollout(random.integers(0, 64, 8).tolist(), [], [], [], [], [], [], "done", {}, 0, "group", index)
    row.score = Score(reward)
    bounds = np.linspace(0, length - 8, turns + 1).astype(int).tolist()
    for turn, (start, stop) in enumerate(zip(bounds, bounds[1:])):
        middle = stop if turn == turns - 1 else start + max(1, (stop - start) // 6)
        for kind, a, b in (("assistant", start, middle), ("tool", middle, stop)):
            if a == b:
                continue
            sampled, n = kind == "assistant", b - a
            row.ids += random.integers(0, 64, n).tolist()
            row.sampled_mask += [sampled] * n
            row.logprob += random.normal(-4.2, 0.5, n).tolist() if sampled else [0.0] * n
            row.weight_version += [0 if sampled else -1] * n
            row.turn_id += [len(row.turns)] * n
            row.turns.append(Turn(a, b, kind, reward=float(random.choice([-1, 0, 1 / 3, 2 / 3, 1])) if sampled else None))
    return row


def agentic(length: int) -> Sample:
    """The row that `credit` makes of the longer of two episodes."""
    rollouts = [episode(length, min(600, length // 16), 0, 1.0), episode(length // 8, 40, 1, 0.0)]
    group = Group("group", Prompt(Conversation([], "prompt", ""), rollouts[0].prompt_ids), rollouts)
    config = CreditConfig(
        advantage="rloo", reduction="turn_constant", turn_credit="unbiased", turn_weight=0.3, max_turns=600
    )  # fmt: skip
    sample = credit([group], config, turn_baseline=0.5)[0][0]
    trained = np.array(sample.advantage)[np.array(sample.loss_weight) > 0]
    assert len(sample) == length, f"the row has {len(sample)} tokens, {length} were meant"
    assert len(np.unique(trained)) > 1, "turn credit must tell turns apart"
    return sample


def task(kind: str, length: int, trainer: Trainer) -> tuple[list[Batch], object]:
    """Packs of one step, and its loss."""
    if kind != "rl_agentic":
        return [pack(documents(length, kind), length, trainer.parallel.pack_multiple)], NextToken()
    policy = Policy(trainer, PolicyConfig(), UpdateConfig(pack_tokens=length))
    return policy.packs([agentic(length)]), policy.loss


def peak_memory() -> int:
    """Bytes: the high-water mark of this process."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def run(length: int, context: int, kind: str, method: str) -> dict:
    """Loss, log-probs and gathered gradients of one pack, and what it took on this rank."""
    parallel = ParallelConfig(context=context, context_method=method)
    model = ModelConfig(
        num_layers=1, hidden_size=16, num_attention_heads=1, num_query_groups=1, head_dim=16, ffn_hidden_size=32, vocab_size=64,
        rope_theta=7e7, max_position_embeddings=length, dtype="fp32",
    )  # fmt: skip
    place = topology.initialize(parallel, seed=1)
    chunks = build(model, parallel)
    initialize_weights(chunks, model, seed=2, std=0.3)
    trainer = Trainer(chunks, OptimizerConfig(schedule="constant"), place, num_steps=1, distributed_optimizer=False)
    packs, loss = task(kind, length, trainer)
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before, started = peak_memory(), time.perf_counter()
    total, count, _, found, _ = trainer.gradients(packs, loss)
    seconds = time.perf_counter() - started
    used = peak_memory() - before
    gradients = gathered(trainer, lambda p: p.main_grad)
    row = torch.zeros(length)
    for batch, *_, output in found:
        logprob = output[0] if isinstance(output, tuple) else output  # beside the entropy, in RL
        row[batch.index] = logprob.detach()
    torch.distributed.all_reduce(row)
    return {"loss": total / count, "gradients": gradients, "logprob": row, "seconds": seconds, "bytes": used}


def on_fresh_ranks(world: int, *args) -> list[dict]:
    """`run` on processes that have done nothing before: a process keeps what it freed, which would hide the peak."""
    pool = RankPool(world)
    try:
        return pool.run(world, run, *args, timeout=3600)
    finally:
        pool.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=262144)
    parser.add_argument("--context", type=int, default=4)
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--method", choices=("ring", "all_gather"), default="ring")
    options = parser.parse_args()
    worst, summary, began = 0.0, {}, time.monotonic()
    for kind in options.kind:
        one = on_fresh_ranks(1, options.length, 1, kind, "ring")[0]
        print(
            f"{kind}: one process   {one['seconds']:7.1f} s  {one['bytes'] / 2**20:8.1f} MiB above the idle process", flush=True
        )
        many = on_fresh_ranks(options.context, options.length, options.context, kind, options.method)
        for rank, result in enumerate(many):
            print(f"{kind}: rank {rank} of {options.context}   {result['seconds']:7.1f} s  {result['bytes'] / 2**20:8.1f} MiB")
        gaps = {
            "loss": abs(many[0]["loss"] - one["loss"]) / abs(one["loss"]),
            "logprob": relative(many[0]["logprob"], one["logprob"]),
            "gradients": max(relative(many[0]["gradients"][n], one["gradients"][n]) for n in one["gradients"]),
        }
        print(f"{kind}: relative difference " + "  ".join(f"{name} {gap:.1e}" for name, gap in gaps.items()), flush=True)
        worst = max(worst, *gaps.values())
        summary |= {f"{kind}_{name}": gap for name, gap in gaps.items()}
        summary |= {
            f"{kind}_peak_mib_rank": max(r["bytes"] for r in many) / 2**20,
            f"{kind}_peak_mib_one": one["bytes"] / 2**20,
        }
        summary |= {f"{kind}_seconds_context": many[0]["seconds"], f"{kind}_seconds_one": one["seconds"]}
    write_summary(Path("runs/test-256k"), seed=1, wall_s=time.monotonic() - began, length=options.length, **summary)
    return int(not worst <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
