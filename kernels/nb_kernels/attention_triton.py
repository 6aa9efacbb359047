"""Triton kernels of packed causal attention; attention.py states the mathematics.

A row is a query, a key's index is local to its block. Row i sees the keys low[i] <= j < high[i] with
low[i] = start[i] - k_offset and high[i] = q_offset + i + 1 - k_offset, cut to [0, Tk].
`tile_map` says per program which tiles to visit: [first, first whole, end of whole, end): those in between need no mask.
Matrices pass through tensor descriptors (TMA on Hopper) over [tokens, heads * stride], which read zeros past the last token
and write nothing there. BD, the width of a tile, is the head size; the launcher pads one that is no power of two.
Scores and lse are in base 2 inside.

Deterministic: no atomics; dK and dV of a key tile are one program, which loops over the R query heads of the group.
"""
import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.utils.weak import WeakIdKeyDictionary
from triton.tools.tensor_descriptor import TensorDescriptor

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = math.log2(math.e)
HEAD_SIZES = (16, 32, 64, 128, 256)  # widths of a tile; a head size between two is padded to the larger

# (kernel, head size) -> (rows, keys of a tile, warps, stages), for 16-bit inputs on sm_90. None of them spills registers there
# (compile_check). Larger tiles do; a tile of float32 does at any useful size, so float32 takes the torch path.
TILES = {
    ("forward", 16): (64, 64, 4, 2),
    ("forward", 32): (128, 64, 4, 3),
    ("forward", 64): (128, 64, 4, 3),
    ("forward", 128): (128, 128, 8, 2),
    ("forward", 256): (128, 64, 8, 2),
    ("keys", 16): (64, 64, 4, 2),
    ("keys", 32): (64, 64, 4, 2),
    ("keys", 64): (64, 128, 8, 2),
    ("keys", 128): (64, 128, 8, 2),
    ("keys", 256): (32, 64, 8, 2),
    ("queries", 16): (64, 64, 4, 2),
    ("queries", 32): (128, 64, 4, 3),
    ("queries", 64): (128, 64, 8, 3),
    ("queries", 128): (128, 64, 8, 3),
    ("queries", 256): (128, 32, 8, 2),
}


_MAPS = WeakIdKeyDictionary()  # low -> {everything else: map}


def tile_map(low, q_offset, k_offset, Tk, rows, keys, by_key=False):
    """int32 [tiles, 5]: a tile of rows and the tiles of keys it visits, most work first; made on low's device, without a sync.

    low [Tq] must not decrease (document starts of consecutive tokens do not). by_key: a tile of keys and the tiles of rows.
    A map is kept as long as `low` lives, so the layers of a step share it.
    """
    kept, key = _MAPS.setdefault(low, {}), (low._version, q_offset, k_offset, Tk, rows, keys, by_key)
    if key not in kept:
        kept[key] = _tile_map(low, q_offset, k_offset, Tk, rows, keys, by_key)
    return kept[key]


