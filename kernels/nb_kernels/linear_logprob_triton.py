"""The Triton path of linear_logprob: logits live in registers only (Dao et al., arXiv:2205.14135, for the online soft-max).

Forward: a program takes BT tokens and a run of vocabulary tiles, keeps (m, l, s) online and never looks for the target, whose
logit is a dot product of two rows in a kernel of its own: a gather inside the tile's epilogue would spill registers.
Backward: for a chunk of tokens and of vocabulary, dlogits are written in the inputs' dtype to a workspace of fixed size; two
matrix products add them to dhidden and dweight in the accumulator's dtype. No atomics, so bits repeat.

Inside, y = hidden . weight without temperature, and z = (y - max y) * scale, scale = log2(e) / temperature, for exp2: the
maximum goes first, so large logits lose no digits. One program axis only (the other axes of a grid end at 65535); offsets of
tokens times row length are int64, or inside a tensor descriptor.
"""
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nb_kernels.linear_logprob_torch import accumulator, merge, outputs, reduced, rows_of

LOG2E, LN2 = math.log2(math.e), math.log(2.0)
TARGET_BLOCK = 16
FORWARD_CHUNK = 32768  # tokens a launch; rows are copied when some are ignored
TOKEN_CHUNK, VOCAB_CHUNK = 8192, 32768  # of the backward workspace: 0.5 GB in 16 bits
PROCESSORS, WAVES = 132, 6  # streaming multiprocessors of an H100; so many programs for each hide the last, ragged wave

# (BT tokens, BV vocabulary, BH hidden, warps, stages): no spills on sm_90, see compile_check
TILES = {
    torch.bfloat16: (128, 256, 64, 8, 3),
    torch.float16: (128, 256, 64, 8, 3),
    torch.float32: (64, 128, 32, 4, 3),
    torch.float64: (64, 512, 32, 4, 1),  # interpreter only
}


@triton.jit
def _tile(pid, token_tiles, vocab_tiles, group):
    """Program number -> (token tile, vocabulary tile), `group` token tiles beside each other so that L2 serves both sides."""
    band = pid // (group * vocab_tiles)
    first = band * group
    width = tl.minimum(token_tiles - first, group)
    inside = pid - first * vocab_tiles
    return first + inside % width, inside // width


