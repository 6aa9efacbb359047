"""Causal attention over packed documents, in pieces that merge exactly (Dao et al., arXiv:2205.14135, 2307.08691).

    s[i, j] = scale * q[i] . k[j]     for keys start[i] <= k_offset + j <= q_offset + i, else -inf
    lse[i]  = log sum_j exp(s[i, j])          out[i] = sum_j exp(s[i, j] - lse[i]) v[j]

Two pieces of the keys merge as   lse = logaddexp(lse1, lse2),   out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2,   so a ring
over context-parallel ranks calls `attention_forward` once per block of keys on the same (out, lse), which starts as (0, -inf).
Backward, with p = exp(s - lse) from the merged lse and delta[i] = sum_d dout[i, d] out[i, d]:

    dv[j] = sum_i p[i, j] dout[i]      ds = p (dout[i] . v[j] - delta[i])      dq = scale ds k      dk = scale ds^T q

Shapes: q, out, dout, dq [Tq, N, D]; k, v, dk, dv [Tk, G, D]; lse, delta [Tq, N]; start [Tq] int64, never decreasing.
T packed tokens, N query heads, G key/value heads (N a multiple of G), D head size. Accumulators are fp32, fp64 for fp64 inputs.
Cost: 4 D (forward) and 14 D (backward: 7 matmuls, of which 2 repeat the scores) FLOPs per head and visible pair; memory O(T).

On CUDA 16-bit inputs run the Triton kernels (attention_triton.py), all else the tiled torch path (attention_torch.py).
"""
import math

import torch
from torch.utils.weak import WeakIdKeyDictionary

from nb_kernels import attention_torch, attention_triton


def reference(q, k, v, cu_seqlens, scale=None, window=None):
    """The definition, one document and one dense score matrix at a time; tests call it in float64."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outs = [q[:0]]
    for a, b in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]):
        qd, kd, vd = (x[a:b].transpose(0, 1) for x in (q, k, v))
        kd, vd = (x.repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (kd, vd))
        distance = torch.arange(b - a, device=q.device)[:, None] - torch.arange(b - a, device=q.device)
        hidden = (distance < 0) | (distance >= (window or b - a))
        s = (qd @ kd.mT * scale).masked_fill(hidden, -torch.inf)
        outs.append((s.softmax(-1) @ vd).transpose(0, 1))
    return torch.cat(outs)


def cases(device, dtype):
    """(name, (q, k, v, cu_seqlens)): ragged packs of every head size; on CUDA also the sizes that a benchmark times."""
    shapes = [("docs1-D64", [1, 62, 1, 40], 2, 1, 64), ("D96", [70, 9], 2, 2, 96), ("D128", [63], 5, 1, 128)]
    if device != "cpu":
        shapes += [(f"T{T}-D{D}", [T], N, G, D) for T, N, G, D in [(8192, 20, 4, 128), (32768, 20, 4, 128), (8192, 32, 8, 64)]]
        shapes += [("packed32k", [257, 4096, 1, 12000, 8000, 8414], 20, 4, 128), ("D256", [777, 2000], 8, 2, 256)]
    for name, lengths, N, G, D in shapes:
        q, k, v = (torch.randn(sum(lengths), heads, D, device=device, dtype=dtype) for heads in (N, G, G))
        yield name, (q, k, v, torch.tensor([0, *lengths], device=device).cumsum(0))


def document_starts(cu_seqlens):
    """cu_seqlens [S+1] -> start [T] int64: the pack position at which each token's document begins."""
    return torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff()).long()


