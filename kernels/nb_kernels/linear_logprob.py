"""Log-probability of target tokens straight from hidden states; the logits never exist as a whole.

    z[t, v] = hidden[t] . weight[v] / temperature    lse[t] = log sum_v exp z[t, v]    p[t, v] = exp(z[t, v] - lse[t])
    logprob[t] = z[t, target[t]] - lse[t]            entropy[t] = lse[t] - sum_v p[t, v] z[t, v]

Backward, with g = dLoss/dlogprob and e = dLoss/dentropy:
    dz[t, v] = g[t] (1[v = target[t]] - p[t, v]) - e[t] p[t, v] (log p[t, v] + entropy[t])
    dhidden = dz @ weight / temperature,   dweight = dz^T @ hidden / temperature

Shapes: hidden, dhidden [T, H]; weight, dweight [V, H]; targets, logprob, entropy, g, e [T].
T packed tokens, H hidden, V vocabulary rows on this rank. Accumulators are float32, float64 for float64 inputs, also across
chunks. Cost: 2 T V H forward, 6 T V H backward; 6 T V H in all when `coefficient` lets one pass compute the logits once.
Chunks: Hsu et al. (arXiv:2410.10989), Wijmans et al. (arXiv:2411.09009).
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nb_kernels import linear_logprob_torch, linear_logprob_triton

BACKENDS = {"torch": linear_logprob_torch, "triton": linear_logprob_triton}


def reference(hidden, weight, targets, temperature=1.0, vocab_size=None, ignore_index=-100):
    """The definition with whole logits in the inputs' own dtype -> (logprob [T], entropy [T]); tests call it in float64."""
    log_p = torch.log_softmax(hidden @ weight[:vocab_size].T / temperature, -1)  # [T, V]
    kept = targets != ignore_index
    logprob = log_p.gather(1, targets.where(kept, 0)[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return logprob.where(kept, 0), entropy.where(kept, 0)


def cases(device, dtype):
    """(name, (hidden, weight, targets), options): odd sizes on a CPU; on a GPU the 3B model's own shape too."""
    sizes = [(1, 1000, 40), (63, 1280, 24), (257, 1000, 64), (3, 166144, 16)]
    if device != "cpu":
        sizes += [(8192, 166144, 2560), (32768, 166144, 2560)]
    for T, V, H in sizes:
        hidden = torch.randn(T, H, device=device, dtype=dtype)
        weight = torch.randn(V, H, device=device, dtype=dtype) * (4 * H**-0.5)  # logits of standard deviation 4
        targets = torch.randint(0, V - 7, (T,), device=device)
        targets[1::5] = -100
        yield f"T{T}-V{V}-H{H}", (hidden, weight, targets), {"temperature": 0.7, "vocab_size": V - 7}


@dataclass(frozen=True)
class Shard:
    """What the passes share: this rank's vocabulary is the ids [first, first + valid) of the group's."""

    temperature: float
    first: int
    valid: int
    group: object
    reduce_hidden_grad: bool


def linear_logprob(
    hidden,
    weight,
    targets,
    *,
    temperature=1.0,
    vocab_size=None,
    group=None,
    reduce_hidden_grad=True,
    ignore_index=-100,
    entropy=False,
    coefficient=None,
    implementation="auto",
):
    """hidden [T, H], weight [V, H], targets [T] int64 -> logprob [T], or (logprob [T], entropy [T]).

    Results are float32 (float64 for float64 inputs) and differentiable in hidden and weight.
    temperature         divides the logits; a run-time number.
    vocab_size          true size of the whole vocabulary; rows beyond it are padding and never count.
    group               process group over which the vocabulary is split evenly, in rank order; targets are global ids.
    reduce_hidden_grad  sum dhidden over `group`; False where another operator does (the gather of sequence parallelism).
    ignore_index        such a target gives logprob 0, entropy 0, no gradient and costs nothing: mask what you do not need.
    coefficient         [T], the caller's promise that dLoss/dlogprob = s * coefficient for one scalar s. The torch path then
                        forms the gradients in the forward pass and computes the logits once; the entropy is a metric
                        without gradient, backward runs once. A broken promise raises in backward. Or a function of
                        (logprob of some rows, an index of these rows): the torch path asks it while their logits exist.
    implementation      "auto" (triton on CUDA, torch elsewhere and for float64), "torch", "triton".

    Raises ValueError for shapes, types, devices, layouts and targets that do not fit.
    """
    _check_layout(hidden, weight, targets, temperature, coefficient)
    shard, total = _shard(weight, float(temperature), vocab_size, group, reduce_hidden_grad)
    kept = _kept_rows(targets, total, ignore_index)
    backend = _backend(implementation, hidden, weight)
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if coefficient is None or not learns:
        logprob, ent = _LinearLogprob.apply(hidden, weight, targets, kept, None, entropy, shard, backend)
    elif backend is linear_logprob_torch:
        logprob, ent = _OnePass.apply(hidden, weight, targets, kept, coefficient, entropy, shard, backend)
    else:
        promise = None if callable(coefficient) else coefficient.detach().to(linear_logprob_torch.accumulator(hidden.dtype))
        logprob, ent = _LinearLogprob.apply(hidden, weight, targets, kept, promise, entropy, shard, backend)
    return (logprob, ent) if entropy else logprob


@torch.no_grad()
def top_k_logprob(hidden, weight, k, *, temperature=1.0, vocab_size=None, group=None):
    """hidden [T, H], weight [V, H] -> (ids [T, k] int64, log-probabilities [T, k]), best first.

    The teacher's side of distillation, not differentiable, by the chunked torch path on every device. The other arguments are
    linear_logprob's.
    Raises ValueError as linear_logprob does, and for k outside [1, vocabulary].
    """
    _check_layout(hidden, weight, torch.empty(len(hidden), dtype=torch.int64, device=hidden.device), temperature, None)
    shard, total = _shard(weight, float(temperature), vocab_size, group, True)
    if not 1 <= k <= total:
        raise ValueError(f"k={k} must be in [1, {total}], the vocabulary")
    return linear_logprob_torch.top_k(hidden, weight, k, shard)


def _check_layout(hidden, weight, targets, temperature, coefficient):
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [T, H] and [V, H] with one H")
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}: both must have one floating dtype")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(f"targets {tuple(targets.shape)} {targets.dtype} must be [{len(hidden)}] int64, one per hidden row")
    if not hidden.device == weight.device == targets.device:
        places = f"hidden on {hidden.device}, weight on {weight.device}, targets on {targets.device}"
        raise ValueError(f"{places}: move them to one device")
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}: pass {name}.contiguous()")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature={temperature} must be a finite number above 0")
    if isinstance(coefficient, torch.Tensor) and (coefficient.shape != targets.shape or coefficient.device != hidden.device):
        where = f"coefficient {tuple(coefficient.shape)} on {coefficient.device}"
        raise ValueError(f"{where} must be [{len(hidden)}] on {hidden.device}, one per hidden row")


