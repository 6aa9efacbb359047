"""The torch path of packed causal attention: the same tiles, merging and memory law as the Triton kernels, on any device.

`forward` and `backward` walk tiles of rows; for each they visit only the keys between the earliest document start and the last
row's own position, and mask only the tiles that touch a document edge or the diagonal. `documents` is the way of one rank that
holds whole documents: torch's fused CPU kernel, documents of like length batched.

Each tile of scores [G, R * rows, keys] costs one matmul, one exp2 and one sum besides the matmul with the values. R = N / G
query heads share one key/value head and are folded into the rows, so the sum over a group is part of the matmul. Scores are
kept in base 2 (log2(e) is folded into the scale): exp2 is the fast exponential on CPU as well as on GPU.

Shapes: q, out [Tq, N, D]; k, v [Tk, G, D]; lse, delta [Tq, N]; low [Tq] = first pack position that a row may see.
"""
import functools
import math

import torch
import torch.nn.functional as F

LOG2E = math.log2(math.e)
TILE_KEYS = 1024
TILE_SCORES = 1 << 19  # rows * keys * heads of one tile: 2 MiB of fp32, the best of 2^18 .. 2^22 on two server CPUs
HEADROOM = 60.0  # exp2 of a score this far above the running reference, summed over 2^20 keys, still fits fp32


