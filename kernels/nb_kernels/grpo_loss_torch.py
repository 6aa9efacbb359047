"""The torch path of grpo_loss: the coefficients by their formulas, without autograd, on any device."""
from __future__ import annotations

import torch

LIMIT = 20.0


def sequence_sums(x, weight, cu_seqlens):
    """[2, S]: sums of x and counts over the tokens of weight other than 0 in each sequence; the order of the sums is fixed."""
    kept = weight != 0
    rows = torch.stack([x.where(kept, 0), kept.to(x.dtype)], 1)  # [T, 2]
    return torch.segment_reduce(rows, "sum", offsets=cu_seqlens.long(), axis=0, unsafe=True).T.contiguous()


def token_terms(streams, mean, o, metrics):
    """-> d_logprob [T], d_sequence [T] or None, d_entropy [T] or None, totals [len(metrics)] float64.

    mean [T] is the sequence's mean log-ratio; with it the policy's part of the gradient is d_sequence, to be summed over each
    sequence by the caller.
    """
    weight, zero = streams["weight"], streams["weight"].new_zeros(())
    kept = weight != 0
    values = {name: None if x is None else x.where(kept, zero) for name, x in streams.items()}
    logprob, advantage = values["logprob"], values["advantage"]
    old = logprob if values["old"] is None else values["old"]
    x = logprob - old
    token_flows, drift = x.abs() <= LIMIT, x.clamp(-LIMIT, LIMIT)
    token_ratio = drift.exp()
    if mean is not None:
        x = mean.where(kept, zero)
    r = x.clamp(-LIMIT, LIMIT).exp()
    low, high = r < 1 - o.clip_low, r > 1 + o.clip_high
    clipped = r.clamp(1 - o.clip_low, 1 + o.clip_high)
    negative, positive = advantage < 0, advantage > 0
    bounded = negative & (r > o.dual_clip) if o.dual_clip is not None else torch.zeros_like(kept)
    if o.objective == "cispo":
        slope = -clipped * advantage
        policy = slope * logprob
        counted_low, counted_high = low & kept, high & kept
    else:
        counted_low, counted_high = low & negative, high & positive
        policy = -torch.minimum(r * advantage, clipped * advantage)
        slope = (-r * advantage).masked_fill(counted_low | counted_high | bounded | (x.abs() > LIMIT), 0)
        if o.dual_clip is not None:
            policy = policy.where(~bounded, -o.dual_clip * advantage)
    mismatch = zero.expand_as(x) if values["behaviour"] is None else (old - values["behaviour"]).clamp(-LIMIT, LIMIT)
    importance = mismatch.exp()
    capped = torch.zeros_like(kept)
    if o.importance_cap is not None:
        capped = importance > o.importance_cap
        q = importance.clamp(max=o.importance_cap)
        policy, slope = policy * q, slope * q
    loss, d_sequence = policy, None
    if mean is not None:
        d_sequence, slope = weight * slope, torch.zeros_like(slope)
    kl = zero.expand_as(x)
    if o.kl is not None:
        distance = values["ref"] - logprob
        d = distance.clamp(-LIMIT, LIMIT)
        if o.kl == "k1":
            kl, kl_slope = -d, torch.ones_like(d)
        elif o.kl == "k2":
            kl, kl_slope = d * d / 2, -d
        else:
            kl, kl_slope = d.exp() - 1 - d, 1 - d.exp()
        kl_slope = kl_slope.masked_fill(distance.abs() > LIMIT, 0)
        if o.kl_grad == "unbiased":
            kl_slope = token_ratio * (kl_slope + kl.masked_fill(~token_flows, 0))
            loss = loss + o.kl_coefficient * kl * token_ratio
        else:
            loss = loss + o.kl_coefficient * kl
        slope = slope + o.kl_coefficient * kl_slope
    d_entropy, entropy = None, zero.expand_as(x)
    if values["entropy"] is not None:
        entropy = values["entropy"]
        loss = loss - o.entropy_coefficient * entropy
        d_entropy = -o.entropy_coefficient * weight
    not_finite = torch.zeros_like(kept)
    for stream in streams.values():
        if stream is not None:
            not_finite = not_finite | (kept & ~stream.isfinite())
    columns = {
        "loss": weight * loss,
        "tokens": kept,
        "not_finite": not_finite,
        "ratio": r.where(kept, zero),
        "ratio_squared": (r * r).where(kept, zero),
        "clip_low": counted_low,
        "clip_high": counted_high,
        "clip_dual": bounded,
        "kl": kl,
        "kl_old": token_ratio - 1 - drift,
        "entropy": entropy,
        "importance": importance.where(kept, zero),
        "importance_capped": capped & kept,
        "kl_behaviour": importance - 1 - mismatch,
    }
    totals = torch.stack([columns[name].sum(dtype=torch.float64) for name in metrics])
    return weight * slope, d_sequence, d_entropy, totals
