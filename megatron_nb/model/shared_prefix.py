"""Attention in a pack whose documents share prefixes (data/prefix.py), from the kernel's exact merging of key blocks.

A document's tokens see themselves causally, and all of the prefix: two blocks of keys, merged in fp32 (out, lse). The prefix
adds up the gradients of every document behind it.
"""

from __future__ import annotations

import torch
from nb_kernels.attention import attention_backward, attention_forward

Shared = list[tuple[int, int, int, int]]


def shared_prefix_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, shared: Shared, scale: float,
    implementation: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """q [T, N, D]; k, v [T, G, D]; start [T]; shared as in Batch: (first, stop, of, end) -> [T, N, D] in q's dtype."""
    return _SharedPrefix.apply(q.contiguous(), k.contiguous(), v.contiguous(), start, shared, scale, implementation)


def _blocks(start: torch.Tensor, shared: Shared):
    """(queries, their keys, keyword arguments): every document's own keys, then the prefix of each run of documents."""
    everything = slice(0, len(start))
    yield everything, everything, {"start": start, "q_offset": 0, "k_offset": 0}
    for first, stop, of, end in shared:  # all keys lie before all queries
        rows = slice(first, stop)
        yield rows, slice(of, end), {"start": torch.full_like(start[rows], of), "q_offset": first, "k_offset": of}


class _SharedPrefix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, start, shared, scale, implementation):
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device)
        for rows, keys, place in _blocks(start, shared):
            attention_forward(
                q[rows], k[keys], v[keys], out[rows], lse[rows], **place, scale=scale, implementation=implementation
            )
        ctx.save_for_backward(q, k, v, out, lse, start)
        ctx.rest = shared, scale, implementation
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, start = ctx.saved_tensors
        shared, scale, implementation = ctx.rest
        dout = dout.contiguous()
        delta = (dout.to(out.dtype) * out).sum(-1)
        dq, dk, dv = (torch.zeros(x.shape, dtype=out.dtype, device=x.device) for x in (q, k, v))
        for rows, keys, place in _blocks(start, shared):
            attention_backward(
                dout[rows], q[rows], k[keys], v[keys], lse[rows], delta[rows], dq[rows], dk[keys], dv[keys],
                **place, scale=scale, implementation=implementation,
            )  # fmt: skip
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None
