"""Causal attention over packed documents, in pieces that merge exactly (Dao et al., arXiv:2205.14135, 2307.08691).

    s[i, j] = scale * q[i] . k[j]     for keys start[i] <= k_offset + j <= q_offset + i, else -inf
    lse[i]  = log sum_j exp(s[i, j])          out[i] = sum_j exp(s[i, j] - lse[i]) v[j]

Two pieces of the keys merge as   lse = logaddexp(lse1, lse2),   out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2,   so a ring
over context-parallel ranks calls `attention_forward` once per block of keys on the same (out, lse), which starts as (0, -inf).
Backward, with p = exp(s - lse) from the merged lse and delta[i] = sum_d dout[i, d] out[i, d]:

    dv[j] = sum_i p[i, j] dout[i]      ds = p (dout[i] . v[j] - delta[i])      dq = scale ds k      dk = scale ds^T q

Shapes: q, out, dout, dq [Tq, N, D]; k, v, dk, dv [Tk, G, D]; lse, delta [Tq, N]; start [Tq] int64.
T packed tokens, N query heads, G key/value heads (N a multiple of G), D head size. Accumulators are fp32, fp64 for fp64 inputs.
"""
import torch

from nb_kernels import attention_torch


def reference(q, k, v, cu_seqlens, scale=None):
    """The definition, one document and one dense score matrix at a time; tests call it in float64."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outs = []
    for a, b in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:]):
        qd, kd, vd = (x[a:b].transpose(0, 1) for x in (q, k, v))
        kd, vd = (x.repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (kd, vd))
        s = (qd @ kd.mT * scale).masked_fill(torch.ones(b - a, b - a, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
        outs.append((s.softmax(-1) @ vd).transpose(0, 1))
    return torch.cat(outs)


def document_starts(cu_seqlens):
    """cu_seqlens [S+1] -> start [T]: the pack position at which each token's document begins."""
    return torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff()).long()


def attention_forward(q, k, v, out, lse, *, start, q_offset, k_offset, scale):
    """Merge the attention of q over one block of keys into (out, lse) in place; out stays normalised."""
    if q.numel() and k.numel():
        with torch.no_grad():
            attention_torch.forward(q, k, v, out, lse, start, q_offset, k_offset, scale)


def attention_backward(dout, q, k, v, lse, delta, dq, dk, dv, *, start, q_offset, k_offset, scale):
    """Add this block's gradients to dq, dk, dv in place; lse and delta are those of all blocks together."""
    if q.numel() and k.numel():
        with torch.no_grad():
            attention_torch.backward(dout, q, k, v, lse, delta, dq, dk, dv, start, q_offset, k_offset, scale)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, scale):
        acc = attention_torch.accumulator(q.dtype)
        start = document_starts(cu_seqlens)
        out = torch.zeros(q.shape, dtype=acc, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=acc, device=q.device)
        attention_forward(q, k, v, out, lse, start=start, q_offset=0, k_offset=0, scale=scale)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, start)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, start = ctx.saved_tensors
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
        attention_backward(dout, q, k, v, lse, delta, dq, dk, dv, start=start, q_offset=0, k_offset=0, scale=ctx.scale)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def attention(q, k, v, cu_seqlens, *, scale=None):
    """Packed causal attention on one rank: q [T,N,D], k, v [T,G,D], cu_seqlens [S+1] -> out [T,N,D], differentiable."""
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if q.device.type == "cpu":
        return attention_torch.documents(q, k, v, cu_seqlens, scale)
    return _Packed.apply(q, k, v, cu_seqlens, scale)
