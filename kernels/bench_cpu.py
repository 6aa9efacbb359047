"""CPU part of bench.py: peak memory and time of forward + backward, each way of computing a loss in a process of its own.

Memory is what the process's peak resident size gains over its size with the inputs in place, less the gradients; there malloc
takes every block above 1 MiB from the system and gives it back, so that holes in the heap do not count. Time is the best of
several runs, with malloc as it is; the ways take turns, so that a busy machine is unfair to none.
"""

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

POLICY = dict(T=2048, H=256, V=32768)
FINE_TUNING = dict(T=512, H=576, V=49152)  # the head of SmolLM2-135M, one pack of 512
GROWTH = dict(H=64, V=8192)


def status(field):
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


def inputs(T, H, V):
    import torch

    torch.manual_seed(0)
    hidden = (torch.randn(T, H) * 0.2).requires_grad_()
    weight = (torch.randn(V, H) * 0.2).requires_grad_()
    targets = torch.randint(0, V, (T,))
    old, ref = torch.randn(2, T) * 0.01 - 10
    advantage = torch.randn(2).repeat_interleave(T // 2)
    return hidden, weight, targets, old, ref, advantage


def policy_from_logprob(logprob, old, ref, advantage):
    """GRPO with k3 and the mean over tokens, in plain torch."""
    import torch

    ratio = (logprob - old).exp()
    policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return (policy + 0.04 * ((ref - logprob).exp() - (ref - logprob) - 1)).mean()


def naive_policy(h, w, t, old, ref, advantage):
    return policy_from_logprob((h @ w.T).log_softmax(-1).gather(1, t[:, None])[:, 0], old, ref, advantage)


def liger_policy(h, w, t, old, ref, advantage, chunk=None):
    import torch
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss, fused_linear_ppo

    if chunk:
        fused_linear_ppo._SELECTIVE_LOGPROB_SEQ_CHUNK_SIZE, fused_linear_ppo._SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE = chunk
    loss = LigerFusedLinearGRPOLoss(beta=0.04, compiled=False, use_ref_model=True, loss_type="grpo", chunk_size=2)
    rows = lambda x: x.view(2, len(h) // 2)  # noqa: E731
    return loss(
        h.view(2, len(h) // 2, -1), w, rows(t), torch.ones(2, len(h) // 2), advantage[:: len(h) // 2].contiguous(),
        ref_per_token_logps=rows(ref), old_per_token_logps=rows(old),
    )[0]  # fmt: skip


def our_policy(h, w, t, old, ref, advantage, chunk=None):
    import torch
    from nb_kernels import linear_logprob_torch
    from nb_kernels.grpo_loss import Objective, grpo_loss
    from nb_kernels.linear_logprob import linear_logprob

    if chunk:
        linear_logprob_torch.TOKEN_CHUNK, linear_logprob_torch.VOCAB_CHUNK = chunk
    options = Objective(clip_high=0.2, kl="k3", kl_coefficient=0.04)
    mean = torch.full_like(old, 1 / len(old))
    return grpo_loss(linear_logprob(h, w, t), advantage, mean, old=old, ref=ref, options=options).loss


def naive_tuning(h, w, t, *_):
    import torch

    return torch.nn.functional.cross_entropy(h @ w.T, t)


def torch_tuning(h, w, t, *_):
    import torch

    return torch.nn.functional.linear_cross_entropy(h, w, t, options=torch.nn.LinearCrossEntropyOptions())


def our_tuning(h, w, t, *_, promise=True):
    import torch
    from nb_kernels.linear_logprob import linear_logprob

    coefficient = torch.full((len(h),), -1 / len(h))
    return (linear_logprob(h, w, t, coefficient=coefficient if promise else None) * coefficient).sum()


WAYS = {
    "policy step": (
        POLICY,
        {
            "whole logits": naive_policy,
            "Liger, its chunks 2048 x 4096": liger_policy,
            "Liger, chunks 512 x 8192": lambda *a: liger_policy(*a, chunk=(512, 8192)),
            "linear_logprob + grpo_loss, chunks 512 x 8192": our_policy,
            "linear_logprob + grpo_loss, chunks 2048 x 4096": lambda *a: our_policy(*a, chunk=(2048, 4096)),
        },
    ),
    "fine-tuning step": (
        FINE_TUNING,
        {
            "whole logits": naive_tuning,
            "torch linear_cross_entropy": torch_tuning,
            "linear_logprob": lambda *a: our_tuning(*a, promise=False),
            "linear_logprob, coefficient": our_tuning,
        },
    ),
    "growth": (
        GROWTH,
        {f"{way}, T {T}": (way, T) for way in ("linear_logprob", "linear_logprob, coefficient") for T in (8192, 65536)},
    ),
}


def measure(section, name, threads):
    """In this process: one way of one section -> {loss, peak_mib, seconds}."""
    import torch

    torch.set_num_threads(threads)
    sizes, ways = WAYS[section]
    way = ways[name]
    if section == "growth":
        sizes, promise = sizes | {"T": way[1]}, "coefficient" in way[0]
        way = lambda *a: our_tuning(*a, promise=promise)  # noqa: E731
    warm = inputs(64, 64, 128)
    way(*warm).backward()  # imports and thread pools are not the loss's memory
    given = inputs(**sizes)
    leaves = given[:2]
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    loss = way(*given)
    loss.backward()
    peak = status("VmHWM") - before - sum(4 * leaf.numel() for leaf in leaves)
    for leaf in leaves:
        leaf.grad = None
    start = time.perf_counter()
    way(*given).backward()
    return {"loss": float(loss), "peak_mib": peak / 2**20, "seconds": time.perf_counter() - start}


def separately(section, name, threads, memory):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": str(threads)}
    if memory:
        env["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    command = [sys.executable, __file__, section, name, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def wrapper_allocations():
    """Peak bytes that the Triton path allocates at the 3B model's size, on tensors without memory and with kernels left out."""
    import torch
    from nb_kernels import linear_logprob_triton as path
    from nb_kernels.linear_logprob import Shard

    from tests.kernels.allocations import LiveBytes

    class Launch:
        def __getitem__(self, grid):
            return lambda *arguments, **options: None

    path.row_statistics = path.target_logits = path.logit_gradients = Launch()
    path._accumulate = lambda out, a, b: None
    V, H, rows = 166144, 2560, []
    for T in (8192, 65536, 262144):
        hidden = torch.empty(T, H, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(V, H, dtype=torch.bfloat16, device="meta")
        targets, g = torch.empty(T, dtype=torch.int64, device="meta"), torch.empty(T, device="meta")
        shard = Shard(1.0, 0, V, None, True)
        with LiveBytes() as forward:
            _, ent, m, l = path.forward(hidden, weight, targets, None, True, shard)
        with LiveBytes() as backward:
            dhidden, dweight = path.backward(hidden, weight, targets, None, m, l, ent, g, g, shard, True, True)
        gradients = sum(x.numel() * x.element_size() for x in (dhidden, dweight))
        rows.append({"T": T, "forward_mib": forward.peak / 2**20, "backward_mib": (backward.peak - gradients) / 2**20})
    return rows


def run(threads=2, repeats=3):
    """All sections -> {section: {way: result}}."""
    results = {}
    for section, (_, ways) in WAYS.items():
        results[section] = {name: separately(section, name, threads, memory=True) for name in ways}
        for name in list(ways) * (0 if section == "growth" else repeats):
            result = results[section][name]
            if "error" not in result:
                again = separately(section, name, threads, memory=False)
                result["seconds"] = min(again.get("seconds", float("inf")), result["seconds"])
    results["triton wrapper"] = wrapper_allocations()
    return results


def markdown(results):
    """Tables of `run`'s results."""
    lines = []
    for section, (sizes, ways) in WAYS.items():
        lines += [f"\n{section}, forward + backward, float32, {', '.join(f'{k} {v}' for k, v in sizes.items())}", ""]
        lines += ["| way | peak above inputs and gradients, MiB | time, s | loss |", "| --- | --- | --- | --- |"]
        for name in ways:
            r = results[section][name]
            cells = f"{r['error']} | |" if "error" in r else f"{r['peak_mib']:.1f} | {r['seconds']:.2f} | {r['loss']:.6f}"
            lines.append(f"| {name} | {cells} |")
    lines += ["\nTriton path's own allocations, bf16, V 166144, H 2560, entropy on, above inputs and gradients", ""]
    lines += ["| T | forward, MiB | backward, MiB |", "| --- | --- | --- |"]
    lines += [f"| {r['T']} | {r['forward_mib']:.0f} | {r['backward_mib']:.0f} |" for r in results["triton wrapper"]]
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
