"""What one rank will hold, by kind, before anything is allocated.

Counts tensors that live at the peak of a step: weights, gradients, optimizer state, activations kept for the backward
pass, the loss, and the buffers of context parallelism. Left out: the CUDA context, NCCL buffers, fragmentation; the
reserve covers them. Legend: t tokens per context rank, s tokens per rank where sequence parallelism scatters them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel.topology import ParallelConfig

GB = 1e9
RESERVE = 0.08  # of the device: context, communication buffers, fragmentation
LOSS_CHUNK = 32768, 8192  # tokens x vocabulary of linear_logprob's workspace, however long the pack is


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the fullest rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    loss: float
    ring: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())

    def table(self) -> str:
        rows = [*asdict(self).items(), ("total", self.total)]
        return "\n".join(f"  {name:<12} {value / GB:8.2f} GB" for name, value in rows)


def stage_parameters(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Parameters of the fullest pipeline rank: its layers, and the embedding or the head where it stands."""
    layers = model.num_layers / parallel.pipeline * model.layer_matmul_parameters / parallel.tensor
    tables = model.padded_vocab(parallel.tensor) * model.hidden_size / parallel.tensor
    if parallel.pipeline == 1 and model.vocabulary_head:
        tables *= 2
    return layers + tables + 2 * model.hidden_size * model.num_layers / parallel.pipeline


def layer_activation_bytes(model: ModelConfig, parallel: ParallelConfig) -> dict[str, float]:
    """Bytes per token of the context rank (t) that one layer keeps for its backward pass, by part."""
    b = 2 if model.dtype == "bf16" else 4
    tensor, scatter = parallel.tensor, parallel.tensor if parallel.sequence_parallel else 1
    q = model.num_attention_heads * model.head_dim / tensor
    kv = model.num_query_groups * model.head_dim / tensor
    mlp_width = model.ffn_hidden_size / tensor
    shared = b == 4 and parallel.context > 1  # the ring's fp32 output is then the projection's input itself
    return {
        # inputs of the two norms, and their outputs as inputs of the two projections
        "norms": 4 * b * model.hidden_size / scatter,
        # q, k, v; out and lse in fp32; out again as input of the output projection
        "attention": b * (q + 2 * kv) + 4 * q + 4 * model.num_attention_heads / tensor + b * q * (not shared),
        # gate and up, and the input of the down projection
        "mlp": 3 * b * mlp_width,
    }


def plan(model: ModelConfig, parallel: ParallelConfig, world: int, pack_length: int) -> MemoryPlan:
    """The fullest rank of `world` when every micro-batch is a pack of `pack_length` tokens."""
    b = 2 if model.dtype == "bf16" else 4
    t = pack_length / parallel.context
    scatter = parallel.tensor if parallel.sequence_parallel else 1
    shards = parallel.data_size(world) * parallel.context if parallel.distributed_optimizer else 1
    parameters = stage_parameters(model, parallel)
    state = 12 if model.dtype == "bf16" else 8  # Adam's two moments, and fp32 copies of bf16 weights

    parts = layer_activation_bytes(model, parallel)
    whole = sum(parts.values())
    layer_input = b * model.hidden_size / scatter
    kept = {"none": whole, "selective": whole - parts["mlp"], "full": layer_input}[parallel.recompute]
    if parallel.offload_activations:
        kept = max(kept - parts["norms"] - parts["attention"], 0.0)
    layers = model.num_layers / parallel.pipeline
    # 1F1B: the first stage holds as many micro-batches as there are stages; interleaving adds a part of that
    virtual = parallel.virtual_pipeline
    in_flight = parallel.pipeline * (1 + (parallel.pipeline - 1) / (parallel.pipeline * virtual) if virtual > 1 else 1)
    working = whole if parallel.recompute == "full" else parts["mlp"] if parallel.recompute == "selective" else 0.0
    rotary = 4 * model.head_dim  # cosine and sine, one table for all layers
    activations = t * (layers * kept * in_flight + working + rotary + layer_input)

    head = model.padded_vocab(parallel.tensor) / parallel.tensor * model.hidden_size * 4  # its gradient before it is added
    chunk = b * min(t, LOSS_CHUNK[0]) * min(model.vocab_size, LOSS_CHUNK[1])
    loss = t * model.hidden_size * (b + 4 + b) + t * 32 + chunk + head
    if model.head == "score":
        loss = t * model.hidden_size * b  # the hidden states' gradient, of which only the documents' last rows are not zero
    q = model.num_attention_heads * model.head_dim / parallel.tensor
    kv = model.num_query_groups * model.head_dim / parallel.tensor
    # backward: keys and values here and arriving, their gradients here, own and arriving in fp32, dq in fp32
    ring = t * (4 * kv * b + 6 * kv * 4 + q * 4) if parallel.context > 1 else t * q * 4
    return MemoryPlan(parameters * b, parameters * 4, parameters * state / shards, activations, loss, ring)


def check_fits(plan_: MemoryPlan, device_gb: float) -> None:
    """ValueError when the plan leaves less than the reserve of a device of `device_gb`."""
    room = device_gb * (1 - RESERVE)
    if plan_.total / GB > room:
        biggest = max(asdict(plan_), key=lambda name: getattr(plan_, name))
        remedy = {
            "activations": "raise parallel.context or parallel.tensor, or set parallel.recompute=full",
            "loss": "raise parallel.context",
            "ring": "raise parallel.context",
        }.get(biggest, "raise parallel.tensor or parallel.pipeline, or use more ranks with parallel.distributed_optimizer=true")
        raise ValueError(
            f"the fullest rank needs {plan_.total / GB:.1f} GB, a device has {device_gb:g} GB of which {room:.1f} can be used; "
            f"most is {biggest} ({getattr(plan_, biggest) / GB:.1f} GB): {remedy}\n{plan_.table()}"
        )
