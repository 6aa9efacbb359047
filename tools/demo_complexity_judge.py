"""A small model learns to name the time complexity of programs: labelled programs, fine-tuning, held-out evaluation.

    python tools/demo_complexity_judge.py [--seed 1] [--folder runs/demo-complexity-judge] [--steps N] [--fast]

    1  programs   synthesize_complexity: programs of all classes; held-out ones have templates that training never sees
    2  sft        sft_complexity_judge from scratch, 1.4 million parameters, a vocabulary of a thousand tokens
    3  evaluate   eval_complexity_judge: accuracy, coverage, agreement with the empirical witness, confusion table

About five minutes on 2 cores. Each stage is a run folder in FOLDER/seed-N; what is finished is not done again. The exit code is
1 when held-out accuracy is not well above always naming the most frequent class. --fast only shows that everything runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_nb.run import write_summary
from tools.bench_train import free_port
from tools.demo_files import train_tokenizer

ROOT = Path(__file__).parents[1]
VOCABULARY, PACK = 1024, 1024  # entries; tokens of a pack
MODEL = [
    "model=tiny", "model.num_layers=4", "model.hidden_size=160", "model.num_attention_heads=5", "model.num_query_groups=5",
    "model.head_dim=32", "model.ffn_hidden_size=448", f"model.vocab_size={VOCABULARY}",
    f"model.max_position_embeddings={PACK}",
]  # fmt: skip
TOLD = ("accuracy", "coverage", "agreement", "accuracy_seen", "within_one_rank", "majority_class", "empirical_accuracy")
MARGIN = 0.2  # by which held-out accuracy must be above the most frequent class


def run(log: Path, command: list[str]) -> float:
    """Run a command with its output in `log`; seconds it took. CalledProcessError when it fails, its last lines shown."""
    began = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline"}
    with log.open("a") as file:
        code = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, stdout=file, stderr=file).returncode
    if code:
        print("\n".join(log.read_text(errors="replace").splitlines()[-8:]) + f"\n{log} tells more", file=sys.stderr)
        raise subprocess.CalledProcessError(code, command)
    return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/demo-complexity-judge"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=900, help="updates of two packs (default 900)")
    parser.add_argument("--fast", action="store_true", help="a smoke test; shows nothing and does not have to")
    parser.add_argument("--isolation", choices=("bubblewrap", "none"), default="bubblewrap", help="of the programs measured")
    given = parser.parse_args()
    began, folder = time.monotonic(), (given.folder / f"seed-{given.seed}").absolute()
    steps = 12 if given.fast else given.steps
    counts = (300, 24, 36) if given.fast else (12000, 120, 240)
    folder.mkdir(parents=True, exist_ok=True)
    shared = [f"runs_dir={folder}", f"seed={given.seed}"]
    seconds = {}

    print("1/3  labelled programs and a tokenizer", flush=True)
    programs = folder / "programs" / "programs"
    if not (folder / "programs" / "summary.json").exists():
        words = [f"{name}={count}" for name, count in zip(("train", "seen", "heldout"), counts)]
        command = ["-m", "megatron_nb.synthesize_complexity", "name=programs", "extras=1", *words, *shared]
        seconds["programs"] = run(folder / "programs.log", command)
    if not (folder / "tokenizer" / "tokenizer.json").exists():
        rows = [json.loads(line)["messages"] for line in (programs / "train.jsonl").read_text().splitlines()[:3000]]
        answers = [messages[1]["content"] for messages in rows]
        train_tokenizer(folder / "tokenizer", [messages[0]["content"] for messages in rows] + answers, VOCABULARY)

    print("2/3  supervised fine-tuning", flush=True)
    if not (folder / "judge" / "summary.json").exists():
        seconds["judge"] = run(folder / "judge.log", [
            "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
            "-m", "megatron_nb.sft", "--config-name", "sft_complexity_judge", *MODEL, "parallel=cpu2", "name=judge", *shared,
            f"data.sources.programs.path={programs}/train.jsonl", f"data.validation.heldout.path={programs}/heldout.jsonl",
            f"data.tokenizer={folder}/tokenizer", f"data.cache_dir={folder}/cache", "data.workers=0", "data.loader_workers=0",
            f"seq_len={PACK}", "global_batch_size=2", f"num_steps={steps}", f"validate_every={steps}",
            f"checkpoint.every={steps}", f"optimizer.warmup_steps={steps // 20}", "optimizer.lr=2.5e-3",
            "optimizer.min_lr=1e-4", "log.wandb=off", "log.every=20",
        ])  # fmt: skip

    print("3/3  evaluation", flush=True)
    out = folder / "evaluation"
    seconds["evaluation"] = run(folder / "evaluation.log", [
        "tools/eval_complexity_judge.py", str(folder / "judge"), "--programs", str(programs), "--out", str(out),
        "--seed", str(given.seed), "--max-tokens", "96", "--answers", "3", "--isolation", given.isolation,
        *(["--limit", "24", "--empirical", "2"] if given.fast else ["--limit", "180", "--empirical", "36"]),
    ])  # fmt: skip
    told = json.loads((out / "summary.json").read_text())
    print((out / "confusion.txt").read_text())
    for key in TOLD:
        print(f"{key:<20} {told[key]:.3f}")
    shown = told["accuracy"] >= told["majority_class"] + MARGIN
    told |= {f"seconds_{name}": value for name, value in seconds.items()}
    write_summary(folder, **{**told, "seed": given.seed, "wall_s": time.monotonic() - began, "shown": shown})
    print(f"held-out accuracy {told['accuracy']:.2f}, most frequent class {told['majority_class']:.2f}; {folder}/summary.json")
    return 0 if shown or given.fast else 1


if __name__ == "__main__":
    sys.exit(main())
