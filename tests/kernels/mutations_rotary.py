"""Changes to rotary that its tests must notice; see mutate.py."""

TESTS = ["tests/kernels/test_rotary.py"]
HERE = "rotary.py"
MUTATIONS = [
    ("half: the wrong way round", HERE, "(a * cos - b * sin).to(Y", "(a * cos + b * sin).to(Y"),
    (
        "half: the second half is not turned",
        HERE,
        "tl.store(target + P + i[None, :], (b * cos + a * sin)",
        "tl.store(target + P + i[None, :], (b + 0.0 * sin)",
    ),
    (
        "interleaved: the wrong way round",
        HERE,
        "tl.join(a * cos - b * sin, b * cos + a * sin)",
        "tl.join(a * cos + b * sin, b * cos - a * sin)",
    ),
    ("backward turns forward", HERE, "cos, sin, interleaved, -1.0), None", "cos, sin, interleaved, 1.0), None"),
    ("the sign is ignored", HERE, "other=0.0).to(ACC) * sign", "other=0.0).to(ACC)"),
    ("heads share the token's first", HERE, "row % N * stride_n", "row * 0 * stride_n"),
    ("every row is its own token", HERE, "t, inside = row // N,", "t, inside = row,"),
    ("the rest of a head is not copied", HERE, "    if REST:", "    if False:"),
    (
        "pairs past the end are stored",
        HERE,
        "mask = inside[:, None] & (i < P)[None, :]",
        "mask = inside[:, None] & (i < BLOCK)[None, :]",
    ),
    ("rows past the end are stored", HERE, "row // N < T", "row >= 0"),
    ("strides are taken for granted", HERE, "x.stride(0), x.stride(1), sign", "N * D, D, sign"),
    ("arithmetic in float32", HERE, "tl.float64 if x.dtype == torch.float64 else tl.float32", "tl.float32"),
    ("old tables serve new positions", HERE, "known is None or known[0] != key", "known is None"),
    ("torch: the wrong way round", HERE, "sin, value=-1)", "sin)"),
    ("torch: the rest of a head is lost", HERE, "    y[..., 2 * P :] = x[..., 2 * P :]\n", "    y[..., 2 * P :] = 0\n"),
    ("the number of positions is not checked", HERE, "positions.shape != x.shape[:1] or ", ""),
]
