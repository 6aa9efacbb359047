"""The chunked torch path of linear_logprob: any device and dtype, never [T, V], workspace independent of T.

Row statistics are kept as (m, l, s, zt): maximum of z, sum of e^(z - m), sum of e^(z - m) (z - m), logit of the target. Sums of
z itself would lose the digits that logits shifted by 1e4 need.
"""
from __future__ import annotations

import math

import torch
import torch.distributed as dist

TOKEN_CHUNK, VOCAB_CHUNK = 512, 8192  # logits alive at once where they are computed twice
ONE_PASS_LOGITS = 25 << 20  # logits alive at once where they are computed once; holds 512 tokens for V up to 51200


def accumulator(dtype):
    """float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows_of(kept, T, size):
    """The rows in pieces of `size`: slices, or pieces of the index `kept` of the rows that count."""
    if kept is None:
        return [slice(i, min(i + size, T)) for i in range(0, T, size)]
    return list(kept.split(size)) if len(kept) else []


def merge(stats, group):
    """This rank's row statistics [4, n] -> those of the whole vocabulary, by two small all-reduces.

    A rank that holds padding only brings maximum -inf and zeros.
    """
    if group is None:
        return stats
    m, l, s, zt = stats
    whole = m.clone()
    dist.all_reduce(whole, dist.ReduceOp.MAX, group)
    shift = (m - whole).clamp_(min=-1e30)  # finite, so that an empty rank's 0 * shift is 0
    decay = shift.exp()
    sums = torch.stack([l * decay, (s + l * shift) * decay, zt])
    dist.all_reduce(sums, group=group)
    return whole, *sums


def outputs(stats, kept, T, entropy):
    """Merged statistics of the kept rows -> (logprob, entropy or None, m, l), each [T], 0 on the other rows."""
    m, l, s, zt = stats
    log_l = l.log()
    rows = [(zt - m) - log_l, log_l - s / l if entropy else None, m, l]
    if kept is None:
        return rows
    return [None if r is None else r.new_zeros(T).index_copy_(0, kept, r) for r in rows]


def reduced(dh, shard):
    """dhidden summed over the vocabulary's ranks, unless another operator does that."""
    if shard.group is not None and shard.reduce_hidden_grad:
        dist.all_reduce(dh, group=shard.group)
    return dh


def _scaled(hidden, rows, temperature, dtype):
    """hidden[rows] / temperature in the accumulator's dtype: both z and dweight need it."""
    chunk = hidden[rows].to(dtype)
    return chunk if temperature == 1.0 else chunk / temperature


def _target_columns(targets, rows, shard):
    """(rows within the piece whose target lives on this rank, its local column)."""
    local = targets[rows] - shard.first
    here = ((local >= 0) & (local < shard.valid)).nonzero()[:, 0]
    return here, local[here]


def _vocabulary(weight, shard, size, dtype):
    """(start, rows of weight) in pieces, without the padding, in the accumulator's dtype."""
    for v in range(0, shard.valid, size):
        yield v, weight[v : min(v + size, shard.valid)].to(dtype)


def _unwritten(weight, kept, T, shard, dtype):
    """dweight whose true rows the first chunk overwrites (beta = 0), which saves to clear and to read it."""
    dweight = torch.empty_like(weight, dtype=dtype)
    dweight[shard.valid if (T if kept is None else len(kept)) else 0 :].zero_()
    return dweight


