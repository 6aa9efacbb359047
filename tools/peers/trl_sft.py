"""TRL's SFTTrainer on the benchmark's model and rows; writes one JSON line per step. Run by tools/bench_train.py."""

import json
import os
import resource
import sys
import time

import torch
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    """Seconds of every update, and what the trainer had in its hands."""

    def __init__(self, path: str):
        self.path, self.begun = path, 0.0

    def on_step_begin(self, *args, **kwargs):
        self.begun = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        seconds = time.perf_counter() - self.begun
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if int(os.environ.get("RANK", "0")) == 0:
            with open(self.path, "a") as file:
                file.write(json.dumps({"seconds": seconds, "peak_bytes": peak}) + "\n")


def main(model: str, rows: str, out: str, length: int, steps: int, lr: float) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    config = SFTConfig(
        output_dir=out + ".trl", use_cpu=True, bf16=False, fp16=False, max_steps=steps, learning_rate=lr, packing=True,
        max_length=length, per_device_train_batch_size=1, gradient_accumulation_steps=1, gradient_checkpointing=False,
        lr_scheduler_type="constant", report_to="none", save_strategy="no", logging_steps=1, dataset_text_field="text", seed=1,
        model_init_kwargs={"dtype": "float32"}, disable_tqdm=True, weight_decay=0.1, adam_beta2=0.95, max_grad_norm=1.0,
    )  # fmt: skip
    data = load_dataset("json", data_files=rows, split="train")
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = SFTTrainer(model, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Clock(out)])
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6]))
