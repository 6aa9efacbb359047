"""Which layouts are legal for a model on so many GPUs, and what each would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_nb.model.gpt import check_layout
from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel.topology import ParallelConfig
from megatron_nb.training import memory
from tools.plan_time import Clock, Device, Software, StepTime, Work

RECOMPUTE = ("none", "selective", "full")
MICRO_BATCHES = (1, 2, 4, 8)
COMFORT = 0.75  # of a device's memory: fragmentation and longer packs do not end a run there
LONGEST_MICRO_BATCH = 65536  # tokens: several packs at once only help products that are small


@dataclass(frozen=True)
class Candidate:
    """One legal layout with its prediction."""

    layout: ParallelConfig
    work: Work
    data: int
    memory: memory.MemoryPlan
    step: StepTime
    tokens_per_s: float  # of one GPU
    mfu: float

    @property
    def words(self) -> str:
        """The command line's words for it."""
        p = self.layout
        names = ("tensor", "pipeline", "virtual_pipeline", "context", "recompute")
        words = [f"parallel.{name}={getattr(p, name)}" for name in names if getattr(p, name) not in (1, "none")]
        return " ".join([*words, f"micro_batch_size={self.work.micro_batch}"])


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def cuts(model: ModelConfig, gpus: int, node_gpus: int) -> Iterator[ParallelConfig]:
    """Every way to cut a model over `gpus`: tensor ranks stay in a node, stages hold equally many layers."""
    for tensor in divisors(min(gpus, node_gpus)):
        for pipeline in divisors(model.num_layers):
            for context in divisors(gpus):
                if gpus % (tensor * pipeline * context):
                    continue
                deepest = model.num_layers // pipeline
                for virtual in {1} | ({2, 4, deepest} & set(divisors(deepest)) if pipeline > 1 else set()):
                    sizes = {"tensor": tensor, "pipeline": pipeline, "virtual_pipeline": virtual, "context": context}
                    yield ParallelConfig(**sizes, communication="nccl")


def is_legal(model: ModelConfig, layout: ParallelConfig, length: int) -> bool:
    """By the rules that the jobs themselves apply."""
    try:
        check_layout(model, layout)
        layout.check_pack_length(length)
    except ValueError:
        return False
    return True


def best(found: list[Candidate], device: Device) -> Candidate:
    """The fastest; of those as fast within 1 %, which no prediction tells apart, the first that leaves memory to spare."""
    equal = [one for one in found if one.step.total <= 1.01 * found[0].step.total]
    return next((one for one in equal if one.memory.total / 1e9 <= COMFORT * device.memory_gb), equal[0])


def candidates(
    model: ModelConfig, gpus: int, work: Work, device: Device, software: Software, micro_batches: tuple = MICRO_BATCHES
) -> tuple[list[Candidate], int]:
    """(layouts that fit, fastest first; how many more are legal but do not fit).

    Of the kinds of recomputation only the least that fits is kept: more can only be slower. ValueError when nothing fits.
    """
    found, refused, nearest = [], 0, None
    for layout in cuts(model, gpus, device.node_gpus):
        if not is_legal(model, layout, work.length):
            continue
        for micro_batch in micro_batches:
            data = layout.data_size(gpus)
            here = replace(work, micro_batch=micro_batch)
            if micro_batch > 1 and work.length * micro_batch > LONGEST_MICRO_BATCH:
                break
            if data * micro_batch > work.global_batch:
                break  # some ranks would have nothing to do
            tokens, room = work.length * micro_batch, device.memory_gb * (1 - memory.RESERVE)
            for kind in RECOMPUTE:
                chosen = replace(layout, recompute=kind)
                plan = memory.plan(model, chosen, gpus, tokens)
                if plan.total / 1e9 <= room:
                    break
            else:
                refused += 1
                nearest = min(nearest or plan, plan, key=lambda one: one.total)
                continue
            clock = Clock(model, chosen, gpus, here, device, software)
            step = clock.step()
            rate = work.tokens / step.total / gpus
            found.append(Candidate(chosen, here, data, plan, step, rate, clock.mfu(step.total)))
    if not found:
        told = f"the leanest of {refused} needs {nearest.total / 1e9:.1f} GB\n{nearest.table()}" if nearest else "none is legal"
        raise ValueError(
            f"no layout of {gpus} GPUs with {device.memory_gb:g} GB holds packs of {work.length} tokens: {told}\n"
            "take more GPUs, shorter packs, or a global batch of at least one pack"
        )
    return sorted(found, key=lambda one: one.step.total), refused