def _tile_map(low, q_offset, k_offset, Tk, rows, keys, by_key):
    Tq, device = low.numel(), low.device
    if by_key:
        own, size, end, step = keys, -(-Tk // keys), Tq, rows
    else:
        own, size, end, step = rows, -(-Tq // rows), Tk, keys
    i = torch.arange(size, device=device)
    if by_key:
        first_key, last_key = i * own + k_offset, torch.clamp((i + 1) * own, max=Tk) - 1 + k_offset
        lo, full_lo = first_key - q_offset, last_key - q_offset  # the first row that sees one key, all keys of the tile
        hi, full_hi = torch.searchsorted(low, last_key, right=True), torch.searchsorted(low, first_key, right=True)
    else:
        last_row = torch.clamp((i + 1) * own, max=Tq) - 1
        lo, full_lo = low[i * own] - k_offset, low[last_row] - k_offset
        hi, full_hi = last_row + 1 + q_offset - k_offset, i * own + 1 + q_offset - k_offset
    lo, hi = lo.clamp(0, end) // step, -(-hi.clamp(0, end) // step)
    hi = torch.maximum(lo, hi)
    full_lo = torch.minimum(torch.maximum(-(-full_lo.clamp(0, end) // step), lo), hi)
    full_hi = torch.minimum(torch.maximum(full_hi.clamp(0, end) // step, full_lo), hi)
    work, order = torch.sort(hi - lo, descending=True, stable=True)
    return torch.stack([i, lo, full_lo, full_hi, hi], 1)[order].int().contiguous()


@triton.jit
def _bounds(START, rows, Tq, Tk, q_offset, k_offset):
    """First key and one past the last key that each row sees, cut to the block. Rows past the end are stored nowhere."""
    low = tl.load(START + rows, mask=rows < Tq, other=0) - k_offset
    high = rows.to(tl.int64) + q_offset + 1 - k_offset
    return tl.maximum(low, 0).to(tl.int32), tl.minimum(high, Tk).to(tl.int32)


@triton.jit
def _forward_step(q, K, V, n, k_at, v_at, acc, l, m, low, high, scale2, BN: tl.constexpr,
                  MASKED: tl.constexpr, ACC: tl.constexpr):
    z = tl.dot(q, K.load([n * BN, k_at]).T, out_dtype=ACC)
    if MASKED:
        key = n * BN + tl.arange(0, BN)
        z = tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), z, float("-inf"))
    new = tl.maximum(m, tl.max(z, 1) * scale2)
    if MASKED:  # a row that has seen nothing yet keeps m = -inf, and -inf - -inf would be NaN
        reference = tl.where(new == float("-inf"), 0.0, new)
    else:
        reference = new
    decay = tl.exp2(m - reference)
    p = tl.exp2(z * scale2 - reference[:, None])
    v = V.load([n * BN, v_at])
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], out_dtype=ACC)
    return acc, l * decay + tl.sum(p, 1), new


@triton.jit(do_not_specialize=["Tq", "Tk", "q_offset", "k_offset"])
def _forward(Q, K, V, OUT, LSE, START, MAP, Tq, Tk, q_offset, k_offset, scale2, sq, sk, sv, so, stride_lse,
             N: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
             ACC: tl.constexpr, FRESH: tl.constexpr):
    """Merge one tile of rows of one head into OUT, LSE. FRESH: they hold nothing yet and are only written."""
    h, entry = tl.program_id(0) % N, MAP + tl.program_id(0) // N * 5
    i, lo, full_lo = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    full_hi, hi = tl.load(entry + 3), tl.load(entry + 4)
    if FRESH or lo < hi:
        rows = i * BM + tl.arange(0, BM)
        low, high = _bounds(START, rows, Tq, Tk, q_offset, k_offset)
        lse_at = LSE + rows.to(tl.int64) * stride_lse + h
        q = Q.load([i * BM, h * sq])
        k_at, v_at = h // R * sk, h // R * sv
        if FRESH:
            m, l, acc = tl.full([BM], float("-inf"), ACC), tl.zeros([BM], ACC), tl.zeros([BM, BD], ACC)
        else:  # what was merged before is one more key with score lse and value out
            m = tl.load(lse_at, mask=rows < Tq, other=float("-inf")).to(ACC) * (1.0 / LN2)
            l = tl.where(m == float("-inf"), 0.0, 1.0).to(ACC)
            acc = tl.where((l > 0.0)[:, None], OUT.load([i * BM, h * so]).to(ACC), 0.0)
        for n in range(full_lo, full_hi):
            acc, l, m = _forward_step(q, K, V, n, k_at, v_at, acc, l, m, low, high, scale2, BN, False, ACC)
        for t in range(full_lo - lo + hi - full_hi):  # the edges on both sides of the whole tiles
            n = tl.where(t < full_lo - lo, lo + t, full_hi + t - (full_lo - lo))
            acc, l, m = _forward_step(q, K, V, n, k_at, v_at, acc, l, m, low, high, scale2, BN, True, ACC)
        seen = l > 0.0
        total = tl.where(seen, l, 1.0)
        OUT.store([i * BM, h * so], tl.where(seen[:, None], acc / total[:, None], 0.0).to(OUT.dtype))
        tl.store(lse_at, tl.where(seen, (m + tl.log2(total)) * LN2, float("-inf")), mask=rows < Tq)


@triton.jit
def _key_step(k, v, Q, DO, LSE2, DELTA, START, r, h, sq, so, key, dk, dv, Tq, Tk, q_offset, k_offset, scale2, stride_stat,
              BM: tl.constexpr, MASKED: tl.constexpr, ACC: tl.constexpr):
    q, do = Q.load([r * BM, h * sq]), DO.load([r * BM, h * so])
    rows = r * BM + tl.arange(0, BM)
    stat = h.to(tl.int64) * stride_stat
    p = tl.dot(k, q.T, out_dtype=ACC) * scale2 - tl.load(LSE2 + stat + rows)[None, :]  # [BN, BM]
    p = tl.exp2(p)
    if MASKED:
        low, high = _bounds(START, rows, Tq, Tk, q_offset, k_offset)
        p = tl.where((key[:, None] >= low[None, :]) & (key[:, None] < high[None, :]), p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, out_dtype=ACC)
    ds = p * (tl.dot(v, do.T, out_dtype=ACC) - tl.load(DELTA + stat + rows)[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, out_dtype=ACC)
    return dk, dv


@triton.jit(do_not_specialize=["Tq", "Tk", "q_offset", "k_offset"])
def _backward_keys(Q, K, V, DO, DK, DV, LSE2, DELTA, START, MAP, Tq, Tk, q_offset, k_offset, scale, scale2,
                   sq, sk, sv, so, sdk, sdv, stride_stat,
                   G: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
                   ACC: tl.constexpr, FRESH: tl.constexpr):
    """dK and dV of one tile of keys: a loop over the rows that see it, of all R query heads of the group."""
    hk, entry = tl.program_id(0) % G, MAP + tl.program_id(0) // G * 5
    j, lo, full_lo = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    full_hi, hi = tl.load(entry + 3), tl.load(entry + 4)
    if FRESH or lo < hi:
        key = j * BN + tl.arange(0, BN)
        k, v = K.load([j * BN, hk * sk]), V.load([j * BN, hk * sv])
        dk, dv = tl.zeros([BN, BD], ACC), tl.zeros([BN, BD], ACC)
        whole = full_hi - full_lo
        for t in range(whole * R):  # one flat loop: a short document would drain the pipeline once per head
            dk, dv = _key_step(k, v, Q, DO, LSE2, DELTA, START, full_lo + t % whole, hk * R + t // whole, sq, so, key, dk, dv,
                               Tq, Tk, q_offset, k_offset, scale2, stride_stat, BM, False, ACC)
        edge = hi - lo - whole
        for t in range(edge * R):
            r = lo + t % edge
            dk, dv = _key_step(k, v, Q, DO, LSE2, DELTA, START, tl.where(r < full_lo, r, r + whole), hk * R + t // edge,
                               sq, so, key, dk, dv, Tq, Tk, q_offset, k_offset, scale2, stride_stat, BM, True, ACC)
        dk = dk * scale
        if not FRESH:
            dk += DK.load([j * BN, hk * sdk])
        DK.store([j * BN, hk * sdk], dk.to(DK.dtype))
        if not FRESH:
            dv += DV.load([j * BN, hk * sdv])
        DV.store([j * BN, hk * sdv], dv.to(DV.dtype))


@triton.jit
def _query_step(q, do, K, V, n, k_at, v_at, dq, lse2, delta, low, high, scale2, BN: tl.constexpr,
                MASKED: tl.constexpr, ACC: tl.constexpr):
    k, v = K.load([n * BN, k_at]), V.load([n * BN, v_at])
    p = tl.exp2(tl.dot(q, k.T, out_dtype=ACC) * scale2 - lse2[:, None])
    if MASKED:
        key = n * BN + tl.arange(0, BN)
        p = tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), p, 0.0)
    ds = p * (tl.dot(do, v.T, out_dtype=ACC) - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, out_dtype=ACC)


@triton.jit(do_not_specialize=["Tq", "Tk", "q_offset", "k_offset"])
def _backward_queries(Q, K, V, DO, DQ, LSE2, DELTA, START, MAP, Tq, Tk, q_offset, k_offset, scale, scale2,
                      sq, sk, sv, so, sdq, stride_stat,
                      N: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
                      ACC: tl.constexpr, FRESH: tl.constexpr):
    """dQ of one tile of rows of one head."""
    h, entry = tl.program_id(0) % N, MAP + tl.program_id(0) // N * 5
    i, lo, full_lo = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    full_hi, hi = tl.load(entry + 3), tl.load(entry + 4)
    if FRESH or lo < hi:
        rows = i * BM + tl.arange(0, BM)
        low, high = _bounds(START, rows, Tq, Tk, q_offset, k_offset)
        q, do = Q.load([i * BM, h * sq]), DO.load([i * BM, h * so])
        k_at, v_at = h // R * sk, h // R * sv
        stat = h.to(tl.int64) * stride_stat
        lse2, delta = tl.load(LSE2 + stat + rows), tl.load(DELTA + stat + rows)
        dq = tl.zeros([BM, BD], ACC)
        for n in range(full_lo, full_hi):
            dq = _query_step(q, do, K, V, n, k_at, v_at, dq, lse2, delta, low, high, scale2, BN, False, ACC)
        for t in range(full_lo - lo + hi - full_hi):
            n = tl.where(t < full_lo - lo, lo + t, full_hi + t - (full_lo - lo))
            dq = _query_step(q, do, K, V, n, k_at, v_at, dq, lse2, delta, low, high, scale2, BN, True, ACC)
        dq = dq * scale
        if not FRESH:
            dq += DQ.load([i * BM, h * sdq])
        DQ.store([i * BM, h * sdq], dq.to(DQ.dtype))


INTERPRETED = not isinstance(_forward, triton.runtime.JITFunction)  # TRITON_INTERPRET=1 was set before the import
_ACC = {torch.float32: tl.float32, torch.float64: tl.float64}


def _width(size):
    if size > HEAD_SIZES[-1]:
        raise ValueError(f"head size {size} must be at most {HEAD_SIZES[-1]} for the kernels; use implementation='torch'")
    return next(width for width in HEAD_SIZES if width >= size)


def _padded(x, width):
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _matrix(x, rows):
    """Descriptor of x [tokens, heads, D] for tiles of `rows` tokens of one head, which begins at column head * x.stride(1)."""
    T, heads, D = x.shape
    width = (heads - 1) * x.stride(1) + D
    return TensorDescriptor(x, [T, width], [x.stride(0) if T > 1 else width, 1], [rows, D])  # one token: of any stride


def forward(q, k, v, out, lse, start, q_offset, k_offset, scale, fresh=False):
    """Merge the attention of q over k, v into (out, lse) in place; fresh: they hold nothing yet. out may then be 16-bit."""
    (Tq, N, D), (Tk, G, _) = q.shape, k.shape
    width = _width(D)
    rows, keys, warps, stages = TILES["forward", width]
    q, k, v, target = (_padded(x, width) for x in (q, k, v, out))
    tiles = tile_map(start, q_offset, k_offset, Tk, rows, keys)
    with torch.cuda.device_of(q):
        _forward[(len(tiles) * N,)](
            _matrix(q, rows), _matrix(k, keys), _matrix(v, keys), _matrix(target, rows), lse, start, tiles,
            Tq, Tk, q_offset, k_offset, scale * LOG2E, q.stride(1), k.stride(1), v.stride(1), target.stride(1), lse.stride(0),
            N=N, R=N // G, BM=rows, BN=keys, BD=width, ACC=_ACC[lse.dtype], FRESH=fresh, num_warps=warps, num_stages=stages,
        )
    if target is not out:
        out.copy_(target[..., :D])


def _by_head(x, multiple):
    """[Tq, N] -> [N, Tq rounded up]: a tile reads one line of memory, without a mask; rows past the end meet zeros of dout."""
    return F.pad(x.T, (0, -x.shape[0] % multiple)).contiguous()


def backward(dout, q, k, v, lse, delta, dq, dk, dv, start, q_offset, k_offset, scale, fresh=False):
    """Add the gradients to dq, dk, dv in place; fresh: they hold nothing yet and may be 16-bit."""
    (Tq, N, D), (Tk, G, _) = q.shape, k.shape
    width, acc = _width(D), _ACC[lse.dtype]
    q, k, v, dout = (_padded(x, width) for x in (q, k, v, dout))
    grads = [_padded(x, width) for x in (dq, dk, dv)]
    longest = max(TILES["keys", width][0], TILES["queries", width][0])
    lse2, delta = _by_head(lse * LOG2E, longest), _by_head(delta, longest)
    numbers = (Tq, Tk, q_offset, k_offset, scale, scale * LOG2E, *(x.stride(1) for x in (q, k, v, dout)))
    with torch.cuda.device_of(q):
        rows, keys, warps, stages = TILES["keys", width]
        tiles = tile_map(start, q_offset, k_offset, Tk, rows, keys, by_key=True)
        _backward_keys[(len(tiles) * G,)](
            _matrix(q, rows), _matrix(k, keys), _matrix(v, keys), _matrix(dout, rows), *(_matrix(x, keys) for x in grads[1:]),
            lse2, delta, start, tiles, *numbers, grads[1].stride(1), grads[2].stride(1), lse2.stride(0),
            G=G, R=N // G, BM=rows, BN=keys, BD=width, ACC=acc, FRESH=fresh, num_warps=warps, num_stages=stages,
        )
        rows, keys, warps, stages = TILES["queries", width]
        tiles = tile_map(start, q_offset, k_offset, Tk, rows, keys)
        _backward_queries[(len(tiles) * N,)](
            _matrix(q, rows), _matrix(k, keys), _matrix(v, keys), _matrix(dout, rows), _matrix(grads[0], rows),
            lse2, delta, start, tiles, *numbers, grads[0].stride(1), lse2.stride(0),
            N=N, R=N // G, BM=rows, BN=keys, BD=width, ACC=acc, FRESH=fresh, num_warps=warps, num_stages=stages,
        )
    for grad, target in zip((dq, dk, dv), grads):
        if target is not grad:
            grad.copy_(target[..., :D])


def compile_cases():
    """Every tabled configuration, for compile_check: both 16-bit types at the model's head size, bf16 at the others."""
    kernels = {"forward": _forward, "keys": _backward_keys, "queries": _backward_queries}
    types = dict.fromkeys(("LSE", "LSE2", "DELTA"), "*fp32") | {"START": "*i64", "MAP": "*i32"}
    types |= dict.fromkeys(("scale", "scale2"), "fp32")
    types |= dict.fromkeys(("sq", "sk", "sv", "so", "sdq", "sdk", "sdv", "stride_stat"), "i32:16")
    ordered = sorted(TILES.items(), key=lambda item: item[0][1] != 128)  # the model's head size first
    for (kernel, width), (rows, keys, warps, stages) in ordered:
        for dtype in ("bf16", "fp16") if width == 128 else ("bf16",):
            for fresh in (False, True):
                result = dtype if fresh else "fp32"
                matrices = {n: f"tensordesc<{dtype}[{rows},{width}]>" for n in ("Q", "DO")}
                matrices |= {n: f"tensordesc<{dtype}[{keys},{width}]>" for n in ("K", "V")}
                matrices |= {n: f"tensordesc<{result}[{rows},{width}]>" for n in ("OUT", "DQ")}
                matrices |= {n: f"tensordesc<{result}[{keys},{width}]>" for n in ("DK", "DV")}
                constants = {"N": 20, "G": 4, "R": 5, "BM": rows, "BN": keys, "BD": width, "ACC": tl.float32, "FRESH": fresh}
                name = f"attention {kernel} D{width} {dtype}, {'written' if fresh else 'accumulated'} in {result}"
                name += " (may spill)" if width == 256 else ""
                options = {"num_warps": warps, "num_stages": stages}
                yield name, kernels[kernel], types | matrices, constants, options, True
