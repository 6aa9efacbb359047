"""Changes to attention_paged that its tests must notice; see mutate.py."""

FILE = "tests/kernels/test_attention_paged.py"
TESTS = [FILE, "-k", "not twice and not bad_input"]
BAD = [FILE, "-k", "bad_input"]
HERE = "attention_paged.py"
MUTATIONS = [
    ("later keys are seen", HERE, "seen = there[None, :] & (key[None, :] <= position[:, None]) &", "seen = there[None, :] &"),
    (
        "the window is one too wide",
        HERE,
        "(key[None, :] > (position - window)[:, None])",
        "(key[None, :] >= (position - window)[:, None])",
    ),
    (
        "the window's keys begin too late",
        HERE,
        "first = tl.maximum(0, length - count + tile * BM // FOLD + 1 - window)",
        "first = tl.maximum(0, length - count + tile * BM // FOLD + 3 - window)",
    ),
    ("runs overlap", HERE, "tl.minimum(first + run * share + share, last)", "last"),
    (
        "the table is read in order",
        HERE,
        "tl.load(TABLE + s.to(tl.int64) * max_blocks + key // B, mask=there, other=0)",
        "tl.load(TABLE + s.to(tl.int64) * max_blocks + key // B, mask=there, other=0) * 0 + key // B",
    ),
    (
        "a wrong table leaves the cache",
        HERE,
        "block = tl.minimum(tl.maximum(block, 0), blocks - 1).to(tl.int64)",
        "block = block.to(tl.int64)",
    ),
    (
        "lengths beyond the table are believed",
        HERE,
        "tl.minimum(tl.load(LENGTHS + s), max_blocks * B).to(tl.int32)",
        "tl.load(LENGTHS + s).to(tl.int32)",
    ),
    (
        "no guard for rows that see nothing",
        HERE,
        'finite = tl.where(new == float("-inf"), 0.0, new)\n            p, decay',
        "finite = new\n            p, decay",
    ),
    ("sums are not rescaled", HERE, "l, m = l * decay + tl.sum(p, 1), new", "l, m = l + tl.sum(p, 1), new"),
    ("results are not rescaled", HERE, "acc * decay[:, None], out_dtype=ACC)", "acc, out_dtype=ACC)"),
    (
        "padding of the folded heads is stored",
        HERE,
        "inside = (query < count) & ((row % FOLD < R) if FOLD > 1 else (row >= 0))",
        "inside = query < count",
    ),
    ("the first head's keys serve all", HERE, "hk = h if FOLD > 1 else h // R", "hk = 0"),
    ("runs merge without weights", HERE, "acc = acc * decay + weight * tl.load", "acc = acc * decay + tl.load"),
    (
        "merged runs are not normalised",
        HERE,
        "(acc / l).to(OUT.dtype.element_ty), mask=d < D)",
        "acc.to(OUT.dtype.element_ty), mask=d < D)",
    ),
    (
        "runs share one place",
        HERE,
        "target = (run.to(tl.int64) * Tq + begin + query) * N + head",
        "target = (begin + query) * N + head",
    ),
    ("torch: queries are the first tokens", HERE, "scale)\n        out[a:b] = acc", "scale)\n        out[a:b] = acc * 0"),
    ("torch: the window is one too wide", HERE, "(position - window + 1).clamp_(min=0)", "(position - window).clamp_(min=0)"),
    ("lengths are not checked", HERE, "if not count <= length <= room:", "if False:", BAD),
    ("tables are not checked", HERE, "if bool(wrong.any()):", "if False:", BAD),
]