@triton.jit(do_not_specialize=["tokens", "vocab", "splits", "group"])
def row_statistics(
    hidden, weight, M, L, S, tokens, vocab, splits, group, scale,
    H: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr,
    ENTROPY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """M, L, S [splits, tokens]: maximum of y, sum of 2^z, sum of 2^z z over one run of the vocabulary."""
    tile, split = _tile(tl.program_id(0), tl.cdiv(tokens, BT), splits, group)
    run = tl.cdiv(tl.cdiv(vocab, BV), splits) * BV
    m = tl.full([BT], -1e30, ACC)  # finite, so that an empty run stays (-1e30, 0, 0)
    l = tl.zeros([BT], ACC)
    s = tl.zeros([BT], ACC)
    for v in range(split * run, tl.minimum(split * run + run, vocab), BV):
        acc = tl.zeros([BT, BV], ACC)
        for k in range(0, H, BH):
            h = hidden.load([tile * BT, k])
            w = weight.load([v, k])
            acc = tl.dot(h, w.T, acc, input_precision=PRECISION, out_dtype=ACC)
        column = v + tl.arange(0, BV)
        y = tl.where((column < vocab)[None, :], acc, -1e30)
        new = tl.maximum(m, tl.max(y, 1))
        shift = (m - new) * scale
        decay = tl.exp2(shift)
        z = (y - new[:, None]) * scale
        p = tl.exp2(z)
        if ENTROPY:
            s = decay * (s + l * shift) + tl.sum(p * z, 1)
        l = l * decay + tl.sum(p, 1)
        m = new
    row = tile * BT + tl.arange(0, BT)
    at = split.to(tl.int64) * tokens + row
    tl.store(M + at, m, mask=row < tokens)
    tl.store(L + at, l, mask=row < tokens)
    if ENTROPY:
        tl.store(S + at, s, mask=row < tokens)


@triton.jit(do_not_specialize=["tokens", "first", "vocab"])
def target_logits(
    HIDDEN, WEIGHT, TARGET, Y, tokens, first, vocab,
    H: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Y [tokens]: hidden[t] . weight[target[t] - first], 0 where the target lives on another rank."""
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    target = tl.load(TARGET + row, mask=row < tokens, other=-1) - first
    here = (row < tokens) & (target >= 0) & (target < vocab)
    acc = tl.zeros([BT], ACC)
    for k in range(0, H, BH):
        column = k + tl.arange(0, BH)
        mask = here[:, None] & (column < H)[None, :]
        h = tl.load(HIDDEN + row[:, None].to(tl.int64) * H + column[None, :], mask=mask, other=0.0).to(ACC)
        w = tl.load(WEIGHT + target[:, None].to(tl.int64) * H + column[None, :], mask=mask, other=0.0).to(ACC)
        acc += tl.sum(h * w, 1)
    tl.store(Y + row, acc, mask=row < tokens)


@triton.jit(do_not_specialize=["tokens", "vocab", "first", "group"])
def logit_gradients(
    hidden, weight, M, SHARE, G, E, SHIFT, TARGET, dz, tokens, vocab, first, group, scale, unit,
    H: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr,
    ENTROPY: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of dz [tokens, vocab] = G onehot - p (G + E (log p + entropy)), where p = 2^z SHARE, SHARE = 1 / sum.

    SHIFT = entropy - log(sum); `first` is the global id of the chunk's first vocabulary row; unit = log(2).
    """
    tile, column_tile = _tile(tl.program_id(0), tl.cdiv(tokens, BT), tl.cdiv(vocab, BV), group)
    acc = tl.zeros([BT, BV], ACC)
    for k in range(0, H, BH):
        h = hidden.load([tile * BT, k])
        w = weight.load([column_tile * BV, k])
        acc = tl.dot(h, w.T, acc, input_precision=PRECISION, out_dtype=ACC)
    row = tile * BT + tl.arange(0, BT)
    inside = row < tokens
    m = tl.load(M + row, mask=inside, other=0.0)
    share = tl.load(SHARE + row, mask=inside, other=0.0)
    g = tl.load(G + row, mask=inside, other=0.0)
    target = (tl.load(TARGET + row, mask=inside, other=-1) - first).to(tl.int32)
    z = tl.minimum((acc - m[:, None]) * scale, 0.0)  # above 0 only where rows or columns end
    p = tl.exp2(z)
    if ENTROPY:
        e = tl.load(E + row, mask=inside, other=0.0) * share
        shift = tl.load(SHIFT + row, mask=inside, other=0.0)
        d = -p * ((g * share + e * shift)[:, None] + (e * unit)[:, None] * z)
    else:
        d = -p * (g * share)[:, None]
    column = column_tile * BV + tl.arange(0, BV)
    d = tl.where(column[None, :] == target[:, None], d + g[:, None], d)
    dz.store([tile * BT, column_tile * BV], d.to(dz.dtype))


INTERPRETED = not isinstance(row_statistics, triton.runtime.JITFunction)  # TRITON_INTERPRET=1 was set before the import


def _options(dtype, H):
    """(tile constants, launch options) of the matrix kernels."""
    bt, bv, bh, warps, stages = TILES[dtype]
    acc = tl.float64 if dtype == torch.float64 else tl.float32
    precision = "ieee" if dtype == torch.float64 else "tf32x3"
    return dict(H=H, BT=bt, BV=bv, BH=bh, ACC=acc, PRECISION=precision), dict(num_warps=warps, num_stages=stages)


def _descriptor(matrix, rows, columns):
    n, width = matrix.shape
    stride = matrix.stride(0) if n > 1 else triton.cdiv(width, 16) * 16  # the stride of a single row may be any number
    return TensorDescriptor(matrix, [n, width], [stride, 1], [rows, columns])


def forward(hidden, weight, targets, kept, entropy, shard):
    """-> (logprob, entropy or None, m, l) like linear_logprob_torch.forward; m in natural units."""
    T, dtype = len(hidden), accumulator(hidden.dtype)
    stats = hidden.new_zeros(4, T if kept is None else len(kept), dtype=dtype)
    stats[0] = -math.inf
    done = 0
    for rows in rows_of(kept, T, FORWARD_CHUNK):
        h, t = hidden[rows], targets[rows]
        part = stats[:, done : done + len(h)]
        done += len(h)
        if shard.valid:
            part.copy_(_chunk_statistics(h, weight[: shard.valid], t, entropy, shard))
    return outputs(merge(stats, shard.group), kept, T, entropy)


def _chunk_statistics(h, weight, targets, entropy, shard):
    """Row statistics [4, n] of one chunk of tokens over this rank's vocabulary, in natural units."""
    (n, H), V, dtype = h.shape, len(weight), accumulator(h.dtype)
    constants, launch = _options(h.dtype, H)
    bt, bv, bh = constants["BT"], constants["BV"], constants["BH"]
    token_tiles, vocab_tiles = triton.cdiv(n, bt), triton.cdiv(V, bv)
    # few tokens need many runs to fill the machine; many tokens need about 4 to keep hidden tiles and weight tiles in L2
    splits = min(vocab_tiles, max(4, triton.cdiv(WAVES * PROCESSORS, token_tiles)))
    group = triton.cdiv(PROCESSORS, splits)
    scale = LOG2E / shard.temperature
    runs = [h.new_zeros(splits, n, dtype=dtype) for _ in range(3)]  # each aligned for any n: else the JIT compiles variants
    y = h.new_empty(n, dtype=dtype)
    with torch.cuda.device_of(h):
        row_statistics[(token_tiles * splits,)](
            _descriptor(h, bt, bh), _descriptor(weight, bv, bh), *runs, n, V, splits, group, scale,
            ENTROPY=entropy, **constants, **launch,
        )  # fmt: skip
        target_logits[(triton.cdiv(n, TARGET_BLOCK),)](
            h, weight, targets, y, n, shard.first, V, H=H, BT=TARGET_BLOCK, BH=128, ACC=constants["ACC"]
        )
    m = runs[0].amax(0)
    shift = (runs[0] - m) * scale
    decay = shift.exp2()
    l = (runs[1] * decay).sum(0)
    s = ((runs[2] + runs[1] * shift) * decay).sum(0)
    return torch.stack([m / shard.temperature, l, s * LN2, y / shard.temperature])


def backward(hidden, weight, targets, kept, m, l, ent, g, e, shard, want_hidden, want_weight):
    """-> (dhidden or None, dweight or None) like linear_logprob_torch.backward."""
    (T, H), dtype, V = hidden.shape, accumulator(hidden.dtype), shard.valid
    constants, launch = _options(hidden.dtype, H)
    bt, bv, bh = constants["BT"], constants["BV"], constants["BH"]
    dhidden = torch.zeros_like(hidden) if want_hidden else None
    dweight = torch.zeros_like(weight, dtype=dtype) if want_weight else None
    width = min(VOCAB_CHUNK, triton.cdiv(max(V, 1), 16) * 16)  # rows of the workspace start at multiples of 16 bytes
    workspace = hidden.new_empty(min(TOKEN_CHUNK, T), width)
    for rows in rows_of(kept, T, TOKEN_CHUNK):
        h, gr, share = hidden[rows], g[rows], 1 / l[rows]
        n = len(h)
        y, t = m[rows] * shard.temperature, targets[rows]
        er, shift = (gr, gr) if e is None else (e[rows], ent[rows] - l[rows].log())
        dh = h.new_zeros(n, H, dtype=dtype) if want_hidden else None
        group = min(triton.cdiv(n, bt), 16)
        for v in range(0, V, VOCAB_CHUNK):
            w = weight[v : min(v + VOCAB_CHUNK, V)]
            dz = workspace[:n, : len(w)]
            with torch.cuda.device_of(h):
                logit_gradients[(triton.cdiv(n, bt) * triton.cdiv(len(w), bv),)](
                    _descriptor(h, bt, bh), _descriptor(w, bv, bh), y, share, gr, er, shift, t, _descriptor(dz, bt, bv),
                    n, len(w), shard.first + v, group, LOG2E / shard.temperature, LN2,
                    ENTROPY=e is not None, **constants, **launch,
                )  # fmt: skip
            if want_hidden:
                _accumulate(dh, dz, w)
            if want_weight:
                _accumulate(dweight[v : v + len(w)], dz.T, h)
        if want_hidden:
            dhidden[rows] = reduced(dh.div_(shard.temperature), shard).to(hidden.dtype)
    if want_weight:
        dweight = dweight.div_(shard.temperature).to(weight.dtype)
    return dhidden, dweight


def _accumulate(out, a, b):
    """out += a @ b in out's dtype; 16-bit factors are multiplied as they are and summed in float32."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    elif out.is_cuda and torch.__version__ >= "2.14":
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    elif out.is_cuda:  # older ones want the sum in the factors' dtype
        out += torch.mm(a, b, out_dtype=out.dtype)
    else:  # the interpreter's 16-bit tests
        out.addmm_(a.to(out.dtype), b.to(out.dtype))


def compile_cases():
    """(name, kernel, {argument: type}, {constexpr: value}, launch options, wants tensor cores and TMA) for compile_check."""
    integers = dict.fromkeys(("tokens", "vocab", "splits", "group", "first"), "i32")
    for dtype, short in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        for H in (2560, 576) if short == "bf16" else (2560,):
            constants, launch = _options(dtype, H)
            bt, bv, bh = constants["BT"], constants["BV"], constants["BH"]
            floats = dict.fromkeys(("M", "L", "S", "Y", "SHARE", "G", "E", "SHIFT"), "*fp32")
            types = integers | floats | {"TARGET": "*i64", "HIDDEN": f"*{short}", "WEIGHT": f"*{short}"}
            types |= {"hidden": f"tensordesc<{short}[{bt},{bh}]>", "weight": f"tensordesc<{short}[{bv},{bh}]>"}
            types |= {"dz": f"tensordesc<{short}[{bt},{bv}]>", "scale": "fp32", "unit": "fp32"}
            for entropy in (False, True):
                name = f"{short}, H {H}{', entropy' if entropy else ''}"
                yield f"row_statistics {name}", row_statistics, types, constants | {"ENTROPY": entropy}, launch, True
                yield f"logit_gradients {name}", logit_gradients, types, constants | {"ENTROPY": entropy}, launch, True
            target = dict(H=H, BT=TARGET_BLOCK, BH=128, ACC=constants["ACC"])
            yield f"target_logits {short}, H {H}", target_logits, types, target, {}, False
