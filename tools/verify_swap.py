"""Swap consistency earns its place: the same pair-wise reward model trained with and without the regulariser.

    python tools/verify_swap.py --data pairs.jsonl.gz [--out runs/verify_swap]

Of a pair's history the last question is kept. For each of three seeds a third of the prompts is held out (together they
cover every row once). A small model is trained from scratch on the rest, with lambda 1 and with lambda 0, everything else
equal (both see both orders of every pair); flip rate and accuracy on the held-out pairs stand side by side. Claims: flip rate
at most half, at most 1 point of accuracy lost.
Prints a table, writes OUT/summary.json, and ends with 1 when a claim does not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_nb.data.chatml import TEMPLATE
from megatron_nb.data.preferences import Preference, read

SEEDS = 3
ARMS = {"with": ["loss.swap=1"], "without": ["loss.swap=0"]}  # lambda: the upper end of the recipe's range, and none
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 1024
LONGEST = 800  # characters of the last question and both answers: what two cores can train on in minutes
MODEL = [
    "model=tiny", f"model.vocab_size={VOCABULARY}",
    "model.num_layers=4",  # two layers do not find out which answer a word stands in, and learn the pairs by heart
]  # fmt: skip
SETTINGS = [  # the weight decay is high because a thousand pairs are learnt by heart otherwise
    "parallel=cpu1", "context=2k", "seq_len=4096", "global_batch_size=32", "optimizer.lr=2e-3", "optimizer.min_lr=2e-5",
    "optimizer.weight_decay=4", "log.wandb=off", "log.every=10", "validate_every=100000", "checkpoint.every=100000",
]  # fmt: skip


def short_rows(data: str) -> list[dict]:
    """The usable rows with the last question of their history, where it and the answers have at most LONGEST characters."""
    rows = []
    for _, row in read(data, "pairs"):
        if not isinstance(row, Preference):
            continue
        last = row.conversation.messages[-1]
        if len(last["content"]) + len(row.chosen) + len(row.rejected) <= LONGEST:
            prompt = [{"role": last["role"], "content": last["content"]}]
            rows.append({"prompt": prompt, "chosen": row.chosen, "rejected": row.rejected, "tie": row.tie})
    return rows


def fold_of(row: dict) -> int:
    """The seed whose model does not see this prompt."""
    return hashlib.sha256(json.dumps(row["prompt"]).encode()).digest()[0] % SEEDS


def train_tokenizer(rows: list[dict], folder: Path) -> None:
    """A byte-level BPE of VOCABULARY tokens, on the texts of the rows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((text for row in rows for text in (row["chosen"], row["rejected"])), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def start(seed: int, arm: str, out: Path, steps: int) -> subprocess.Popen:
    """One training run in a process of its own, on one core."""
    files = [f"data.sources.train.path={out}/train-{seed}.jsonl", f"data.validation.heldout.path={out}/heldout-{seed}.jsonl"]
    run = [f"runs_dir={out}", f"name=seed{seed}-{arm}", f"seed={seed}", f"num_steps={steps}", f"data.tokenizer={out}/tokenizer"]
    words = [*MODEL, *SETTINGS, *files, *run, *ARMS[arm]]
    command = [sys.executable, "-m", "megatron_nb.reward_model", "--config-name", "reward_pairwise", *words]
    log = (out / f"seed{seed}-{arm}.log").open("w")
    return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def train_all(out: Path, seeds: list[int], steps: int) -> dict[tuple[int, str], dict]:
    """summary.json of every run; the two arms of a seed run beside each other."""
    found = {}
    for seed in seeds:
        running = {arm: start(seed, arm, out, steps) for arm in ARMS}
        for arm, process in running.items():
            if process.wait():
                raise SystemExit(f"seed {seed} {arm} ended with {process.returncode}: see {out}/seed{seed}-{arm}.log")
            found[seed, arm] = json.loads((out / f"seed{seed}-{arm}" / "summary.json").read_text())
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="preference rows: a file, a folder or a glob")
    parser.add_argument("--out", type=Path, default=Path("runs/verify_swap"), help="folder for the runs and summary.json")
    parser.add_argument("--steps", type=int, default=300, help="updates of 32 pairs (default 300)")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(SEEDS)), help="which seeds (default all three)")
    given = parser.parse_args(argv)
    began = time.time()
    rows = short_rows(given.data)
    given.out.mkdir(parents=True, exist_ok=True)
    train_tokenizer(rows, given.out / "tokenizer")
    for seed in given.seeds:
        for name, heldout in (("train", False), ("heldout", True)):
            kept = [row for row in rows if (fold_of(row) == seed) == heldout]
            (given.out / f"{name}-{seed}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    runs = train_all(given.out, given.seeds, given.steps)
    summary = report(runs, given.seeds)
    summary |= {"rows": len(rows), "seed": given.seeds[0], "wall_s": round(time.time() - began, 1)}
    (given.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    halved = summary["flip_rate_with"] <= summary["flip_rate_without"] / 2
    kept = summary["accuracy_with"] >= summary["accuracy_without"] - 0.01
    print(f"flip rate at most half: {halved}; at most 1 point of accuracy lost: {kept}; {summary['wall_s']:.0f} s")
    return 0 if halved and kept else 1


def report(runs: dict[tuple[int, str], dict], seeds: list[int]) -> dict[str, float]:
    """Print the table; the means over the seeds."""
    names = ("flip_rate", "accuracy", "position_bias", "loss", "ece")
    print(f"{'seed':<6}" + "".join(f"{name + ' ' + arm:>24}" for name in names[:3] for arm in ARMS))
    for seed in seeds:
        values = [runs[seed, arm][f"heldout_{name}_after"] for name in names[:3] for arm in ARMS]
        print(f"{seed:<6}" + "".join(f"{value:>24.4f}" for value in values))
    after = {(name, arm): [runs[seed, arm][f"heldout_{name}_after"] for seed in seeds] for name in names for arm in ARMS}
    means = {f"{name}_{arm}": mean(values) for (name, arm), values in after.items()}
    print(f"{'mean':<6}" + "".join(f"{means[f'{name}_{arm}']:>24.4f}" for name in names[:3] for arm in ARMS))
    return means


if __name__ == "__main__":
    sys.exit(main())