def _shard(weight, temperature, vocab_size, group, reduce_hidden_grad):
    """(this rank's share of the vocabulary, true size of the whole)."""
    world, rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
    if world == 1:
        group = None
    rows = len(weight)
    total = rows * world if vocab_size is None else int(vocab_size)
    if not 0 < total <= rows * world:
        raise ValueError(f"vocab_size={total} must be in [1, {rows * world}]: {rows} weight rows on each of {world} ranks")
    valid = min(max(total - rank * rows, 0), rows)
    return Shard(temperature, rank * rows, valid, group, reduce_hidden_grad), total


def _kept_rows(targets, total, ignore_index):
    """Index of the rows that are not ignored, None when all are kept. One synchronisation checks and counts."""
    ignored = targets == ignore_index
    wrong = ~ignored & ((targets < 0) | (targets >= total))
    wrong_count, ignored_count = torch.stack([wrong.sum(), ignored.sum()]).tolist()
    if wrong_count:
        at = int(wrong.nonzero()[0, 0])
        rule = f"must be in [0, {total}) or ignore_index={ignore_index}: shift and mask targets before the loss"
        raise ValueError(f"targets[{at}]={int(targets[at])} {rule} ({wrong_count} such targets)")
    return (~ignored).nonzero()[:, 0] if ignored_count else None