def attention_forward(q, k, v, out, lse, *, start, q_offset, k_offset, scale, window=None, implementation="auto"):
    """Merge the attention of q over one block of keys into (out, lse) in place; out stays normalised.

    q [Tq, N, D]; k, v [Tk, G, D]; out [Tq, N, D] and lse [Tq, N] in fp32 (fp64 for fp64 inputs), at first 0 and -inf.
    start [Tq] int64: pack position where the document of each row begins; must not decrease.
    q_offset, k_offset: pack positions of the first row and key. window: a row sees its last `window` positions only.
    implementation: "auto" (triton for 16-bit on CUDA, torch elsewhere), "torch", "triton".
    Raises ValueError for shapes, types, devices, layouts that do not fit.
    """
    path = _path(implementation, q)
    _check(path, q=(q, "QND"), k=(k, "KGD"), v=(v, "KGD"), out=(out, "QND*"), lse=(lse, "QN*"), start=(start, "Q"))
    _check_numbers(q_offset, k_offset, scale, window)
    if q.numel() and k.numel():
        with torch.no_grad():
            path.forward(q, k, v, out, lse, _low(start, q_offset, window), q_offset, k_offset, scale)


def attention_backward(
    dout, q, k, v, lse, delta, dq, dk, dv, *, start, q_offset, k_offset, scale, window=None, implementation="auto"
):
    """Add this block's gradients to dq, dk, dv in place; lse and delta = sum(dout * out, -1) are those of all blocks together.

    dq, dk, dv have the shapes of q, k, v, in fp32 (fp64 for fp64 inputs); the rest as in attention_forward.
    """
    path = _path(implementation, q)
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()  # autograd may hand over an expanded gradient
    _check(
        path, q=(q, "QND"), k=(k, "KGD"), v=(v, "KGD"), dout=(dout, "QND"), lse=(lse, "QN*"), delta=(delta, "QN*"),
        dq=(dq, "QND*"), dk=(dk, "KGD*"), dv=(dv, "KGD*"), start=(start, "Q"),
    )  # fmt: skip
    _check_numbers(q_offset, k_offset, scale, window)
    if q.numel() and k.numel():
        with torch.no_grad():
            path.backward(dout, q, k, v, lse, delta, dq, dk, dv, _low(start, q_offset, window), q_offset, k_offset, scale)


def attention(q, k, v, cu_seqlens, *, scale=None, window=None, implementation="auto"):
    """Packed causal attention on one rank: q [T, N, D]; k, v [T, G, D]; cu_seqlens [S+1] -> out [T, N, D], differentiable.

    scale: 1 / sqrt(D) by default. window, implementation: as in attention_forward. Deterministic.
    Raises ValueError also when cu_seqlens does not rise from 0 to T.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    path = _path(implementation, q)
    _check(path, q=(q, "QND"), k=(k, "QGD"), v=(v, "QGD"))
    _check_numbers(0, 0, scale, window)
    start = _checked_starts(cu_seqlens, q)
    if path is attention_torch and q.device.type == "cpu" and window is None and q.numel():
        return attention_torch.documents(q, k, v, cu_seqlens, scale)
    return _Packed.apply(q, k, v, start, scale, window, path)


class _Packed(torch.autograd.Function):
    """One block of keys: kernels write results once, in the inputs' own dtype, from fp32 registers."""

    @staticmethod
    def forward(ctx, q, k, v, start, scale, window, path):
        acc = attention_torch.accumulator(q.dtype)
        start = _low(start, 0, window)
        lse = torch.full(q.shape[:2], -math.inf, dtype=acc, device=q.device)
        fresh = path is attention_triton
        out = torch.empty_like(q) if fresh else torch.zeros(q.shape, dtype=acc, device=q.device)
        if q.numel():
            path.forward(q, k, v, out, lse, start, 0, 0, scale, fresh)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, start)
        ctx.rest = scale, path
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse, start = ctx.saved_tensors
        scale, path = ctx.rest
        dout = dout.contiguous()
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        fresh = path is attention_triton
        grads = [torch.empty_like(x) if fresh else torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v)]
        if q.numel():
            path.backward(dout, q, k, v, lse, delta, *grads, start, 0, 0, scale, fresh)
        return *(g.to(q.dtype) for g in grads), None, None, None, None