def forward(hidden, weight, targets, kept, entropy, shard):
    """-> (logprob, entropy or None, m, l); the last two are all that the backward pass needs."""
    T, dtype = len(hidden), accumulator(hidden.dtype)
    n, c = max(1, min(TOKEN_CHUNK, T)), min(VOCAB_CHUNK, max(shard.valid, 1))
    buffer, spare = hidden.new_empty(n * c, dtype=dtype), hidden.new_empty(n * c if entropy else 0, dtype=dtype)
    stats = hidden.new_zeros(4, T if kept is None else len(kept), dtype=dtype)
    stats[0] = -math.inf
    done = 0
    for rows in rows_of(kept, T, n):
        h = _scaled(hidden, rows, shard.temperature, dtype)
        m, l, s, zt = stats[:, done : done + len(h)]
        done += len(h)
        at, column = _target_columns(targets, rows, shard)
        for v, w in _vocabulary(weight, shard, c, dtype):
            z = buffer[: len(h) * len(w)].view(len(h), len(w))
            torch.mm(h, w.T, out=z)
            inside = (column >= v) & (column < v + len(w))
            zt[at[inside]] = z[at[inside], column[inside] - v]
            new = torch.maximum(m, z.amax(1))
            shift = (m - new).clamp_(min=-1e30)  # finite: the first chunk comes from m = -inf, l = s = 0
            decay = shift.exp()
            z.sub_(new[:, None])
            if entropy:
                p = torch.exp(z, out=spare[: z.numel()].view_as(z))
                s.add_(l * shift).mul_(decay).add_(torch.linalg.vecdot(p, z))
            else:
                p = z.exp_()
            l.mul_(decay).add_(p.sum(1))
            m.copy_(new)
    return outputs(merge(stats, shard.group), kept, T, entropy)


def backward(hidden, weight, targets, kept, m, l, ent, g, e, shard, want_hidden, want_weight):
    """Compute the logits again, piece by piece -> (dhidden or None, dweight or None). e is None without entropy."""
    T, dtype = len(hidden), accumulator(hidden.dtype)
    n, c = max(1, min(TOKEN_CHUNK, T)), min(VOCAB_CHUNK, max(shard.valid, 1))
    buffer, spare = hidden.new_empty(n * c, dtype=dtype), hidden.new_empty(0 if e is None else n * c, dtype=dtype)
    dhidden = torch.zeros_like(hidden) if want_hidden else None
    dweight, beta = _unwritten(weight, kept, T, shard, dtype) if want_weight else None, 0
    for rows in rows_of(kept, T, n):
        h = _scaled(hidden, rows, shard.temperature, dtype)
        dh = torch.zeros_like(h) if want_hidden else None
        at, column = _target_columns(targets, rows, shard)
        # dz = factor * (p l - l onehot), or with entropy factor * (p l (g + e (log p + entropy)) - g l onehot): what depends on
        # the row alone moves from [n, c] to the rows of h and dh
        total, gr = l[rows][:, None], g[rows][:, None]
        factor = -gr / total if e is None else -1 / total
        weighted = h * factor
        for v, w in _vocabulary(weight, shard, c, dtype):
            dz = buffer[: len(h) * len(w)].view(len(h), len(w))
            torch.mm(h, w.T, out=dz)
            dz.sub_(m[rows][:, None])
            inside = (column >= v) & (column < v + len(w))
            if e is None:
                dz.exp_()[at[inside], column[inside] - v] -= total[at[inside], 0]
            else:
                er = e[rows][:, None]
                p = torch.exp(dz, out=spare[: dz.numel()].view_as(dz))
                dz.mul_(er).add_(gr + er * (ent[rows][:, None] - total.log())).mul_(p)
                dz[at[inside], column[inside] - v] -= (gr * total)[at[inside], 0]
            if want_hidden:
                dh.addmm_(dz, w)
            if want_weight:
                dweight[v : v + len(w)].addmm_(dz.T, weighted, beta=beta)
        beta = 1
        if want_hidden:
            dhidden[rows] = reduced(dh.mul_(factor / shard.temperature), shard).to(hidden.dtype)
    return dhidden, dweight.to(weight.dtype) if want_weight else None


