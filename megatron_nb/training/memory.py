"""What one rank will hold, by kind, before anything is allocated.

Counts tensors that live at the peak of a step: weights, gradients, optimizer state, activations kept for the backward
pass, and the work in hand at the worst moment, which is the loss, an MLP's backward pass, or an attention's. Left out: the
CUDA context, NCCL buffers, fragmentation; the reserve covers them. tools/plan_measure.py holds it against counted bytes.
Legend: t tokens per context rank, s tokens per rank where sequence parallelism scatters them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from megatron_nb.model.shape import ModelConfig
from megatron_nb.parallel.topology import ParallelConfig

GB = 1e9
RESERVE = 0.08  # of the device: context, communication buffers, fragmentation
LOSS_CHUNK = 8192, 32768  # tokens x vocabulary of linear_logprob's workspace on a GPU, however long the pack is
LOSS_CHUNK_TORCH = 512, 25 << 20  # tokens, and logits in fp32, that its torch path holds at once
LOSS_PIECE_TORCH = 8192  # rows of bf16 weights that it widens at once


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the fullest rank. Of the last three, which are never alive together, the largest counts."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # what all layers keep
    loss: float  # logits of a chunk, gradients of the hidden states and of the head
    mlp: float  # recomputed activations and the backward pass's own, in one layer
    attention: float  # the same of attention: gradients, keys and values on their way round the ring

    @property
    def total(self) -> float:
        held = self.weights + self.gradients + self.optimizer + self.activations
        return held + max(self.loss, self.mlp, self.attention)

    def table(self) -> str:
        rows = [*asdict(self).items(), ("total", self.total)]
        lines = [f"  {name:<12} {value / GB:8.2f} GB" for name, value in rows]
        lines[-1] += " (of loss, mlp, attention the largest)"
        return "\n".join(lines)


def torch_path(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Whether the kernels' torch path runs: on a CPU, or where it is asked for."""
    return model.kernels == "torch" or (model.kernels == "auto" and parallel.communication == "gloo")


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
    rotary = 4 * model.head_dim  # cosine and sine, one table for all layers
    transfers = 3 * virtual * layer_input if parallel.pipeline > 1 else 0.0  # received, to be sent, and a gradient
    activations = t * (layers * kept * in_flight + rotary + layer_input + transfers)

    scattered = 2 * b * model.hidden_size if parallel.sequence_parallel else 0  # gathered again, and its gradient
    again = {"none": 0.0, "selective": parts["mlp"], "full": whole}[parallel.recompute]
    mlp = t * (again + scattered + _mlp_backward_bytes(model, parallel))
    q = model.num_attention_heads * model.head_dim / parallel.tensor
    kv = model.num_query_groups * model.head_dim / parallel.tensor
    # backward: keys and values here and arriving, their gradients here, own and arriving in fp32, dq in fp32
    ring = 4 * kv * b + 6 * kv * 4 + q * 4 if parallel.context > 1 else q * 4
    again = parts["norms"] + parts["attention"] if parallel.recompute == "full" else 0.0
    attention = t * (again + scattered + ring)
    loss = _loss_bytes(model, parallel, t)
    return MemoryPlan(parameters * b, parameters * 4, parameters * state / shards, activations, loss, mlp, attention)


def _mlp_backward_bytes(model: ModelConfig, parallel: ParallelConfig) -> float:
    """Per token: gradients of the activation's output and of gate and up; the torch path works in fp32."""
    b = 2 if model.dtype == "bf16" else 4
    wide = 18 if b == 2 else 4
    return (3 * b + (wide if torch_path(model, parallel) else 0)) * model.ffn_hidden_size / parallel.tensor


def _loss_bytes(model: ModelConfig, parallel: ParallelConfig, t: float) -> float:
    """What is alive while the loss is taken of t tokens, forward or backward."""
    b = 2 if model.dtype == "bf16" else 4
    if model.head == "score":
        return t * model.hidden_size * b  # the hidden states' gradient, of which only the documents' last rows are not zero
    vocabulary = model.padded_vocab(parallel.tensor) / parallel.tensor
    head = vocabulary * model.hidden_size * 4  # its gradient before it is added
    if torch_path(model, parallel):
        chunk = 4 * min(min(t, LOSS_CHUNK_TORCH[0]) * vocabulary, LOSS_CHUNK_TORCH[1])
        if b == 2:
            chunk += 4 * min(vocabulary, LOSS_PIECE_TORCH) * model.hidden_size  # weights in fp32
    else:
        chunk = b * min(t, LOSS_CHUNK[0]) * min(vocabulary, LOSS_CHUNK[1])
    return t * model.hidden_size * (b + 4 + b) + t * 32 + chunk + head


def check_fits(plan_: MemoryPlan, device_gb: float) -> None:
    """ValueError when the plan leaves less than the reserve of a device of `device_gb`."""
    room = device_gb * (1 - RESERVE)
    if plan_.total / GB > room:
        biggest = max(asdict(plan_), key=lambda name: getattr(plan_, name))
        remedy = {
            "activations": "raise parallel.context or parallel.tensor, or set parallel.recompute=full",
            **dict.fromkeys(("loss", "mlp", "attention"), "raise parallel.context or parallel.tensor"),
        }.get(biggest, "raise parallel.tensor or parallel.pipeline, or use more ranks with parallel.distributed_optimizer=true")
        raise ValueError(
            f"the fullest rank needs {plan_.total / GB:.1f} GB, a device has {device_gb:g} GB of which {room:.1f} can be used; "
            f"most is {biggest} ({getattr(plan_, biggest) / GB:.1f} GB): {remedy}\n{plan_.table()}"
        )
