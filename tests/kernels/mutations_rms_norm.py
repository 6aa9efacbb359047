"""Changes to rms_norm that its tests must notice; see mutate.py."""

TESTS = ["tests/kernels/test_rms_norm.py"]
HERE = "rms_norm.py"
MUTATIONS = [
    (
        "columns past the row are read",
        HERE,
        "mask = (row < T)[:, None] & (column < H)[None, :]\n    x = tl.load(X + at, mask=mask, other=0.0)\n    if FUSED",
        "mask = (row < T)[:, None] & (column < BLOCK)[None, :]\n    x = tl.load(X + at, mask=mask, other=0.0)\n    if FUSED",
    ),
    ("the mean counts the padding", HERE, "tl.sum(x * x, 1) / H + eps", "tl.sum(x * x, 1) / BLOCK + eps"),
    ("eps is forgotten", HERE, "/ H + eps)", "/ H)"),
    ("the residual is forgotten", HERE, "+ tl.load(RESIDUAL + at, mask=mask, other=0.0).to(ACC)", ""),
    ("the sum is not stored", HERE, "tl.store(SUM + at, x, mask=mask)", "pass"),
    ("the weight is forgotten", HERE, "(x * r[:, None] * w[None, :])", "(x * r[:, None])"),
    ("dx: the weight is forgotten", HERE, "g = dy * w[None, :]", "g = dy"),
    ("dx: the mean term is lost", HERE, "g - x * (r * r *", "g - 0.0 * x * (r * r *"),
    ("dx: the sum's own gradient is lost", HERE, "dx += tl.load(DSUM + at, mask=mask, other=0.0).to(ACC)", "pass"),
    ("dw: only the last rows count", HERE, "dw += tl.sum(dy * x * r, 0)", "dw = tl.sum(dy * x * r, 0)"),
    ("dw: one program's sum", HERE, "dw.sum(0).to(weight.dtype)", "dw[0].to(weight.dtype)"),
    ("rows are skipped", HERE, "T, tl.num_programs(0) * ROWS)", "T, (tl.num_programs(0) + 1) * ROWS)"),
    ("sums in float32", HERE, "torch.float64: tl.float64}", "torch.float64: tl.float32}"),
    ("torch: the mean term is lost", HERE, ".div_(-h.shape[-1])", ".mul_(0)"),
    ("torch: the sum's own gradient is lost", HERE, "            dx += dh\n", "            pass\n"),
    ("torch: dw of the unscaled rows", HERE, "products.sum(0).to(h.dtype)", "(dy * h).sum(0).to(h.dtype)"),
    ("the weight's shape is not checked", HERE, "other.shape != shape or ", ""),
]
