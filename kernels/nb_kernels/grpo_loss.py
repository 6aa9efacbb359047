"""Policy-gradient losses on per-token vectors, fused down to the coefficients that linear_logprob's backward needs.

    x = logprob - old            r = exp(x), or exp(mean of x over the sequence) with ratio="sequence" (GSPO, arXiv:2507.18071)
    policy = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)                 (PPO, GRPO arXiv:2402.03300, DAPO 2503.14476)
             for A < 0 at most -dual_clip A                                                  (dual clip, arXiv:1912.09729)
           = -clip(r)_detached A logprob                            with objective="cispo"          (arXiv:2506.13585)
    q = min(exp(old - behaviour), importance_cap)_detached, 1 without a cap          (truncated importance sampling)
    d = ref - logprob            k1 = -d     k2 = d^2 / 2     k3 = exp(d) - 1 - d                  (Schulman 2020)
    loss = sum over tokens of weight (q policy + kl_coefficient kl - entropy_coefficient entropy)

As losses, the expected gradient of k1 is 0, of k2 that of KL(policy || ref), of k3 that of KL(ref || policy).
`kl_grad="unbiased"` takes r k instead, with the token's r: its gradient r (k grad logprob + grad k) has the score-function
term, so that k1 and k3 both follow KL(policy || ref), off policy too.

Every mean is a matter of `weight` (1 for the token mean, 1 / length for the sequence mean, 1 / turn length per turn, a constant
for Dr.GRPO, arXiv:2503.20783); the caller divides by the global count. Exponents are clamped to +-20, where gradients stop.
Positions of weight 0 change nothing, whatever stands there.

Shapes: all streams [T]; cu_seqlens [S + 1], bounds of the sequences in these tokens. Cost: O(T); one kernel for token ratios.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from nb_kernels import grpo_loss_torch, grpo_loss_triton

BACKENDS = {"torch": grpo_loss_torch, "triton": grpo_loss_triton}
LIMIT = 20.0
# Sums over the tokens of weight other than 0. kl_old: KL(old || policy), kl_behaviour: KL(behaviour || old), both by k3.
METRICS = (
    "loss", "tokens", "not_finite", "ratio", "ratio_squared", "clip_low", "clip_high", "clip_dual", "kl", "kl_old", "entropy",
    "importance", "importance_capped", "kl_behaviour",
)  # fmt: skip


@dataclass(frozen=True)
class PolicyLoss:
    """`loss` is the differentiable sum; `metrics` are detached sums, to be divided by metrics["tokens"] after any reduction."""

    loss: torch.Tensor  # []
    metrics: dict[str, torch.Tensor]  # name -> []
    d_logprob: torch.Tensor  # [T] dloss/dlogprob
    d_entropy: torch.Tensor | None  # [T] dloss/dentropy


@dataclass(frozen=True)
class Objective:
    """The numbers and names of one loss; see the head of the file."""

    objective: str = "clip"
    ratio: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    importance_cap: float | None = None
    kl: str | None = None
    kl_coefficient: float = 0.0
    kl_grad: str = "plain"
    entropy_coefficient: float = 0.0

    def __post_init__(self):
        rules = (
            ("objective", self.objective in ("clip", "cispo"), "'clip' or 'cispo'"),
            ("ratio", self.ratio in ("token", "sequence"), "'token' or 'sequence'"),
            ("clip_low", self.clip_low >= 0, "at least 0"),
            ("clip_high", self.clip_high >= 0, "at least 0"),
            ("dual_clip", self.dual_clip is None or self.dual_clip > 1, "above 1, or None"),
            ("importance_cap", self.importance_cap is None or self.importance_cap > 0, "above 0, or None"),
            ("kl", self.kl in ("k1", "k2", "k3", None), "'k1', 'k2', 'k3' or None"),
            ("kl_coefficient", self.kl_coefficient == 0 or self.kl is not None, "0 without `kl`"),
            ("kl_grad", self.kl_grad in ("plain", "unbiased"), "'plain' or 'unbiased'"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {rule}")
        if self.objective == "cispo" and (self.dual_clip is not None or self.ratio == "sequence"):
            raise ValueError("objective='cispo' has token ratios and no dual clip: leave out dual_clip and ratio='sequence'")


def reference(logprob, advantage, weight, old=None, behaviour=None, ref=None, entropy=None, cu_seqlens=None, **options):
    """The loss by its definition, for autograd: one process, tests call it in float64."""
    o, kept = Objective(**options), weight != 0
    clean = lambda x: None if x is None else torch.where(kept, x, 0.0)  # noqa: E731
    logprob, advantage, old, behaviour, ref, entropy = map(clean, (logprob, advantage, old, behaviour, ref, entropy))
    old = logprob.detach() if old is None else old
    x = logprob - old
    token_ratio = x.clamp(-LIMIT, LIMIT).exp()
    if o.ratio == "sequence":
        parts = [x[a:b].sum() / kept[a:b].sum().clamp(min=1) + 0 * x[a:b] for a, b in zip(cu_seqlens[:-1], cu_seqlens[1:])]
        x = torch.cat(parts)
    r = x.clamp(-LIMIT, LIMIT).exp()
    clipped = r.clamp(1 - o.clip_low, 1 + o.clip_high)
    if o.objective == "cispo":
        policy = -clipped.detach() * advantage * logprob
    else:
        policy = -torch.minimum(r * advantage, clipped * advantage)
        if o.dual_clip is not None:
            policy = torch.where(advantage < 0, torch.minimum(policy, -o.dual_clip * advantage), policy)
    if o.importance_cap is not None:
        policy = policy * (old - behaviour).clamp(-LIMIT, LIMIT).exp().clamp(max=o.importance_cap).detach()
    total = policy
    if o.kl is not None:
        d = (ref - logprob).clamp(-LIMIT, LIMIT)
        kl = {"k1": -d, "k2": d * d / 2, "k3": d.exp() - 1 - d}[o.kl]
        total = total + o.kl_coefficient * kl * (token_ratio if o.kl_grad == "unbiased" else 1)
    if entropy is not None:
        total = total - o.entropy_coefficient * entropy
    return torch.where(kept, weight * total, 0.0).sum()


def cases(device, dtype):
    """(name, streams, options): every branch of the family, with masked positions that hold NaN and -inf."""
    gspo = dict(ratio="sequence", clip_low=0.02, clip_high=0.03, kl_coefficient=0.2, kl_grad="unbiased")
    settings = {
        "grpo": {},
        "dapo-k3-entropy": dict(kl="k3", kl_coefficient=0.1, entropy_coefficient=0.01),
        "dual-clip-k2": dict(dual_clip=1.3, kl="k2", kl_coefficient=0.1),
        "cispo-tis": dict(objective="cispo", importance_cap=1.05, clip_low=1.0),
        "gspo-k1": gspo | dict(kl="k1"),
        "gspo-k3-tis": gspo | dict(kl="k3", importance_cap=1.1),
    }
    for T in (1, 63, 2500) if str(device) == "cpu" else (63, 262144):
        for name, options in settings.items():
            noise = lambda scale: scale * torch.randn(T, device=device, dtype=dtype)  # noqa: B023, E731
            logprob = noise(1.0) - 5
            streams = dict(logprob=logprob, advantage=noise(1.0), weight=torch.rand(T, device=device, dtype=dtype))
            streams |= dict(old=logprob + noise(0.3), behaviour=logprob + noise(0.3), ref=logprob + noise(1.0))
            streams["entropy"] = noise(1.0).abs()
            streams["weight"][1::3] = 0
            for stream, bad in (("logprob", 0.0), ("advantage", torch.nan), ("old", -torch.inf), ("ref", torch.nan)):
                streams[stream][1::3] = bad
            bounds = sorted({0, T, *(t for t in (1, 40, 41, 2000) if t < T)})
            streams["cu_seqlens"] = torch.tensor([0, *bounds], device=device)  # the first sequence has no token here
            yield f"{name}-T{T}", streams, options


def grpo_loss(
    logprob,
    advantage,
    weight,
    *,
    old=None,
    behaviour=None,
    ref=None,
    entropy=None,
    cu_seqlens=None,
    group=None,
    options=None,
    implementation="auto",
):
    """logprob, entropy [T] of the policy (differentiable) and streams [T] -> PolicyLoss, whose loss is a sum, not a mean.

    old         log-probs that the ratio is taken against; None is on-policy: the policy's own, so the ratio is 1.
    behaviour   log-probs of the engine that sampled; its mismatch with `old` is measured, and weighs with importance_cap.
    ref         log-probs of the reference of the KL term.
    cu_seqlens  [S + 1] bounds of the sequences within these T tokens, for ratio="sequence"; a sequence may be empty here.
    group       process group that shares the sequences (context parallelism): every rank has the same S. Sums stay local.
    options     Objective or None for its defaults.

    The loss stops gradients at old, behaviour, ref, advantage and weight. Raises ValueError for streams that do not fit, for
    missing streams, and for a value that is not finite at a position of weight other than 0.
    """
    o = Objective() if options is None else options
    ref = None if o.kl is None else ref
    streams = dict(logprob=logprob, advantage=advantage, weight=weight, old=old, behaviour=behaviour, ref=ref, entropy=entropy)
    streams = _check(streams, o, cu_seqlens)
    backend = _backend(implementation, logprob)
    with torch.no_grad(), torch.cuda.device_of(logprob):  # where Triton launches
        mean = counts = None
        if o.ratio == "sequence":
            x = streams["logprob"] - streams["old"] if old is not None else torch.zeros_like(streams["logprob"])
            sums, counts = _shared(backend.sequence_sums(x, streams["weight"], cu_seqlens), group)
            mean = _spread(sums / counts.clamp(min=1), cu_seqlens, len(logprob))
        d_logprob, d_sequence, d_entropy, totals = backend.token_terms(streams, mean, o, METRICS)
        if o.ratio == "sequence":
            sums, _ = _shared(backend.sequence_sums(d_sequence, streams["weight"], cu_seqlens), group)
            d_logprob += _spread(sums / counts.clamp(min=1), cu_seqlens, len(logprob)).where(streams["weight"] != 0, 0)
        metrics = dict(zip(METRICS, totals))
        if metrics["not_finite"] > 0:
            _refuse(streams)
    loss = _Loss.apply(logprob, entropy, metrics["loss"].to(logprob.dtype), d_logprob, d_entropy)
    return PolicyLoss(loss, metrics, d_logprob, d_entropy)


class _Loss(torch.autograd.Function):
    """A scalar whose gradients are known already."""

    @staticmethod
    def forward(ctx, logprob, entropy, loss, d_logprob, d_entropy):
        ctx.save_for_backward(d_logprob, d_entropy)
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        d_logprob, d_entropy = ctx.saved_tensors
        return g * d_logprob, None if d_entropy is None else g * d_entropy, None, None, None


def _shared(sums, group):
    """Sums and counts [2, S] over the ranks that share the sequences."""
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums


def _spread(values, cu_seqlens, T):
    """values [S] -> [T], each sequence's value at its tokens."""
    return torch.repeat_interleave(values, cu_seqlens.diff(), output_size=T)


