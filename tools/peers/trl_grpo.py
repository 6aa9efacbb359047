"""TRL's GRPOTrainer on the benchmark's model and prompts; writes one JSON line per step. Run by tools/bench_rl.py.

Its best settings for this work, found in its source and by trying:
  no reference model (beta 0), no second pass for old log-probs (one generation batch is one update), no gradient
  checkpointing (its default is on), its fused head, SDPA attention, transformers' static-batch generate with a KV cache
  (continuous batching is slower here), the micro-batch given by the bench.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.bench_rl_work import distinct_words


class Timed(GRPOTrainer):
    """The trainer with clocks around generation and scoring."""

    seconds: dict[str, float] = {}
    answer_tokens = 0

    def _generate(self, prompts):
        begun = time.perf_counter()
        found = super()._generate(prompts)
        self.seconds["generation"] = time.perf_counter() - begun
        self.answer_tokens = sum(map(len, found[1]))
        return found

    def _calculate_rewards(self, *args, **kwargs):
        begun = time.perf_counter()
        found = super()._calculate_rewards(*args, **kwargs)
        self.seconds["scoring"] = time.perf_counter() - begun
        return found


class Clock(TrainerCallback):
    """Seconds of every step, generation to update, and the peak memory of the process."""

    def __init__(self, path: str):
        self.path, self.begun, self.trainer = path, 0.0, None

    def on_step_begin(self, *args, **kwargs):
        self.begun = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        seconds = time.perf_counter() - self.begun
        parts = self.trainer.seconds
        row = {
            "seconds": seconds,
            **parts,
            "training": seconds - sum(parts.values()),
            "answer_tokens": self.trainer.answer_tokens,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")


def reward(completions, **kwargs) -> list[float]:
    return [distinct_words(messages[0]["content"]) for messages in completions]


def main(settings: dict) -> None:
    """settings: model, prompts (file of {"prompt": messages}), out, answers, group, tokens, steps, micro_batch, lr."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    answers, micro = settings["answers"], settings["micro_batch"]
    config = GRPOConfig(
        output_dir=settings["out"] + ".trl", use_cpu=True, bf16=False, fp16=False, max_steps=settings["steps"], seed=1,
        num_generations=settings["group"], max_completion_length=settings["tokens"], num_iterations=1, beta=0.0,
        per_device_train_batch_size=micro, gradient_accumulation_steps=answers // micro, shuffle_dataset=False,
        temperature=1.0, top_p=1.0, top_k=0, generation_kwargs={"min_new_tokens": settings["tokens"]},  # no answer ends early
        loss_type="dapo", epsilon=0.2, epsilon_high=0.28, scale_rewards="group", gradient_checkpointing=False,
        learning_rate=settings["lr"], lr_scheduler_type="constant", weight_decay=0.1, adam_beta2=0.95, max_grad_norm=1.0,
        report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True, model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    with open(settings["prompts"]) as file:
        data = Dataset.from_list([json.loads(line) for line in file])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    clock = Clock(settings["out"])
    clock.trainer = Timed(
        model=settings["model"], reward_funcs=reward, args=config, train_dataset=data, processing_class=tokenizer,
        callbacks=[clock],
    )  # fmt: skip
    clock.trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
