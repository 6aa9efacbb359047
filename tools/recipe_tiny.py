"""The whole recipe on a laptop's CPU: one small model through synthesis, fine-tuning, reward models, all RL stages and export.

    python tools/recipe_tiny.py [--seed 1] [--folder runs/recipe-tiny] [--fast]
    python tools/recipe_tiny.py --seeds 3
    python tools/recipe_tiny.py --model smollm2 --minutes 120

    1  data     one tokenizer, a start that copies, rows and prompts of all stages, a wiki (tools/recipe_tiny_data.py)
    2  chain    hydra_conf/cascade_tiny.yaml by megatron_nb.cascade, evaluated on held-out questions after every stage
    3  report   report.html of everything; the exported model answers in transformers, beside the one before RL

At most 25 minutes a seed on 2 quiet cores. What is done is not done again; what was killed goes on. The exit code is 1 when the
held-out loss does not fall in SFT, and with --seeds when a stage does not improve beyond two standard errors over the seeds.
--fast takes a few minutes and only shows that everything runs. --model smollm2 puts SmolLM2-135M in the small model's place
(tools/recipe_tiny_smollm2.py): hours; --minutes saves and leaves after so many (exit code 85), and the same command goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")

from megatron_nb import cascade
from megatron_nb.chain import CascadeConfig
from megatron_nb.config import compose
from megatron_nb.run import write_summary
from megatron_nb.training.signals import REQUEUE_EXIT
from tools import recipe_tiny_smollm2
from tools.demo_files import end_with, exit_code
from tools.recipe_tiny_report import Change, ask_both, changes_of, flat, improved, over_seeds, scores, table

ROOT = Path(__file__).parents[1]
FAST = {"train": 60, "rl": 16, "heldout": 12, "limit": 40}  # most of words of that name with --fast
FAST_STEPS, FAST_SFT = 2, 80  # steps: a model that says nothing gives no pairs to prefer


def prepare(folder: Path, seed: int, model: str) -> None:
    """Data of a seed, in a process of its own: the chain's stages are copies of this one, which must have no threads."""
    if not (folder / "data" / "start" / "config.json").exists():
        command = [sys.executable, "tools/recipe_tiny_data.py", "--out", str(folder.absolute() / "data"), "--seed", str(seed)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if model == "smollm2":
        recipe_tiny_smollm2.place_model(folder / "data")


def chain_of(folder: Path, seed: int, fast: bool, model: str = "tiny") -> CascadeConfig:
    """The chain of a seed."""
    config = compose(CascadeConfig, "cascade_tiny", [f"runs_dir={folder.parent}", f"name={folder.name}"])
    config.words.append(f"seed={seed}")
    if model == "smollm2":
        recipe_tiny_smollm2.adapt(config)
    if fast:
        for stage in config.stages.values():
            steps = FAST_SFT if stage.stage == "sft" else FAST_STEPS
            stage.words, stage.gate = [shortened(word, steps) for word in stage.words], None
    return config


def shortened(word: str, steps: int) -> str:
    """A word of a stage for a smoke test: numbers that mean work, cut."""
    key, _, value = word.partition("=")
    if key in ("validate_every", "evaluation.every", "checkpoint.every", "num_steps"):
        return f"{key}={min(int(value), steps)}"
    if key == "optimizer.warmup_steps":
        return f"{key}={min(int(value), steps - 1)}"
    return f"{key}={min(int(value), FAST[key])}" if key in FAST else word


@contextlib.contextmanager
def told_to(log: Path) -> Iterator[TextIO]:
    """Everything that this process and its copies print goes to a file; gives the screen."""
    sys.stdout.flush()
    with open(log, "a") as file, os.fdopen(os.dup(1), "w", buffering=1) as screen, os.fdopen(os.dup(2), "w") as errors:
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield screen
        finally:
            sys.stdout.flush()
            os.dup2(screen.fileno(), 1)
            os.dup2(errors.fileno(), 2)


def run_chain(config: CascadeConfig, folder: Path) -> None:
    """All stages, a line for each on the screen. SystemExit with the end of the log when one fails."""
    log = folder / "chain.log"
    try:
        with told_to(log) as screen:
            handler = logging.StreamHandler(screen)
            handler.setFormatter(logging.Formatter("     %(message)s"))
            handler.addFilter(lambda record: " begins" not in record.getMessage())
            cascade.log.addHandler(handler)
            cascade.log.setLevel(logging.INFO)
            try:
                cascade.run(config)
            finally:
                cascade.log.removeHandler(handler)
    except SystemExit as end:
        if end.code == REQUEUE_EXIT:
            print(f"saved and left; the same command goes on: {folder}", flush=True)
        elif end.code:
            lines = [line for line in log.read_text(errors="replace").splitlines() if not re.match(r"step +\d", line)]
            print("\n".join(lines[-12:]) + f"\n{log} tells more; the same command goes on", file=sys.stderr)
        raise


def one_seed(folder: Path, seed: int, fast: bool, model: str) -> dict[str, Change]:
    """Everything of one seed; the changes that its stages made."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, in {folder}\n1/3  data, tokenizer, wiki", flush=True)
    prepare(folder, seed, model)
    print("2/3  the chain; its log is chain.log", flush=True)
    run_chain(chain_of(folder, seed, fast, model), folder)
    print("3/3  report, and questions to the model before RL and after", flush=True)
    found = changes_of(folder)
    subprocess.run([sys.executable, "tools/report.py", str(folder.absolute())], check=True, cwd=ROOT)
    print(f"\n{table(found, 'over held-out questions')}\n\n{scores(folder)}\n\n{ask_both(folder)}", flush=True)
    seconds = {f"seconds_{row['name']}": row["seconds"] for row in json.loads((folder / "ledger.json").read_text())["stages"]
               if row["seconds"] is not None}  # fmt: skip
    write_summary(folder, seed=seed, wall_s=time.monotonic() - began, shown=improved(found, ("sft_short", "sft_long")),
                  **flat(found), **seconds)  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="default runs/recipe-tiny, with -fast where it applies")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="this many, one after the other; errors are then over seeds")
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny", help="smollm2 takes hours on two cores")
    parser.add_argument("--minutes", type=float, help="save and leave after so long; the same command goes on")
    parser.add_argument("--fast", action="store_true", help="a smoke test of a few minutes; shows nothing")
    options = parser.parse_args()
    named = {"tiny": "recipe-tiny", "smollm2": "recipe-135m"}[options.model] + ("-fast" if options.fast else "")
    folder = options.folder or Path("runs") / named
    if options.minutes:  # as a scheduler would: the stage that runs saves and leaves
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGTERM))
        signal.setitimer(signal.ITIMER_REAL, options.minutes * 60)
    seeds, began = range(options.seed, options.seed + options.seeds), time.monotonic()
    runs = [one_seed(folder / f"seed-{seed}", seed, options.fast, options.model) for seed in seeds]
    found = runs[0]
    if len(runs) > 1:
        found = over_seeds(runs)
        print(f"\n{table(found, f'over {len(seeds)} seeds')}")
    must = [name for name in found if len(runs) > 1 or name.startswith("sft")]
    missed = [name for name in must if not improved(found, (name,))]
    write_summary(folder, seed=seeds[0], wall_s=time.monotonic() - began, shown=not missed, **flat(found))
    return exit_code(missed, options.fast)


if __name__ == "__main__":
    end_with(main)