def _low(start, q_offset, window):
    """A window only moves the first key that a row sees."""
    if window is None:
        return start
    position = torch.arange(q_offset, q_offset + len(start), device=start.device)
    return torch.maximum(start, position - window + 1)


def _path(implementation, q):
    if implementation == "auto":
        return attention_triton if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) else attention_torch
    if implementation == "triton":
        if not (attention_triton.INTERPRETED or q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)):
            raise ValueError(f"implementation='triton' needs 16-bit CUDA tensors, q is {q.dtype} on {q.device}; use 'torch'")
        return attention_triton
    if implementation == "torch":
        return attention_torch
    raise ValueError(f"implementation={implementation!r} must be 'auto', 'torch' or 'triton'")


def _check(path, **tensors):
    """Each tensor against its pattern: Q, K tokens; N, G heads; D head size; * an accumulator."""
    q = tensors["q"][0]
    sizes, acc = {}, attention_torch.accumulator(q.dtype)
    if not q.dtype.is_floating_point:
        raise ValueError(f"q is {q.dtype}: attention takes floating-point tensors")
    for name, (x, pattern) in tensors.items():
        axes = pattern.rstrip("*")
        want = torch.int64 if name == "start" else acc if "*" in pattern else q.dtype
        if x.dtype != want or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, must be {want} on {q.device} (q is {q.dtype})")
        if x.dim() != len(axes):
            raise ValueError(f"{name} has shape {list(x.shape)}, must have {len(axes)} dimensions [{', '.join(axes)}]")
        for axis, size in zip(axes, x.shape):
            if sizes.setdefault(axis, size) != size:
                raise ValueError(f"{name} has shape {list(x.shape)}: {axis} is {sizes[axis]} in the tensors before it")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name} has strides {x.stride()}: its last dimension must be contiguous; call .contiguous()")
        step = 16 // x.element_size()
        if path is attention_triton and len(axes) == 3 and x.numel():
            if x.data_ptr() % 16 or (x.stride(0) % step and len(x) > 1) or (x.stride(1) % step and x.shape[1] > 1):
                raise ValueError(f"{name} must have 16-byte aligned rows, has strides {x.stride()}; pass a contiguous copy")
            if x.stride(0) < (x.shape[1] - 1) * x.stride(1) + x.shape[2] and len(x) > 1:
                raise ValueError(f"{name} has strides {x.stride()}: a token's heads must lie together; call .contiguous()")
    if sizes["G"] == 0 or sizes["N"] % sizes["G"] or sizes["D"] == 0:
        raise ValueError(f"{sizes['N']} query heads of size {sizes['D']} must be a positive multiple of {sizes['G']} key heads")


def _check_numbers(q_offset, k_offset, scale, window):
    if q_offset < 0 or k_offset < 0 or max(q_offset, k_offset) >= 2**31:
        raise ValueError(f"q_offset={q_offset}, k_offset={k_offset} must be pack positions in [0, 2^31)")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale={scale} must be positive and finite")
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1: a token sees itself")


_STARTS = WeakIdKeyDictionary()  # cu_seqlens -> (its version, start): one look at the values per pack, not one per layer


def _checked_starts(cu_seqlens, q):
    known = _STARTS.get(cu_seqlens)
    if known is not None and known[0] == cu_seqlens._version and len(known[1]) == len(q) and known[1].device == q.device:
        return known[1]
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.device != q.device:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)} on {cu_seqlens.device}, "
            f"must be int32 or int64 [S+1] on {q.device}"
        )
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != len(q) or any(a >= b for a, b in zip(bounds, bounds[1:])):
        shown = bounds if len(bounds) <= 8 else f"{bounds[:4]} ... {bounds[-3:]}"
        raise ValueError(f"cu_seqlens={shown} must rise from 0 to T = {len(q)}, one step per document")
    start = document_starts(cu_seqlens)
    _STARTS[cu_seqlens] = cu_seqlens._version, start
    return start