def one_pass(hidden, weight, targets, kept, coefficient, law, entropy, shard, want_hidden, want_weight):
    """Log-probabilities and gradients for dLoss/dlogprob = coefficient -> (logprob, entropy or None, dhidden, dweight).

    Three matrix products a chunk, which holds all logits of its few rows. law: fills `coefficient` from (logprob, rows).
    """
    T, V, dtype = len(hidden), shard.valid, accumulator(hidden.dtype)
    n = max(1, min(T, TOKEN_CHUNK, ONE_PASS_LOGITS // max(V, 1)))
    buffer = hidden.new_empty(n * V, dtype=dtype)
    logprob = hidden.new_zeros(T, dtype=dtype)
    ent = hidden.new_zeros(T, dtype=dtype) if entropy else None
    dhidden = torch.zeros_like(hidden) if want_hidden else None
    dweight, beta = _unwritten(weight, kept, T, shard, dtype) if want_weight else None, 0
    piece = max(V, 1) if weight.dtype == dtype else VOCAB_CHUNK  # converted weights are bounded too
    for rows in rows_of(kept, T, n):
        h = _scaled(hidden, rows, shard.temperature, dtype)
        z = buffer[: len(h) * V].view(len(h), V)
        for v, w in _vocabulary(weight, shard, piece, dtype):
            torch.mm(h, w.T, out=z[:, v : v + len(w)])
        at, column = _target_columns(targets, rows, shard)
        stats = h.new_zeros(4, len(h))
        m, l, s, zt = stats
        m.copy_(z.amax(1) if V else torch.full_like(m, -math.inf))
        zt[at] = z[at, column]
        z.sub_(m[:, None])
        for v in range(0, V if entropy else 0, VOCAB_CHUNK):
            part = z[:, v : v + VOCAB_CHUNK]
            s.add_(torch.linalg.vecdot(part.exp(), part))
        torch.sum(z.exp_(), 1, out=l)
        whole, total, s, zt = merge(stats, shard.group)
        log_l = total.log()
        logprob[rows] = (zt - whole) - log_l
        if law is not None:
            coefficient[rows] = law(logprob[rows], rows).to(dtype)
        if entropy:
            ent[rows] = log_l - s / total
        # z holds p * total (of this shard's maximum): with the target's share off, dz is z * -coefficient / total
        if shard.group is not None:
            z.mul_((m - whole).exp_()[:, None])
        z[at, column] -= total[at]
        factor = -(coefficient[rows] / total)[:, None]
        if want_hidden:
            dh = torch.zeros_like(h)
            for v, w in _vocabulary(weight, shard, piece, dtype):
                dh.addmm_(z[:, v : v + len(w)], w)
            dhidden[rows] = reduced(dh.mul_(factor / shard.temperature), shard).to(hidden.dtype)
        if want_weight:
            dweight[:V].addmm_(z.T, h * factor, beta=beta)
        beta = 1
    return logprob, ent, dhidden, dweight.to(weight.dtype) if want_weight else None


def top_k(hidden, weight, k, shard):
    """-> (ids [T, k], log-probabilities [T, k]) of the k likeliest tokens, best first; no gradients."""
    T, dtype = len(hidden), accumulator(hidden.dtype)
    n, c = max(1, min(TOKEN_CHUNK, T)), min(VOCAB_CHUNK, max(shard.valid, 1))
    ids, logprob = hidden.new_zeros(T, k, dtype=torch.int64), hidden.new_zeros(T, k, dtype=dtype)
    for rows in rows_of(None, T, n):
        h = _scaled(hidden, rows, shard.temperature, dtype)
        stats = h.new_zeros(4, len(h))
        m, l, *_ = stats
        m.fill_(-math.inf)
        best, at = h.new_full((len(h), k), -math.inf), ids.new_zeros(len(h), k)
        for v, w in _vocabulary(weight, shard, c, dtype):
            z = h @ w.T
            new = torch.maximum(m, z.amax(1))
            l.mul_((m - new).exp_()).add_((z - new[:, None]).exp_().sum(1))
            m.copy_(new)
            local, column = z.topk(min(k, len(w)), 1)
            best, at = _best(torch.cat([best, local], 1), torch.cat([at, column + (v + shard.first)], 1), k)
        if shard.group is not None:
            world = dist.get_world_size(shard.group)
            gathered = [torch.empty_like(best) for _ in range(world)], [torch.empty_like(at) for _ in range(world)]
            dist.all_gather(gathered[0], best, group=shard.group)
            dist.all_gather(gathered[1], at, group=shard.group)
            best, at = _best(torch.cat(gathered[0], 1), torch.cat(gathered[1], 1), k)
        m, l, *_ = merge(stats, shard.group)
        ids[rows], logprob[rows] = at, (best - m[:, None]) - l.log()[:, None]
    return ids, logprob


def _best(values, ids, k):
    values, at = values.topk(k, 1)
    return values, ids.gather(1, at)
