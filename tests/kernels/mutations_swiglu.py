"""Changes to swiglu that its tests must notice; see mutate.py."""

TESTS = ["tests/kernels/test_swiglu.py"]
HERE = "swiglu.py"
MUTATIONS = [
    ("columns past the row are stored", HERE, "mask, at = column < F, X + row", "mask, at = column < F + 1, X + row"),
    ("backward: columns past the row", HERE, "mask, at = column < F, row", "mask, at = column < F + 1, row"),
    ("gate and up are swapped", HERE, "(g / (1.0 + tl.exp(-g)) * u)", "(u / (1.0 + tl.exp(-u)) * g)"),
    ("the sign of the gate", HERE, "(g / (1.0 + tl.exp(-g)) * u)", "(g / (1.0 + tl.exp(g)) * u)"),
    ("rows share the first one's place", HERE, "tl.store(Y + row * F + column", "tl.store(Y + column"),
    ("dgate: the slope of the sigmoid is lost", HERE, "(1.0 + g * (1.0 - s))", "1.0"),
    ("dgate and dup are swapped", HERE, "tl.store(DX + at + F, (dy * g * s)", "tl.store(DX + at + F, (dy * u * s)"),
    ("dup is not stored", HERE, "tl.store(DX + at + F, (dy * g * s).to(DX.dtype.element_ty), mask=mask)", "pass"),
    ("arithmetic in float32", HERE, "tl.float64 if x.dtype == torch.float64 else tl.float32", "tl.float32"),
    (
        "blocks of a row are counted short",
        HERE,
        "kernel[(T * triton.cdiv(F, BLOCK),)]",
        "kernel[(T * (F // BLOCK + (F < BLOCK)),)]",
    ),
    ("torch: dup of the raw gate", HERE, "dup.copy_(F.silu(gate).mul_(dy))", "dup.copy_(gate * dy)"),
    ("torch: dgate without up", HERE, "silu_backward(dy * up, gate)", "silu_backward(dy, gate)"),
    ("odd widths pass", HERE, "x.shape[-1] % 2 or ", ""),
]