def _backend(implementation, hidden, weight):
    """The module that does the work."""
    if implementation not in ("auto", "torch", "triton"):
        raise ValueError(f"implementation={implementation!r} must be 'auto', 'torch' or 'triton'")
    if implementation == "auto":
        implementation = "triton" if hidden.is_cuda and hidden.dtype != torch.float64 else "torch"
    if implementation == "triton":
        interpreted = linear_logprob_triton.INTERPRETED
        if not (hidden.is_cuda or interpreted):
            raise ValueError(f"implementation='triton' on {hidden.device} needs CUDA, or TRITON_INTERPRET=1 at import")
        if hidden.dtype == torch.float64 and not interpreted:
            raise ValueError("implementation='triton' in float64: no tiles for it on a GPU; use 'torch'")
        row_bytes = hidden.shape[1] * hidden.element_size()
        if row_bytes % 16:
            found = f"a row of H={hidden.shape[1]} {hidden.dtype} has {row_bytes} bytes"
            raise ValueError(f"{found}, not a multiple of 16: pad H, or use implementation='torch'")
        for name, tensor in (("hidden", hidden), ("weight", weight)):
            if tensor.data_ptr() % 16:
                raise ValueError(f"{name} starts at {tensor.data_ptr()}, not a multiple of 16 bytes: pass {name}.clone()")
    return BACKENDS[implementation]


class _LinearLogprob(torch.autograd.Function):
    """Forward keeps row statistics only; backward computes the logits again, chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, kept, promise, entropy, shard, backend):
        with torch.cuda.device_of(hidden):  # where Triton launches
            logprob, ent, m, l = backend.forward(hidden, weight, targets, kept, entropy, shard)
        ctx.save_for_backward(hidden, weight, targets, kept, promise, m, l, ent)
        ctx.shard, ctx.backend = shard, backend
        ctx.set_materialize_grads(False)
        if promise is not None and entropy:
            ctx.mark_non_differentiable(ent)
        return logprob, ent

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g, e):
        hidden, weight, targets, kept, promise, m, l, ent = ctx.saved_tensors
        g = torch.zeros_like(l) if g is None else g.to(l.dtype)
        e = None if e is None else e.to(l.dtype)
        if promise is not None:
            _promised_scalar(g, promise, kept)
        if ctx.shard.group is None:  # rows without gradient cost nothing; with a group the ranks' chunks must agree
            active = g != 0 if e is None else (g != 0) | (e != 0)
            if not bool(active.all()):
                kept = active.nonzero()[:, 0] if kept is None else kept[active[kept]]
        with torch.cuda.device_of(hidden):
            grads = ctx.backend.backward(
                hidden, weight, targets, kept, m, l, ent, g, e, ctx.shard, ctx.needs_input_grad[0], ctx.needs_input_grad[1]
            )
        return (*grads, None, None, None, None, None, None)


class _OnePass(torch.autograd.Function):
    """With dLoss/dlogprob promised up to a scalar, each chunk's gradients are formed while its logits exist."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, kept, coefficient, entropy, shard, backend):
        promise = hidden.new_zeros(len(hidden), dtype=backend.accumulator(hidden.dtype))
        if isinstance(coefficient, torch.Tensor):
            promise.copy_(coefficient)
        law = coefficient if callable(coefficient) else None
        logprob, ent, *ctx.grads = backend.one_pass(
            hidden, weight, targets, kept, promise, law, entropy, shard, ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        )
        ctx.save_for_backward(kept, promise)
        ctx.set_materialize_grads(False)
        if entropy:
            ctx.mark_non_differentiable(ent)
        return logprob, ent

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g, _):
        if ctx.grads is None:
            raise ValueError("second backward through linear_logprob(coefficient=...): its gradients exist once; call it again")
        grads, ctx.grads = ctx.grads, None
        scalar = _promised_scalar(g, ctx.saved_tensors[1], ctx.saved_tensors[0])
        if scalar != 1.0:
            grads = [None if grad is None else grad.mul_(scalar) for grad in grads]
        return (*grads, None, None, None, None, None, None)


def _promised_scalar(g, promise, kept):
    """s with g = s * promise on the kept rows; ValueError where there is none. O(T)."""
    if kept is not None:
        g, promise = g[kept], promise[kept]
    if not len(g):
        return 1.0
    g, promise = g.double(), promise.double()
    s = (g * promise).sum() / (promise * promise).sum().clamp_(min=1e-300)
    s, error, largest = torch.stack([s, (g - s * promise).abs().max(), g.abs().max()]).tolist()
    if math.isfinite(s) and not error <= 1e-5 * largest:  # a loss of NaN has gradients of NaN: they pass, the trainer looks
        raise ValueError(
            f"dLoss/dlogprob differs from s * coefficient by {error:.3g} (s = {s:.6g}, largest gradient {largest:.3g}): "
            "the loss must be s * (coefficient . logprob); leave coefficient out for any other loss"
        )
    return s
