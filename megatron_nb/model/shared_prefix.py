"""Attention in a pack whose documents share prefixes (data/prefix.py), in two ways that agree.

A document's tokens see themselves causally, and all of the prefix. `merged`: two blocks of keys, merged exactly in fp32 (out,
lse) by the kernel. `whole`: prefix and document beside each other once more, as rows of a plain pack; on a CPU torch's fused
attention of such rows takes half the time of the merging. Either way a prefix adds up the gradients of all documents behind it.
"""

from __future__ import annotations

import functools

import torch
from nb_kernels.attention import attention, attention_backward, attention_forward

Shared = list[tuple[int, int, int, int]]


def shared_prefix_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, shared: Shared, scale: float,
    implementation: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """q [T, N, D]; k, v [T, G, D]; start [T]; shared as in Batch: (first, stop, of, end) -> [T, N, D] in q's dtype."""
    way = whole if q.device.type == "cpu" else merged
    return way(q, k, v, start, shared, scale, implementation)


def whole(q, k, v, start, shared, scale, implementation="auto"):
    """By copies of the prefixes: the queries of a copy are computed for nothing, which is cheap beside a layer's products."""
    source, place, cu_seqlens = _rows(tuple(start.unique_consecutive().tolist()), len(start), tuple(shared))
    q, k, v = (x.index_select(0, source) for x in (q, k, v))
    return attention(q, k, v, cu_seqlens, scale=scale, implementation=implementation).index_select(0, place)


@functools.lru_cache(maxsize=64)
def _rows(starts: tuple[int, ...], T: int, shared: tuple) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of the pack of whole rows, the place of each token in it, and its bounds. Every layer asks for the same."""
    source, place, bounds = [], [], [0]
    for a, b in zip(starts, (*starts[1:], T)):
        of, end = next(((of, end) for first, stop, of, end in shared if first <= a < stop), (a, a))
        source += [torch.arange(of, end), torch.arange(a, b)]
        bounds.append(bounds[-1] + end - of + b - a)
        place.append(torch.arange(bounds[-1] - (b - a), bounds[-1]))
    return torch.cat(source), torch.cat(place), torch.tensor(bounds)


def merged(q, k, v, start, shared, scale, implementation="auto"):
    """By blocks of keys: the documents' own, then their prefix."""
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