def accumulator(dtype):
    """The dtype that sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _tiles(low, q_offset, k_offset, Tk, heads):
    """Yield (rows, [(keys, masked)]) with every pair of slices that holds a visible pair; nothing else is visited."""
    Tq = low.numel()
    size = max(64, min(Tq, 1 << (TILE_SCORES // (TILE_KEYS * heads)).bit_length() - 1)) if Tq else 1
    padded = F.pad(low, (0, -Tq % size), value=0)
    if Tq % size:
        padded[Tq:] = low[-1]
    first, last = (f(padded.view(-1, size), 1).tolist() for f in (torch.amin, torch.amax))
    for i, a in enumerate(range(0, Tq, size)):
        b = min(a + size, Tq)
        lo = min(max(first[i] - k_offset, 0), Tk)
        hi = max(min(q_offset + b - k_offset, Tk), lo)  # one past the last key that the last row sees
        full_lo = min(max(last[i] - k_offset, lo), hi)  # from here every row of the tile sees the key ...
        full_hi = min(max(q_offset + a + 1 - k_offset, full_lo), hi)  # ... up to here
        pieces = [(lo, full_lo, True), (full_lo, full_hi, False), (full_hi, hi, True)]
        tiles = [(slice(c, min(c + TILE_KEYS, e)), masked) for c0, e, masked in pieces for c in range(c0, e, TILE_KEYS)]
        if tiles:
            yield slice(a, b), tiles


def _fold(x, rows, G):  # [T, N, D] -> [G, R * rows, D]
    t, N, D = x[rows].shape
    return x[rows].view(t, G, N // G, D).permute(1, 2, 0, 3).reshape(G, -1, D)


def _unfold(x, t):  # [G, R * t, D] -> [t, N, D]
    G, _, D = x.shape
    return x.view(G, -1, t, D).permute(2, 0, 1, 3).reshape(t, -1, D)


def _mask(scores, low, rows, keys, q_offset, k_offset):
    """Set to -inf what a row may not see; scores [G, R * rows, keys]."""
    key = torch.arange(keys.start, keys.stop, device=scores.device) + k_offset
    row = torch.arange(rows.start, rows.stop, device=scores.device) + q_offset
    hidden = (key < low[rows, None]) | (key > row[:, None])  # [rows, keys]
    scores.view(scores.shape[0], -1, *hidden.shape).masked_fill_(hidden, -math.inf)


def forward(q, k, v, out, lse, low, q_offset, k_offset, scale, fresh=False):
    """Merge the attention of q over k, v into (out, lse) in place; whether they are fresh shows in lse."""
    acc_dtype, (Tk, G, _) = out.dtype, k.shape
    q, k, v = q.to(acc_dtype), *(x.to(acc_dtype).transpose(0, 1).contiguous() for x in (k, v))  # k, v [G, Tk, D]
    cheap = q.device.type == "cpu"  # elsewhere the look at the bound costs more than the maximum that it saves
    for rows, tiles in _tiles(low, q_offset, k_offset, Tk, q.shape[1]):
        t = rows.stop - rows.start
        x = _fold(q, rows, G) * (scale * LOG2E)
        reach = x.norm(dim=-1)  # with the longest key this bounds the scores of a row (Cauchy-Schwarz)
        m = _fold(lse[..., None], rows, G) * LOG2E  # reference of the exponentials, [G, R * t, 1]
        total = (m > -math.inf).to(acc_dtype)  # sum of exp2(score - m): what was merged before counts 1, an empty row 0
        acc = torch.where(total > 0, _fold(out, rows, G), 0.0)  # an empty row may hold anything
        for keys, masked in tiles:
            kt = k[:, keys].mT
            bound = None if masked or not cheap else reach * kt.norm(dim=1).amax(-1, keepdim=True) - m[..., 0]
            if bound is not None and bool(bound.amax() < HEADROOM):
                s = torch.baddbmm(-m, x, kt).exp2_()  # the soft-max is the same for any reference near enough
            else:
                s = torch.bmm(x, kt)
                if masked:
                    _mask(s, low, rows, keys, q_offset, k_offset)
                new = torch.maximum(m, s.amax(-1, keepdim=True))
                finite = new.masked_fill(new == -math.inf, 0.0)
                decay = torch.exp2(m - finite)
                total, acc, m = total * decay, acc * decay, new
                s.sub_(finite).exp2_()
            total = total + s.sum(-1, keepdim=True)
            acc = torch.baddbmm(acc, s, v[:, keys])
        seen = total > 0
        out[rows] = _unfold(torch.where(seen, acc / total, 0.0), t)
        lse[rows] = _unfold(torch.where(seen, m / LOG2E + total.log(), -math.inf), t)[..., 0]


def backward(dout, q, k, v, lse, delta, dq, dk, dv, low, q_offset, k_offset, scale, fresh=False):
    """Add the gradients to dq, dk, dv in place, from the log-sum-exp and delta = sum(dout * out) over all keys; never fresh."""
    acc_dtype, (Tk, G, D) = dq.dtype, k.shape
    q, dout = q.to(acc_dtype), dout.to(acc_dtype)
    k, v = (x.to(acc_dtype).transpose(0, 1).contiguous() for x in (k, v))
    dkt, dvt = (x.new_zeros(G, D, Tk) for x in (k, v))  # transposed: the wide operand of a matmul then lies along its rows
    for rows, tiles in _tiles(low, q_offset, k_offset, Tk, q.shape[1]):
        x, g = _fold(q, rows, G) * (scale * LOG2E), _fold(dout, rows, G)
        m = _fold(lse[..., None].to(acc_dtype), rows, G) * -LOG2E
        d = -_fold(delta[..., None].to(acc_dtype), rows, G)
        dx = torch.zeros_like(x)
        for keys, masked in tiles:
            p = torch.baddbmm(m, x, k[:, keys].mT)
            if masked:
                _mask(p, low, rows, keys, q_offset, k_offset)
            p.exp2_()
            dvt[:, :, keys].baddbmm_(g.mT, p)
            ds = torch.baddbmm(d, g, v[:, keys].mT).mul_(p)
            dkt[:, :, keys].baddbmm_(x.mT, ds)
            dx.baddbmm_(ds, k[:, keys])
        dq[rows] += _unfold(dx, rows.stop - rows.start) * scale
    dk += dkt.permute(2, 0, 1) / LOG2E  # x carries scale * log2(e)
    dv += dvt.permute(2, 0, 1)


@functools.lru_cache(maxsize=64)
def _buckets(bounds):
    """Documents of like length, padded on the right: source of each padded row (or None), place of each token, batch shapes.

    A padded key is seen by padded queries only, because a query sees no later key; so causality is all the masking there is.
    """
    spans = sorted(((b - a, a) for a, b in zip(bounds, bounds[1:]) if b > a), reverse=True)
    shapes, source, place, at = [], [], torch.empty(bounds[-1], dtype=torch.long), 0
    while spans:
        longest = spans[0][0]
        batch = [s for s in spans if s[0] >= longest * 0.8 or longest - s[0] <= 8]
        spans = spans[len(batch):]
        for length, a in batch:
            source.append(torch.arange(a, a + longest).clamp_(max=a + length - 1))
            place[a:a + length] = torch.arange(at, at + length)
            at += longest
        shapes.append((len(batch), longest))
    source = torch.cat(source) if source else place
    identity = torch.equal(source, torch.arange(bounds[-1])) if len(source) == bounds[-1] else False
    return (None if identity else source), place, shapes


def documents(q, k, v, cu_seqlens, scale):
    """Whole documents on one rank: out [T, N, D], differentiable. torch's fused CPU kernel is tiled and skips hidden tiles."""
    source, place, shapes = _buckets(tuple(cu_seqlens.tolist()))
    sizes = [count * length for count, length in shapes]
    pieces = [x if source is None else x.index_select(0, source) for x in (q, k, v)]
    outs = []
    for (count, length), *parts in zip(shapes, *(x.split(sizes) for x in pieces)):
        a, b, c = (x.unflatten(0, (count, length)).transpose(1, 2) for x in parts)
        o = F.scaled_dot_product_attention(a, b, c, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        outs.append(o.transpose(1, 2).flatten(0, 1))
    out = torch.cat(outs) if outs else q.new_zeros(q.shape)
    return out if source is None else out.index_select(0, place)
