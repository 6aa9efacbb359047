"""The planner beside step times that others published: `python tools/plan_published.py [--fit]`.

Rows of plan_published.yaml, each predicted with the `published` constants. --fit finds the constants that no data sheet gives
(speed of products and of attention inside a step, what of tensor-parallel traffic is hidden) on the rows marked `fit` alone.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel.topology import ParallelConfig
from megatron_nb.training import memory
from tools.plan_layouts import Candidate
from tools.plan_rollout import Rollouts, plan_rollouts
from tools.plan_time import Clock, Software, Work, device_named, software_named

PUBLISHED = Path(__file__).with_name("plan_published.yaml")


@dataclass(frozen=True)
class Published:
    """One measured layout."""

    name: str
    source: str
    model: ModelConfig
    layout: ParallelConfig
    gpus: int
    work: Work
    seconds: float
    fp8: bool
    fit: bool

    def predicted(self, software: Software) -> float:
        if self.fp8:
            software = replace(software, matmul=software.matmul_fp8)
        return Clock(self.model, self.layout, self.gpus, self.work, device_named("h100"), software).step().total


def published() -> list[Published]:
    table, rows = yaml.safe_load(PUBLISHED.read_text()), []
    letters = {"tensor": "tp", "pipeline": "pp", "virtual_pipeline": "vpp", "context": "cp"}
    for row in table["layouts"]:
        model = ModelConfig(**table["models"][row["model"]])
        sizes = {name: row[name] for name in letters if name in row}
        work = Work(row["length"], row["global_batch"], row.get("micro_batch", 1))
        words = [row["model"], f"{row['length'] // 1024}k", f"{row['gpus']} GPUs"]
        name = " ".join([*words, *(f"{letters[key]}{size}" for key, size in sizes.items()), *["fp8"] * row.get("fp8", False)])
        layout = ParallelConfig(**sizes, communication="nccl")
        seconds = row.get("seconds") or counted_flops(model, work) / row["gpus"] / (row["tflops"] * 1e12)
        marks = row.get("fp8", False), row.get("fit", False)
        rows.append(Published(name, table["sources"][row["source"]], model, layout, row["gpus"], work, seconds, *marks))
    return rows


def published_rollouts() -> list[tuple[str, float, float, bool]]:
    """(name, measured seconds, planned seconds, whether fitted on) of each step of reinforcement learning."""
    table, device, rows = yaml.safe_load(PUBLISHED.read_text()), device_named("h100"), []
    for row in table["rollouts"]:
        model, own = ModelConfig(**table["models"][row["model"]]), row.get("engine_gpus", 0)
        layout = ParallelConfig(tensor=row.get("tensor", 1), pipeline=row["pipeline"], communication="nccl")
        work = Work(4096, 2048 * row["row_tokens"] // 4096, document=row["row_tokens"])
        step = Clock(model, layout, row["gpus"], work, device, software_named("published")).step()
        held = memory.plan(model, layout, row["gpus"], work.length)
        training = Candidate(layout, work, layout.data_size(row["gpus"]), held, step, 0.0, 0.0)
        batch = Rollouts(64, 32, 100, row["row_tokens"] - 100, 4096 - 100, staleness=int(own > 0),
                         engine="server" if own else "native", engine_gpus=own, engine_tensor=row["engine_tensor"])  # fmt: skip
        planned = plan_rollouts(model, batch, training, row["gpus"], device)
        name = f"RL {row['model']} {row['gpus']} GPUs" + (f" + {own} that sample" if own else "")
        rows.append((name, row["seconds"], planned.step_s, row.get("fit", False)))
    return rows


def counted_flops(model: ModelConfig, work: Work) -> float:
    """Operations of a step as NeMo counts them: attention by all pairs, twice the causal ones."""
    return model.train_flops(work.tokens, 2 * work.squared_lengths)


def fit(rows: list[Published], rounds: int = 8) -> Software:
    """`published` with the constants that make the marked rows' relative errors least, in squares (Gauss-Newton)."""
    start = software_named("published")

    def software(values) -> Software:
        matmul, fp8, exposed, attention = (float(value) for value in values)
        backward = start.attention_backward / start.attention_forward * attention
        return replace(start, matmul=matmul, matmul_fp8=fp8, tensor_exposed=exposed, attention_forward=attention,
                       attention_backward=backward)  # fmt: skip

    def errors(values) -> np.ndarray:
        return np.array([row.predicted(software(values)) / row.seconds - 1 for row in rows if row.fit])

    values = np.array([start.matmul, start.matmul_fp8, start.tensor_exposed, start.attention_forward])
    for _ in range(rounds):
        here = errors(values)
        slopes = np.stack([(errors(values + step) - here) / 1e-4 for step in np.eye(len(values)) * 1e-4], axis=1)
        values = (values - np.linalg.lstsq(slopes, here)[0]).clip(0.05, [1.0, 2.0, 1.0, 1.0])
    return software(values)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants on the marked rows first")
    options = parser.parse_args(words)
    rows, software = published(), software_named("published")
    if options.fit:
        software = fit(rows)
        for name in ("matmul", "matmul_fp8", "tensor_exposed", "attention_forward", "attention_backward"):
            print(f"{name}: {getattr(software, name):.3f}")
    print(f"{'layout':58} {'measured s':>10} {'planned s':>10} {'error':>7}")
    told = [(row.name, row.seconds, row.predicted(software), row.fit) for row in rows] + published_rollouts()
    for name, measured, planned, fitted in told:
        print(f"{name:58} {measured:10.2f} {planned:10.2f} {planned / measured - 1:+7.1%}{'  fitted' * fitted}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
