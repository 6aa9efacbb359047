"""Which layout to train a model in: memory, time, tokens per second and MFU of every legal one, and the best.

    python tools/plan.py --model dense_3b --context 262144 --gpus 64 [--json]
    python tools/plan.py --model dense_3b --context 32768 --gpus 16 --rl --answer-tokens 6000 [--engine server --engine-gpus 8]

--model names a file of hydra_conf/model. A step is --global-batch packs of --context tokens (4.2 million tokens unless given),
each one document unless --document says how long documents are: attention costs by their squares. Tensor, context, pipeline,
interleaved stages, micro-batch and recomputation vary; what is left over is data parallel. Memory is training/memory.py's
plan of the fullest rank (held against counted bytes by tools/plan_measure.py), time that of tools/plan_time.py.

--rl adds a step of reinforcement learning: sampling, the engine's cache, scoring, log-probabilities, training on what was
sampled, and the way of the weights. --context is then the longest row (update.pack_tokens).

What is believed stands in tools/plan_constants.yaml: --software published was fitted on step times that others published and
is within 7 % of the seventeen it was not fitted on (python tools/plan_published.py); --software ours, the default, is the same
arithmetic for this repository's kernels, whose speed on a GPU has not been measured: assumptions, marked as such there.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

import hydra_conf
from megatron_nb.model.shape import ModelConfig
from megatron_nb.training.memory import RESERVE
from tools.plan_layouts import MICRO_BATCHES, Candidate, best, candidates
from tools.plan_rollout import RolloutPlan, Rollouts, plan_rollouts
from tools.plan_time import CONSTANTS, Device, Software, Work, device_named, flops_by_kind, software_named

STEP_TOKENS = 4_194_304  # of the recipe's SFT stages
MODELS = Path(hydra_conf.__file__).parent / "model"


def model_named(name: str) -> ModelConfig:
    """The model section of hydra_conf/model/NAME.yaml; ValueError names what there is."""
    path = MODELS / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(sorted(path.stem for path in MODELS.glob("*.yaml")))
        raise ValueError(f"--model {name}: hydra_conf/model has {known}; write a file there for another one")
    return ModelConfig.from_dict(yaml.safe_load(path.read_text()))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dense_3b")
    parser.add_argument("--context", type=int, required=True, help="tokens of a pack")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs that train")
    parser.add_argument("--global-batch", type=int, help="packs of a step")
    parser.add_argument("--document", type=int, help="tokens of a document, on average")
    parser.add_argument("--device", default="h100", help="of plan_constants.yaml")
    parser.add_argument("--software", default="ours", choices=("ours", "published"))
    parser.add_argument("--show", type=int, default=12, help="layouts in the table")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    rl = parser.add_argument_group("reinforcement learning")
    rl.add_argument("--rl", action="store_true")
    rl.add_argument("--prompts", type=int, default=64)
    rl.add_argument("--group", type=int, default=8)
    rl.add_argument("--prompt-tokens", type=int, default=512, help="on average")
    rl.add_argument("--answer-tokens", type=int, default=4096, help="on average")
    rl.add_argument("--max-answer", type=int, help="limit of an answer; what the pack leaves unless given")
    rl.add_argument("--engine", default="native", choices=("native", "server"))
    rl.add_argument("--engine-gpus", type=int, default=0, help="GPUs of the servers, beside those that train")
    rl.add_argument("--engine-tensor", type=int, default=1, help="GPUs of one engine")
    rl.add_argument("--staleness", type=int, default=0)
    return parser


def work_of(options: argparse.Namespace) -> tuple[Work, Rollouts | None]:
    """What a step holds. ValueError for sizes that cannot be."""
    counts = ("context", "gpus", "global_batch", "document", "prompts", "group", "prompt_tokens", "answer_tokens",
              "max_answer", "engine_tensor", "show")  # fmt: skip
    for name in counts:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if options.document and options.document > options.context:
        raise ValueError(f"--document {options.document} must be at most --context {options.context}: a pack holds it whole")
    if not options.rl:
        packs = options.global_batch or max(1, STEP_TOKENS // options.context)
        return Work(options.context, packs, document=options.document), None
    longest = options.max_answer or options.context - options.prompt_tokens
    if options.prompt_tokens + longest > options.context or longest < 1:
        raise ValueError(
            f"--prompt-tokens {options.prompt_tokens} + --max-answer {longest} must be at most --context {options.context}: "
            "a row holds the prompt and its answer"
        )
    names = ("prompts", "group", "prompt_tokens", "answer_tokens")
    engine = ("engine", "engine_gpus", "engine_tensor", "staleness")
    given = {name: getattr(options, name) for name in names + engine}
    batch = Rollouts(longest=longest, **given)
    row = options.prompt_tokens + options.answer_tokens
    packs = max(1, -(-batch.answers * row // options.context))
    return Work(options.context, options.global_batch or packs, document=min(row, options.context)), batch


def as_dict(one: Candidate) -> dict:
    p = one.layout
    return {
        "tensor": p.tensor, "context": p.context, "pipeline": p.pipeline, "virtual_pipeline": p.virtual_pipeline,
        "data": one.data, "recompute": p.recompute, "micro_batch": one.work.micro_batch,
        "micro_batches": one.step.micro_batches, "memory_bytes": {**asdict(one.memory), "total": one.memory.total},
        "step_s": one.step.total, "seconds": one.step.seconds, "traffic_bytes": one.step.traffic,
        "tokens_per_s_gpu": one.tokens_per_s, "mfu": one.mfu, "words": one.words,
    }  # fmt: skip


HEAD = " tp   cp  pp vpp   dp  mb recompute     GB   step s  tok/s/GPU    MFU  lost to"


def table(found: list[Candidate]) -> str:
    lines = [HEAD]
    for one in found:
        p, parts = one.layout, one.step.seconds
        worst = sorted((name for name in LOSSES if parts[name] > 0.02 * one.step.total), key=lambda name: -parts[name])[:2]
        lost = ", ".join(f"{name} {parts[name] / one.step.total:.0%}" for name in worst)
        sizes = f"{p.tensor:>3}{p.context:>5}{p.pipeline:>4}{p.virtual_pipeline:>4}{one.data:>5}{one.work.micro_batch:>4}"
        speed = f"{one.step.total:>9.2f}{one.tokens_per_s:>11,.0f}{one.mfu:>7.1%}"
        lines.append(f"{sizes} {p.recompute:<9}{one.memory.total / 1e9:>7.1f}{speed}  {lost}")
    return "\n".join(lines)


LOSSES = ("recompute", "tensor", "context", "launch", "bubble", "pipeline", "data", "optimizer", "rest", "elementwise")


def details(model: ModelConfig, chosen: Candidate) -> str:
    """Memory, time, operations and traffic of the chosen layout, by kind."""

    def rows(values: dict[str, float], scale: float, unit: str, form: str = ",.2f") -> str:
        whole = sum(values.values()) or 1.0
        shown = {name: value for name, value in values.items() if value}
        lines = (f"  {name:<12} {value / scale:>12{form}} {unit}  {value / whole:6.1%}" for name, value in shown.items())
        return "\n".join(lines)

    flops = flops_by_kind(model, chosen.work, chosen.layout.recompute)
    return "\n".join([
        f"best         {chosen.words}",
        f"memory of the fullest rank\n{chosen.memory.table()}",
        f"time of a step, {chosen.step.micro_batches} micro-batches a rank\n{rows(chosen.step.seconds, 1, 's')}",
        f"operations of a step, all ranks\n{rows(flops, 1e12, 'TFLOP', ',.0f')}",
        f"sent by a rank in a step\n{rows(chosen.step.traffic, 1e9, 'GB')}",
    ])  # fmt: skip


def rollout_text(plan: RolloutPlan, batch: Rollouts) -> str:
    parts = "\n".join(f"  {name:<12} {value:>9.1f} s" for name, value in plan.seconds.items())
    overlap = "sampling beside training" if batch.staleness else "one after the other"
    return (
        f"engines      {plan.replicas} of {batch.engine_tensor} GPU, {batch.engine}; cache {plan.cache_gb:.1f} GB a GPU = "
        f"{plan.cache_tokens:,} tokens, {plan.running} sequences at once, {plan.tokens_per_s:,.0f} tokens/s each\n"
        f"step         {plan.step_s:.1f} s, {overlap}; tokens at most {plan.versions_behind} versions behind\n{parts}"
    )


def as_json(options: argparse.Namespace, model: ModelConfig, found: list[Candidate], chosen: Candidate, refused: int,
            rollouts: RolloutPlan | None) -> str:  # fmt: skip
    told = {
        "model": options.model,
        "gpus": options.gpus,
        "device": asdict(device_named(options.device)),
        "software": asdict(software_named(options.software)),
        "work": asdict(chosen.work),
        "flops": flops_by_kind(model, chosen.work, chosen.layout.recompute),
        "best": as_dict(chosen),
        "layouts": [as_dict(one) for one in found],
        "do_not_fit": refused,
        "rollouts": rollouts and asdict(rollouts),
    }
    return json.dumps(told, indent=1)


def assumed(device: Device, software: Software, name: str) -> str:
    warning = "; those of `ours` are not measured on a GPU" if name == "ours" else ""
    return (
        f"assumed      software={name}: products at {software.matmul:.0%} of {device.peak_tflops:g} TFLOP/s, attention at "
        f"{software.attention_forward:.0%} forward and {software.attention_backward:.0%} backward,\n"
        f"             links at {software.link:.0%} of {device.node_link_gb_s:g} (node) and {device.network_gb_s:g} GB/s, "
        f"{1 - RESERVE:.0%} of memory usable; every constant with its source: tools/{CONSTANTS.name}{warning}"
    )


def main(words: list[str] | None = None) -> int:
    options = arguments().parse_args(words)
    try:
        model, (work, batch) = model_named(options.model), work_of(options)
        device, software = device_named(options.device), software_named(options.software)
        found, refused = candidates(model, options.gpus, work, device, software, (1,) if batch else MICRO_BATCHES)
        chosen = best(found, device)
        rollouts = plan_rollouts(model, batch, chosen, options.gpus, device) if batch else None
    except ValueError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(as_json(options, model, found, chosen, refused, rollouts))
        return 0
    print(
        f"{options.model}, {model.num_parameters / 1e9:.2f}B parameters, {model.dtype}; {options.gpus} x {options.device}; "
        f"{work.global_batch} packs of {work.length} tokens a step, documents of {work.document or work.length}\n"
        f"{len(found)} layouts fit, {refused} more are legal and do not\n\n{table(found[: options.show])}\n\n"
        f"{details(model, chosen)}"
    )
    if rollouts:
        print(rollout_text(rollouts, batch))
    print(f"\n{assumed(device, software, options.software)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
