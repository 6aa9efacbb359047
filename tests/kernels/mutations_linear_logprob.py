"""Changes to linear_logprob that its tests must notice; see mutate.py."""
# ruff: noqa: E501

FILE = "tests/kernels/test_linear_logprob.py"
RANKS = ["tests/kernels/test_linear_logprob_ranks.py"]
TESTS = [FILE, "-k", "not workspace and not grid_axis and not V166144"]
TRITON, TORCH, FRONT = "linear_logprob_triton.py", "linear_logprob_torch.py", "linear_logprob.py"
MUTATIONS = [
    ("columns beyond the vocabulary count", TRITON, "tl.where((column < vocab)[None, :], acc, -1e30)", "acc"),
    ("rows beyond the tokens are stored", TRITON, "tl.store(L + at, l, mask=row < tokens)", "tl.store(L + at, l)"),
    ("forward forgets the temperature", TRITON, "z = (y - new[:, None]) * scale", "z = (y - new[:, None]) * 1.4426950408889634"),
    ("infinite start of the maximum", TRITON, "m = tl.full([BT], -1e30, ACC)", 'm = tl.full([BT], float("-inf"), ACC)'),
    ("the sum is not rescaled", TRITON, "l = l * decay + tl.sum(p, 1)", "l = l + tl.sum(p, 1)"),
    ("the entropy's sum forgets the shift", TRITON, "s = decay * (s + l * shift)", "s = decay * s"),
    ("32-bit offset of the target's row", TRITON, "target[:, None].to(tl.int64) * H", "target[:, None].to(tl.int32) * H"),
    ("target dot reads past the row", TRITON, "here[:, None] & (column < H)[None, :]", "here[:, None] & (column >= 0)[None, :]"),
    ("target dot in float32", TRITON, "other=0.0).to(ACC)\n        acc +=", "other=0.0).to(tl.float32)\n        acc +="),
    ("runs of the vocabulary overlap", TRITON, "tl.minimum(split * run + run, vocab)", "tl.minimum(split * run + run + BV, vocab)"),
    ("runs are merged without decay", TRITON, "l = (runs[1] * decay).sum(0)", "l = runs[1].sum(0)"),
    ("p is not divided by the sum", TRITON, "d = -p * (g * share)[:, None]", "d = -p * g[:, None]"),
    ("the target's gradient is lost", TRITON, "d + g[:, None], d)", "d, d)"),
    ("entropy gradient in base 2", TRITON, "(e * unit)[:, None] * z", "e[:, None] * z"),
    ("every chunk starts at the same id", TRITON, "shard.first + v, group", "shard.first, group"),
    ("dweight forgets the temperature", TRITON, "dweight = dweight.div_(shard.temperature)", "dweight = dweight"),
    ("dhidden forgets the temperature", TRITON, "dh.div_(shard.temperature)", "dh"),
    ("float32 accumulator for float64", TORCH, "torch.float64 if dtype == torch.float64 else torch.float32", "torch.float32"),
    ("float16 accumulator", TORCH, "return torch.float64 if dtype == torch.float64 else torch.float32", "return dtype"),
    ("no finite guard", TORCH, "shift = (m - new).clamp_(min=-1e30)", "shift = m - new"),
    ("the running sum is not rescaled", TORCH, "l.mul_(decay).add_(p.sum(1))", "l.add_(p.sum(1))"),
    ("one pass forgets the target", TORCH, "z[at, column] -= total[at]", "z[at, column] -= 0"),
    ("one pass keeps the last chunk only", TORCH, "h * factor, beta=beta)", "h * factor, beta=0)"),
    ("two passes keep the last chunk only", TORCH, "weighted, beta=beta)", "weighted, beta=0)"),
    ("unwritten dweight is not cleared", TORCH, "if (T if kept is None else len(kept)) else 0 :]", "if T else 0 :]"),
    ("one pass forgets the sum", TORCH, "factor = -(coefficient[rows] / total)[:, None]", "factor = -coefficient[rows][:, None]"),
    ("one pass forgets the temperature", TORCH, "w)\n            dhidden[rows] = reduced(dh.mul_(factor / shard.temperature)", "w)\n            dhidden[rows] = reduced(dh.mul_(factor)"),
    ("padding counts", FRONT, "valid = min(max(total - rank * rows, 0), rows)", "valid = rows"),
    ("broken promises pass", FRONT, "not error <= 1e-5 * largest:", "not error <= 1e-2 * largest:"),
    ("targets are not checked", FRONT, "    if wrong_count:", "    if False:"),
    ("rows without gradient are computed", FRONT, "active = g != 0 if e is None", "active = g == g if e is None"),
    ("shards keep their own maximum", TORCH, "z.mul_((m - whole).exp_()[:, None])", "pass", RANKS),
    ("ranks' sums are not rescaled", TORCH, "sums = torch.stack([l * decay,", "sums = torch.stack([l,", RANKS),
    ("ranks' entropies forget the shift", TORCH, "(s + l * shift) * decay, zt])", "s * decay, zt])", RANKS),
    ("an empty rank's maximum is infinite", TORCH, "(m - whole).clamp_(min=-1e30)", "(m - whole)", RANKS),
    ("dhidden is always reduced", TORCH, "if shard.group is not None and shard.reduce_hidden_grad:", "if shard.group is not None:", RANKS),
    ("targets are local ids", TORCH, "local = targets[rows] - shard.first", "local = targets[rows]", RANKS),
]
