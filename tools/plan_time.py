"""How long a training step takes: operations, bytes and links, part by part, with the constants of plan_constants.yaml.

Time of a micro-batch on the slowest pipeline stage = its layers (products, attention, element-wise kernels, communication
that nothing hides) and the loss on the last stage. A step is its micro-batches, the pipeline's bubble, the sum of gradients
and gathering of weights that nothing hides, and the optimizer.

Legend: t tokens of a micro-batch per context rank, H hidden, F MLP width, V vocabulary, N query heads, G key/value heads,
D head size. Work counts a multiply-add as two operations and causal attention by the pairs it needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import yaml

from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel.topology import ParallelConfig

CONSTANTS = Path(__file__).with_name("plan_constants.yaml")
FORWARD_BYTES, BACKWARD_BYTES = 1.0, 2.0  # of element-wise traffic


@dataclass(frozen=True)
class Device:
    """A GPU and what it is connected to; bandwidths are one way."""

    peak_tflops: float
    memory_gb: float
    memory_tb_s: float
    node_gpus: int
    node_link_gb_s: float
    network_gb_s: float


@dataclass(frozen=True)
class Software:
    """How well a training stack uses a device: see plan_constants.yaml for what each number means."""

    matmul: float
    matmul_fp8: float
    matmul_half: float
    attention_forward: float
    attention_backward: float
    attention_backward_work: float
    attention_half: float
    memory: float
    link: float
    collective_s: float
    tensor_exposed: float
    pipeline_exposed: float
    gradient_bytes: int
    overlap_gradients: bool
    head_work: float
    logits_bytes: float
    layer_launch_s: float
    optimizer: float
    step_s: float


@cache
def _constants() -> dict:
    return yaml.safe_load(CONSTANTS.read_text())


def constants(section: str, name: str) -> dict:
    """One entry of plan_constants.yaml; ValueError names what there is."""
    known = _constants()[section]
    if name not in known:
        raise ValueError(f"{section} {name!r} is not in {CONSTANTS.name}: choose one of {', '.join(known)}, or add it there")
    return known[name]


def device_named(name: str) -> Device:
    return Device(**constants("devices", name))


def software_named(name: str) -> Software:
    found = constants("software", name)
    return Software(**{field.name: found[field.name] for field in fields(Software)})


@dataclass(frozen=True)
class Work:
    """A step: packs of `length` tokens, of which a micro-batch holds `micro_batch`; documents of `document` tokens."""

    length: int
    global_batch: int  # packs
    micro_batch: int = 1
    document: int | None = None  # None: one document a pack

    @property
    def tokens(self) -> int:
        return self.length * self.global_batch

    @property
    def squared_lengths(self) -> float:
        return float(self.tokens) * (self.document or self.length)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank, which add up to `total`, and what goes over links (bytes a rank)."""

    seconds: dict[str, float]
    traffic: dict[str, float]
    micro_batches: int

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class Clock:
    """The arithmetic of one layout: a model cut in one way over `world` devices."""

    def __init__(self, model: ModelConfig, layout: ParallelConfig, world: int, work: Work, device: Device, software: Software):
        self.model, self.layout, self.world, self.work = model, layout, world, work
        self.device, self.software = device, software
        self.data = layout.data_size(world)
        self.itemsize = 2 if model.dtype == "bf16" else 4
        self.t = work.length * work.micro_batch / layout.context
        self.layers = model.num_layers / layout.pipeline

    # ------------------------------------------------------------------ what a device does
    def matmul_s(self, m: float, k: float, n: float) -> float:
        """Of a product [m, k] x [k, n]."""
        half = self.software.matmul_half
        speed = self.device.peak_tflops * 1e12 * self.software.matmul
        return 2 * m * k * n / speed * (1 + half / m) * (1 + half / k) * (1 + half / n)

    def memory_s(self, moved: float) -> float:
        return moved / (self.device.memory_tb_s * 1e12 * self.software.memory)

    def link_s(self, moved: float, span: int) -> float:
        """Of `moved` bytes a rank within a group whose ranks lie within `span` neighbours."""
        inside = span <= self.device.node_gpus
        rate = self.device.node_link_gb_s if inside else self.device.network_gb_s
        return moved / (rate * 1e9 * self.software.link)

    # ------------------------------------------------------------------ one layer, one micro-batch
    def products_s(self) -> float:
        """Forward products of a layer; the backward pass does twice as much."""
        model, tp, t = self.model, self.layout.tensor, self.t
        heads, kv = model.num_attention_heads * model.head_dim / tp, model.num_query_groups * model.head_dim / tp
        hidden, width = model.hidden_size, model.ffn_hidden_size / tp
        sizes = ((hidden, heads + 2 * kv), (heads, hidden), (hidden, 2 * width), (width, hidden))
        return sum(self.matmul_s(t, k, n) for k, n in sizes)

    def mlp_s(self) -> float:
        hidden, width = self.model.hidden_size, self.model.ffn_hidden_size / self.layout.tensor
        return self.matmul_s(self.t, hidden, 2 * width) + self.matmul_s(self.t, width, hidden)

    def attention_s(self) -> tuple[float, float]:
        """(forward, backward) of causal attention on this rank, which has 1 / context of the pairs."""
        model, document = self.model, self.work.document or self.work.length
        pairs = self.t * document / 2  # t tokens see half their document on average, over all context ranks
        work = 4 * model.head_dim * model.num_attention_heads / self.layout.tensor * pairs
        form = (1 + self.software.attention_half / document) * (64 + model.head_dim) / (1.5 * model.head_dim)
        peak = self.device.peak_tflops * 1e12
        forward = work / (peak * self.software.attention_forward) * form
        backward = work * self.software.attention_backward_work / (peak * self.software.attention_backward) * form
        return forward, backward

    def elementwise_s(self) -> float:
        """Norms, residuals, rotary and SwiGLU, forward."""
        model, layout = self.model, self.layout
        scatter = layout.tensor if layout.sequence_parallel else 1
        rows = 10 * model.hidden_size / scatter + 2 * (model.num_attention_heads + model.num_query_groups) * model.head_dim \
            / layout.tensor + 3 * model.ffn_hidden_size / layout.tensor  # fmt: skip
        return self.memory_s(self.t * rows * self.itemsize)

    def tensor_bytes(self) -> float:
        """Sent by a rank in the forward pass of a layer: two gathers and two scatters of the hidden states."""
        tp = self.layout.tensor
        return 4 * self.t * self.model.hidden_size * self.itemsize * (tp - 1) / tp

    def tensor_s(self) -> float:
        if self.layout.tensor == 1:
            return 0.0
        moved = self.link_s(self.tensor_bytes(), self.layout.tensor)
        return self.software.tensor_exposed * (moved + 4 * self.software.collective_s)

    def context_bytes(self) -> tuple[float, float]:
        """(forward, backward) sent by a rank in a layer: keys and values round the ring, and their gradients in fp32."""
        size = self.layout.context
        kv = 2 * self.t * self.model.num_query_groups * self.model.head_dim / self.layout.tensor
        return (size - 1) * kv * self.itemsize, (size - 1) * kv * self.itemsize + size * kv * 4 * (size > 1)

    def context_s(self) -> tuple[float, float]:
        """(forward, backward): what the ring's transfers take beyond the attention that hides them."""
        size = self.layout.context
        if size == 1:
            return 0.0, 0.0
        span = self.layout.tensor * size
        start = size * self.software.collective_s
        hidden = [compute * (size - 1) / size for compute in self.attention_s()]
        if self.layout.context_method == "all_gather":
            hidden = [0.0, 0.0]
        moved = [self.link_s(each, span) + start for each in self.context_bytes()]
        return tuple(max(0.0, each - by) for each, by in zip(moved, hidden))

    def layer_s(self) -> dict[str, float]:
        """Forward and backward of a layer, by part; recomputation is a part of its own."""
        products, (forward, backward), rest = self.products_s(), self.attention_s(), self.elementwise_s()
        tensor, (ring, ring_back) = self.tensor_s(), self.context_s()
        whole = products + forward + rest + tensor + ring
        again = {"none": 0.0, "selective": self.mlp_s() + rest / 3 + tensor / 2, "full": whole}
        parts = {
            "products": 3 * products,
            "attention": forward + backward,
            "elementwise": (FORWARD_BYTES + BACKWARD_BYTES) * rest,
            "recompute": again[self.layout.recompute],
            "tensor": 2 * tensor,
            "context": ring + ring_back,
        }
        floor = (3 + (self.layout.recompute == "full")) * self.software.layer_launch_s
        return parts | {"launch": max(0.0, floor - sum(parts.values()))}

    def head_s(self) -> float:
        """The loss of a micro-batch on the last stage."""
        model, tp = self.model, self.layout.tensor
        if model.head != "vocabulary":
            return 0.0
        rows = model.padded_vocab(tp) / tp
        product = self.matmul_s(self.t, model.hidden_size, rows)
        return product * self.software.head_work / 2 + self.memory_s(self.t * rows * self.software.logits_bytes)

    # ------------------------------------------------------------------ a step
    def micro_batches(self) -> int:
        needed = math.ceil(self.work.global_batch / (self.data * self.work.micro_batch))
        return math.ceil(needed / self.layout.pipeline) * self.layout.pipeline  # as the jobs fill up a step

    def stage_parameters(self) -> float:
        from megatron_nb.training.memory import stage_parameters

        return stage_parameters(self.model, self.layout)

    def data_bytes(self) -> tuple[float, float]:
        """(gradients summed, weights gathered) sent by a rank in a step."""
        ranks = self.data * self.layout.context
        share, parameters = (ranks - 1) / ranks, self.stage_parameters()
        if not self.layout.distributed_optimizer:
            return 2 * share * parameters * self.software.gradient_bytes, 0.0
        return share * parameters * self.software.gradient_bytes, share * parameters * self.itemsize

    def step(self) -> StepTime:
        layout, software, count = self.layout, self.software, self.micro_batches()
        layer, head = self.layer_s(), self.head_s()
        stage = self.layers * sum(layer.values())
        seconds = {name: count * self.layers * value for name, value in layer.items()}
        seconds["loss"] = count * head
        bubbles = (layout.pipeline - 1) / layout.virtual_pipeline
        seconds["bubble"] = bubbles * stage
        scatter = layout.tensor if layout.sequence_parallel else 1
        boundary = self.t * self.model.hidden_size * self.itemsize / scatter * 2 * layout.virtual_pipeline
        hops = boundary if layout.pipeline > 1 else 0.0
        seconds["pipeline"] = software.pipeline_exposed * count * self.link_s(hops, self.world)
        span = self.world // layout.pipeline  # data-parallel ranks are strided by tensor and context: the widest reach
        gradients, weights = (self.link_s(each, span) for each in self.data_bytes())
        hidden = 0.6 * stage if software.overlap_gradients else 0.0
        seconds["data"] = max(0.0, gradients - hidden) + max(0.0, weights - hidden / 2)
        ranks = self.data * layout.context if layout.distributed_optimizer else 1
        moved = self.stage_parameters() * (34 / ranks + 4)  # moments, masters and weights; the norm reads all gradients
        seconds["optimizer"] = moved / (self.device.memory_tb_s * 1e12 * software.optimizer)
        seconds["rest"] = software.step_s
        ring, ring_back = self.context_bytes()
        again = 1 if layout.recompute == "full" else 0
        traffic = {
            "tensor": count * self.layers * self.tensor_bytes() * (2 + again),
            "context": count * self.layers * (ring * (1 + again) + ring_back),
            "pipeline": count * hops,
            "data": sum(self.data_bytes()),
        }
        return StepTime(seconds, traffic, count)

    def mfu(self, seconds: float) -> float:
        """Of the device's peak, by the operations the model needs; recomputation is none."""
        flops = self.model.train_flops(self.work.tokens, self.work.squared_lengths)
        return flops / seconds / self.world / (self.device.peak_tflops * 1e12)


def flops_by_kind(model: ModelConfig, work: Work, recompute: str) -> dict[str, float]:
    """Operations of a step over all ranks: what the model needs, and what recomputation adds."""
    attention = model.train_flops(0, 1) * work.squared_lengths
    head = 6.0 * model.vocab_size * model.hidden_size * work.tokens if model.head == "vocabulary" else 0.0
    layers = 6.0 * model.num_layers * model.layer_matmul_parameters * work.tokens
    mlp = 6.0 * model.num_layers * 3 * model.hidden_size * model.ffn_hidden_size * work.tokens
    again = {"none": 0.0, "selective": mlp / 3, "full": (layers + attention) / 3}[recompute]
    return {"projections": layers - mlp, "mlp": mlp, "attention": attention, "loss": head, "recompute": again}
