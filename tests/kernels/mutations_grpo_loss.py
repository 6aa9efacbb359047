"""Changes to grpo_loss that its tests must notice; see mutate.py."""
# ruff: noqa: E501

TESTS = ["tests/kernels/test_grpo_loss.py", "-k", "not ranks"]
RANKS = ["tests/kernels/test_grpo_loss.py", "-k", "ranks"]
TRITON, TORCH, FRONT = "grpo_loss_triton.py", "grpo_loss_torch.py", "grpo_loss.py"
MUTATIONS = [
    ("the upper clip is the lower one", TRITON, "zero + (1 + clip_high)", "zero + (1 + clip_low)"),
    ("the gradient stops on the wrong side", TRITON, "(high & (advantage > 0)) | bounded", "(high & (advantage < 0)) | bounded"),
    ("dual clip for every sign", TRITON, "bounded = (advantage < 0) & (r > zero + dual)", "bounded = r > zero + dual"),
    ("dual clip keeps the gradient", TRITON, "(advantage > 0)) | bounded | (flows == 0)", "(advantage > 0)) | (flows == 0)"),
    ("the reference's exponent is not clamped", TRITON, "d = tl.minimum(tl.maximum(distance, -20.0), 20.0)", "d = distance"),
    ("the gradient flows past the clamp", TRITON, "| bounded | (flows == 0)", "| bounded"),
    ("scalars round the bounds", TRITON, "tl.minimum(tl.maximum(r, floor), ceiling)", "tl.minimum(tl.maximum(r, 1 - clip_low), 1 + clip_high)"),
    ("masked positions count", TRITON, "kept = weight != 0\n", "kept = weight == weight\n"),
    ("stores past the last token", TRITON, "tl.where(kept, weight * slope, 0.0), mask=t < T)", "tl.where(kept, weight * slope, 0.0))"),
    ("no cap on importance", TRITON, "q = tl.minimum(importance, zero + cap)", "q = importance"),
    ("k3's gradient has the wrong sign", TRITON, "tl.where(open, 1 - e, 0.0)", "tl.where(open, e - 1, 0.0)"),
    ("unbiased KL forgets the ratio", TRITON, "loss += kl_coefficient * kl * token_ratio", "loss += kl_coefficient * kl"),
    ("the entropy bonus is a penalty", TRITON, "D_ENTROPY + t, -entropy_coefficient", "D_ENTROPY + t, entropy_coefficient"),
    ("infinities pass", TRITON, '(tl.abs(check) < float("inf")) == 0', "check != check"),
    ("sequences share their first tokens", TRITON, "for t in range(start, stop, BLOCK):", "for t in range(start * 0, stop, BLOCK):"),
    ("sequence sums count masked tokens", TRITON, "count += kept.to(ACC)", "count += (token < stop).to(ACC)"),
    ("torch: the lower clip is ignored", TORCH, "r.clamp(1 - o.clip_low, 1 + o.clip_high)", "r.clamp(max=1 + o.clip_high)"),
    ("torch: masked positions are read", TORCH, "x.where(kept, zero) for name", "x for name"),
    ("torch: no limit on the exponent", TORCH, "d = distance.clamp(-LIMIT, LIMIT)", "d = distance"),
    ("torch: unbiased without the score", TORCH, "kl_slope + kl.masked_fill(~token_flows, 0)", "kl_slope"),
    ("torch: the cap keeps what it cuts", TORCH, "q = importance.clamp(max=o.importance_cap)", "q = importance.clamp(min=o.importance_cap)"),
    ("torch: cispo stops clipped tokens", TORCH, "slope = -clipped * advantage\n", "slope = -clipped * advantage * (clipped == r)\n"),
    ("sequence gradients are not spread", FRONT, "d_logprob += _spread", "_ = _spread"),
    ("sequence gradients reach masked tokens", FRONT, '.where(streams["weight"] != 0, 0)\n        metrics', "\n        metrics"),
    ("bounds keep their strides", FRONT, "cu_seqlens = cu_seqlens.contiguous()", "pass"),
    ("token terms are launched anywhere", TRITON, "with torch.cuda.device_of(logprob):", "if True:"),
    ("ranks do not share sequences", FRONT, "dist.all_reduce(sums, group=group)", "pass", RANKS),
]