def _check(streams, o, cu_seqlens):
    logprob = streams["logprob"]
    if logprob.dim() != 1 or logprob.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"logprob {tuple(logprob.shape)} {logprob.dtype} must be [T] float32 or float64")
    for name, stream in streams.items():
        if stream is not None and (stream.shape != logprob.shape or stream.device != logprob.device):
            found = f"{name} {tuple(stream.shape)} on {stream.device}"
            raise ValueError(f"{found} must be [{len(logprob)}] on {logprob.device}, like logprob")
    wanted = {"ref": o.kl, "behaviour": o.importance_cap, "entropy": o.entropy_coefficient or None}
    for name, option in wanted.items():
        if option is not None and streams[name] is None:
            raise ValueError(f"{name} is missing: the options ask for it ({option!r}); pass it or leave the option out")
    if o.ratio == "sequence":
        if cu_seqlens is None:
            raise ValueError("cu_seqlens is missing: ratio='sequence' needs the bounds of the sequences")
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != len(logprob) or any(a > b for a, b in zip(bounds, bounds[1:])):
            raise ValueError(f"cu_seqlens={bounds[:8]}... must start at 0, not decrease, and end at T={len(logprob)}")
    return {n: None if x is None else x.detach().to(logprob.dtype).contiguous() for n, x in streams.items()}


def _backend(implementation, logprob):
    if implementation not in ("auto", "torch", "triton"):
        raise ValueError(f"implementation={implementation!r} must be 'auto', 'torch' or 'triton'")
    if implementation == "triton" and not (logprob.is_cuda or grpo_loss_triton.INTERPRETED):
        raise ValueError(f"implementation='triton' on {logprob.device} needs CUDA, or TRITON_INTERPRET=1 at import")
    if implementation == "auto":
        implementation = "triton" if logprob.is_cuda else "torch"
    return BACKENDS[implementation]


def _refuse(streams):
    """Name the first value that is not finite where it counts."""
    kept = streams["weight"] != 0
    for name, stream in streams.items():
        if stream is not None and bool((kept & ~stream.isfinite()).any()):
            at = int((kept & ~stream.isfinite()).nonzero()[0, 0])
            rule = "must be finite where weight is not 0: mask the token or drop its sample"
            raise ValueError(f"{name}[{at}]={float(stream[at])} {rule}")
    raise AssertionError("a value was not finite, but none is found")
