"""The Triton path of grpo_loss: one pass over the streams, and two sums over sequences for ratio="sequence"."""
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

KL = {None: 0, "k1": 1, "k2": 2, "k3": 3}
BLOCK = 1024


@triton.jit
def _sequence_sums(X, KEPT, BOUNDS, SUM, COUNT, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """SUM [S] of X and COUNT [S] of KEPT over the tokens of each sequence, one program a sequence, always in one order."""
    s = tl.program_id(0)
    start, stop = tl.load(BOUNDS + s), tl.load(BOUNDS + s + 1)
    total = tl.zeros([BLOCK], ACC)
    count = tl.zeros([BLOCK], ACC)
    for t in range(start, stop, BLOCK):
        token = t + tl.arange(0, BLOCK)
        kept = tl.load(KEPT + token, mask=token < stop, other=0.0) != 0
        total += tl.load(X + token, mask=kept & (token < stop), other=0.0)
        count += kept.to(ACC)
    tl.store(SUM + s, tl.sum(total))
    tl.store(COUNT + s, tl.sum(count))


@triton.jit(do_not_specialize=["T"])
def _token_terms(
    LOGPROB, ADVANTAGE, WEIGHT, OLD, BEHAVIOUR, REF, ENTROPY, MEAN, D_LOGPROB, D_SEQUENCE, D_ENTROPY, PARTS, T,
    clip_low, clip_high, dual, cap, kl_coefficient, entropy_coefficient,
    CISPO: tl.constexpr, DUAL: tl.constexpr, CAP: tl.constexpr, KL: tl.constexpr, UNBIASED: tl.constexpr,
    BLOCK: tl.constexpr, METRICS: tl.constexpr,
):  # fmt: skip
    """Coefficients [T] and this block's row of PARTS [programs, METRICS]. Absent streams are None.

    MEAN [T] is the sequence's mean of x; with it the policy's part of dloss goes to D_SEQUENCE [T], to be summed over each
    sequence by the caller.
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(WEIGHT + t, mask=t < T, other=0.0)
    kept = weight != 0
    logprob = tl.load(LOGPROB + t, mask=kept, other=0.0)
    advantage = tl.load(ADVANTAGE + t, mask=kept, other=0.0)
    check = logprob + advantage + weight
    old = logprob
    if OLD is not None:
        old = tl.load(OLD + t, mask=kept, other=0.0)
        check += old
    x = logprob - old
    token_ratio = tl.exp(tl.minimum(tl.maximum(x, -20.0), 20.0))
    if MEAN is not None:
        x = tl.load(MEAN + t, mask=kept, other=0.0)
    flows = tl.abs(x) <= 20.0
    r = tl.exp(tl.minimum(tl.maximum(x, -20.0), 20.0))
    zero = tl.zeros_like(x)
    floor, ceiling = zero + (1 - clip_low), zero + (1 + clip_high)  # tensors: min and max would round a scalar to float32
    low, high = r < floor, r > ceiling
    clipped = tl.minimum(tl.maximum(r, floor), ceiling)
    bounded = zero != 0
    if CISPO:
        policy = -clipped * advantage * logprob
        slope = -clipped * advantage
    else:
        policy = -tl.minimum(r * advantage, clipped * advantage)
        if DUAL:
            bounded = (advantage < 0) & (r > zero + dual)
            policy = tl.where(bounded, -dual * advantage, policy)
        stopped = (low & (advantage < 0)) | (high & (advantage > 0)) | bounded | (flows == 0)
        slope = tl.where(stopped, 0.0, -r * advantage)
    mismatch = zero
    if BEHAVIOUR is not None:
        behaviour = tl.load(BEHAVIOUR + t, mask=kept, other=0.0)
        check += behaviour
        mismatch = tl.minimum(tl.maximum(old - behaviour, -20.0), 20.0)
    importance = tl.exp(mismatch)
    q = zero + 1
    capped = zero != 0
    if CAP:
        q = tl.minimum(importance, zero + cap)
        capped = importance > zero + cap
    loss = q * policy
    slope = q * slope
    d_sequence = weight * slope
    if MEAN is not None:
        slope = zero
    kl = zero
    if KL:
        ref = tl.load(REF + t, mask=kept, other=0.0)
        check += ref
        distance = ref - logprob
        open = tl.abs(distance) <= 20.0
        d = tl.minimum(tl.maximum(distance, -20.0), 20.0)
        e = tl.exp(d)
        if KL == 1:
            kl = -d
            kl_slope = open.to(d.dtype)
        elif KL == 2:
            kl = d * d * 0.5
            kl_slope = tl.where(open, -d, 0.0)
        else:
            kl = e - 1 - d
            kl_slope = tl.where(open, 1 - e, 0.0)
        if UNBIASED:
            kl_slope = token_ratio * (kl_slope + tl.where(tl.abs(logprob - old) <= 20.0, kl, 0.0))
            loss += kl_coefficient * kl * token_ratio
        else:
            loss += kl_coefficient * kl
        slope += kl_coefficient * kl_slope
    entropy = zero
    if ENTROPY is not None:
        entropy = tl.load(ENTROPY + t, mask=kept, other=0.0)
        check += entropy
        loss -= entropy_coefficient * entropy
        tl.store(D_ENTROPY + t, -entropy_coefficient * weight, mask=t < T)
    tl.store(D_LOGPROB + t, tl.where(kept, weight * slope, 0.0), mask=t < T)
    if MEAN is not None:
        tl.store(D_SEQUENCE + t, tl.where(kept, d_sequence, 0.0), mask=t < T)
    one = kept.to(x.dtype)
    drift = tl.minimum(tl.maximum(logprob - old, -20.0), 20.0)
    row = PARTS + tl.program_id(0) * METRICS
    tl.store(row, tl.sum(tl.where(kept, weight * loss, 0.0)))
    tl.store(row + 1, tl.sum(one))
    tl.store(row + 2, tl.sum(tl.where(kept & ((tl.abs(check) < float("inf")) == 0), one, 0.0)))
    tl.store(row + 3, tl.sum(tl.where(kept, r, 0.0)))
    tl.store(row + 4, tl.sum(tl.where(kept, r * r, 0.0)))
    tl.store(row + 5, tl.sum(tl.where(low & ((advantage < 0) | CISPO), one, 0.0)))
    tl.store(row + 6, tl.sum(tl.where(high & ((advantage > 0) | CISPO), one, 0.0)))
    tl.store(row + 7, tl.sum(tl.where(bounded, one, 0.0)))
    tl.store(row + 8, tl.sum(tl.where(kept, kl, 0.0)))
    tl.store(row + 9, tl.sum(tl.where(kept, token_ratio - 1 - drift, 0.0)))
    tl.store(row + 10, tl.sum(tl.where(kept, entropy, 0.0)))
    tl.store(row + 11, tl.sum(tl.where(kept, importance, 0.0)))
    tl.store(row + 12, tl.sum(tl.where(kept & capped, one, 0.0)))
    tl.store(row + 13, tl.sum(tl.where(kept, importance - 1 - mismatch, 0.0)))


INTERPRETED = not isinstance(_token_terms, triton.runtime.JITFunction)  # TRITON_INTERPRET=1 was set before the import


def sequence_sums(x, weight, cu_seqlens):
    """[2, S]: sums of x and counts over the tokens of weight other than 0 in each sequence."""
    S, acc = len(cu_seqlens) - 1, tl.float64 if x.dtype == torch.float64 else tl.float32
    out = x.new_empty(2, S)
    if S:
        with torch.cuda.device_of(x):
            _sequence_sums[(S,)](x, weight, cu_seqlens, *out, BLOCK=BLOCK, ACC=acc)
    return out


def token_terms(streams, mean, o, metrics):
    """-> d_logprob [T], d_sequence [T] or None, d_entropy [T] or None, totals [len(metrics)] float64."""
    logprob, entropy = streams["logprob"], streams["entropy"]
    T = len(logprob)
    programs = triton.cdiv(T, BLOCK)
    d_logprob = torch.empty_like(logprob)
    d_sequence = torch.empty_like(logprob) if o.ratio == "sequence" else None
    d_entropy = torch.empty_like(logprob) if entropy is not None else None
    parts = logprob.new_empty(programs, len(metrics))
    if T:
        with torch.cuda.device_of(logprob):
            _token_terms[(programs,)](
                *streams.values(), mean, d_logprob, d_sequence, d_entropy, parts, T,
                o.clip_low, o.clip_high, o.dual_clip or math.inf, o.importance_cap or math.inf,
                o.kl_coefficient, o.entropy_coefficient,
                CISPO=o.objective == "cispo", DUAL=o.dual_clip is not None, CAP=o.importance_cap is not None,
                KL=KL[o.kl], UNBIASED=o.kl_grad == "unbiased", BLOCK=BLOCK, METRICS=len(metrics),
            )  # fmt: skip
    return d_logprob, d_sequence, d_entropy, parts.double().sum(0)


def compile_cases():
    """(name, kernel, {argument: type}, {constexpr: value}, launch options, wants tensor cores and TMA) for compile_check."""
    pointers = _token_terms.arg_names[:12]
    types = dict.fromkeys(pointers, "*fp32") | {"T": "i32"} | dict.fromkeys(_token_terms.arg_names[13:19], "fp32")
    plain = dict(CISPO=False, DUAL=False, CAP=False, KL=0, UNBIASED=False, BLOCK=BLOCK, METRICS=14)
    for name, absent, changed in (
        ("on policy", ("OLD", "BEHAVIOUR", "REF", "ENTROPY", "MEAN", "D_SEQUENCE", "D_ENTROPY"), {}),
        ("dual clip, k3", ("MEAN", "D_SEQUENCE"), dict(DUAL=True, CAP=True, KL=3, UNBIASED=True)),
        ("cispo", ("REF", "MEAN", "D_SEQUENCE"), dict(CISPO=True, CAP=True)),
        ("sequence ratio, k2", (), dict(KL=2)),
    ):
        here = {k: v for k, v in types.items() if k not in absent}
        yield f"token_terms {name}", _token_terms, here, plain | changed | dict.fromkeys(absent), {}, False
    sums = {"X": "*fp32", "KEPT": "*fp32", "BOUNDS": "*i64", "SUM": "*fp32", "COUNT": "*fp32"}
    yield "sequence_sums", _sequence_sums, sums, dict(BLOCK=BLOCK, ACC=tl.float32), {}, False
