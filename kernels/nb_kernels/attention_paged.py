"""Causal attention over keys and values in blocks behind a block table, for generation (Kwon et al., arXiv:2309.06180).

Sequence s has L[s] tokens in its cache, its c[s] newest are the queries: query i of s has position L[s] - c[s] + i and sees
the keys up to its own position (the last `window` of them, where set). Key j of s lies in block_table[s, j // B] at j mod B.

    s[i, j] = scale * q[i] . k[j]        out[i] = sum_j exp(s[i, j] - lse[i]) v[j],      lse[i] = log sum_j exp(s[i, j])

Shapes: q, out [Tq, N, D], the queries of all sequences in a row; k_cache, v_cache [blocks, B, G, D]; block_table [S, M] int32;
lengths [S]; cu_queries [S+1]. S sequences, N query heads, G key/value heads, R = N / G, D head size, B tokens of a block.
One kernel serves prefill, chunks of it and decoding. A program takes rows of one sequence: with few queries a row is one
(token, head of the group) pair, so a group's keys are read once for its R heads; with many it is a token of one head.
Decoding has too few programs to fill a GPU: the keys are cut into runs (split-K, Dao et al. 2023, "Flash-Decoding"), whose
normalised results and lse merge in a second kernel. No gradient: this is for inference. Scores are in base 2 inside.
"""
import math

import torch
import triton
import triton.language as tl

from nb_kernels import attention_torch

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = math.log2(math.e)
PROGRAMS = 264  # enough to fill the 132 streaming multiprocessors of an H100 twice
MANY = 16  # queries per sequence from which rows are tokens of one head

# (many queries?, head size) -> (rows, keys of a tile, warps, stages), for 16-bit inputs on sm_90: no register spills there
TILES = {(False, 16): (16, 64, 4, 3), (False, 32): (16, 64, 4, 3), (False, 64): (16, 128, 4, 3), (False, 128): (16, 128, 4, 3)}
TILES |= {(False, 256): (16, 64, 4, 3), (True, 16): (64, 64, 4, 2), (True, 32): (128, 64, 4, 3), (True, 64): (128, 64, 4, 3)}
TILES |= {(True, 128): (128, 64, 8, 3), (True, 256): (128, 64, 8, 2)}


def reference(q, k_cache, v_cache, block_table, lengths, cu_queries, scale=None, window=None):
    """The definition, one sequence at a time; tests call it in float64."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outs = [q[:0]]
    for s, (a, b) in enumerate(zip(cu_queries.tolist(), cu_queries.tolist()[1:])):
        length = int(lengths[s])
        k, v = (x[block_table[s].long()].flatten(0, 1)[:length].transpose(0, 1) for x in (k_cache, v_cache))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[0], 0) for x in (k, v))
        position = torch.arange(length - (b - a), length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)
        hidden = (key > position) | (key <= position - (window or length + 1))
        scores = (q[a:b].transpose(0, 1) @ k.mT * scale).masked_fill(hidden, -torch.inf)
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


def cases(device, dtype):
    """(name, inputs): decoding, a chunk of prefill, both mixed, an idle sequence; on CUDA also the sizes that a bench times."""
    shapes = [("decode", [9, 1, 30], [1, 1, 1], 8, 10, 2, 32), ("chunk", [37, 20], [20, 20], 8, 2, 1, 64)]
    shapes += [("mixed-idle", [40, 33, 5, 17], [1, 18, 0, 2], 16, 6, 2, 24)]
    if device != "cpu":
        shapes += [("decode64x8k", [8192] * 64, [1] * 64, 64, 20, 4, 128), ("decode1x256k", [262144], [1], 256, 20, 4, 128)]
        shapes += [("prefill4x4k", [4096] * 4, [4096] * 4, 64, 20, 4, 128)]
    for name, lengths, queries, B, N, G, D in shapes:
        most = -(-max(lengths) // B)
        blocks = torch.randperm(len(lengths) * most + 3, device=device)[: len(lengths) * most]
        cache = [torch.randn(len(lengths) * most + 3, B, G, D, device=device, dtype=dtype) for _ in range(2)]
        table = blocks.view(len(lengths), most).int()
        q = torch.randn(sum(queries), N, D, device=device, dtype=dtype)
        bounds = torch.tensor([0, *queries], device=device).cumsum(0)
        yield name, (q, *cache, table, torch.tensor(lengths, device=device), bounds)


@triton.jit(do_not_specialize=["blocks", "max_blocks", "tiles", "runs"])
def _forward(Q, K, V, OUT, LSE, TABLE, LENGTHS, CU, blocks, max_blocks, tiles, runs, window, scale2, D, stride_q, stride_qh,
             stride_block, stride_key, stride_head, stride_vblock, stride_vkey, stride_vhead, Tq,
             N: tl.constexpr, R: tl.constexpr, FOLD: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
             BD: tl.constexpr, ACC: tl.constexpr):
    """Rows of one sequence against one run of its keys. FOLD: heads per row group, a power of two >= R, or 1.

    OUT [runs, Tq, N, D], LSE [runs, Tq, N] (base 2, -inf where a run holds no visible key).
    """
    groups = N // R if FOLD > 1 else N
    h, rest = tl.program_id(0) % groups, tl.program_id(0) // groups
    run, rest = rest % runs, rest // runs
    tile, s = rest % tiles, rest // tiles
    begin = tl.load(CU + s).to(tl.int32)
    length = tl.minimum(tl.load(LENGTHS + s), max_blocks * B).to(tl.int32)
    count = (tl.minimum(tl.load(CU + s + 1), Tq) - begin).to(tl.int32)
    row, d = tile * BM + tl.arange(0, BM), tl.arange(0, BD)
    query, head = row // FOLD, row % FOLD + h * R if FOLD > 1 else row * 0 + h
    inside = (query < count) & ((row % FOLD < R) if FOLD > 1 else (row >= 0))
    if tile * BM // FOLD < count:
        position = length - count + query
        last = tl.minimum(length, length - count + (tile * BM + BM - 1) // FOLD + 1)  # one past the last key of the tile
        first = tl.maximum(0, length - count + tile * BM // FOLD + 1 - window)
        share = tl.cdiv(tl.cdiv(last - first, runs), BN) * BN
        lo, hi = first + run * share, tl.minimum(first + run * share + share, last)
        at = (begin + query).to(tl.int64)[:, None] * stride_q + (head * stride_qh)[:, None] + d[None, :]
        mask = inside[:, None] & (d < D)[None, :]
        q = tl.load(Q + at, mask=mask, other=0.0)
        m, l, acc = tl.full([BM], float("-inf"), ACC), tl.zeros([BM], ACC), tl.zeros([BM, BD], ACC)
        hk = h if FOLD > 1 else h // R
        for n in range(lo, hi, BN):
            key = n + tl.arange(0, BN)
            there = key < hi
            block = tl.load(TABLE + s.to(tl.int64) * max_blocks + key // B, mask=there, other=0)
            block = tl.minimum(tl.maximum(block, 0), blocks - 1).to(tl.int64)  # a wrong table must not leave the cache
            k_at = (block * stride_block + key % B * stride_key)[:, None] + (hk * stride_head + d)[None, :]
            k = tl.load(K + k_at, mask=there[:, None] & (d < D)[None, :], other=0.0)
            z = tl.dot(q, k.T, out_dtype=ACC)
            seen = there[None, :] & (key[None, :] <= position[:, None]) & (key[None, :] > (position - window)[:, None])
            z = tl.where(seen, z, float("-inf"))
            new = tl.maximum(m, tl.max(z, 1) * scale2)
            finite = tl.where(new == float("-inf"), 0.0, new)
            p, decay = tl.exp2(z * scale2 - finite[:, None]), tl.exp2(m - finite)
            v_at = (block * stride_vblock + key % B * stride_vkey)[:, None] + (hk * stride_vhead + d)[None, :]
            v = tl.load(V + v_at, mask=there[:, None] & (d < D)[None, :], other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], out_dtype=ACC)
            l, m = l * decay + tl.sum(p, 1), new
        some = l > 0.0
        total = tl.where(some, l, 1.0)
        target = (run.to(tl.int64) * Tq + begin + query) * N + head
        tl.store(OUT + target[:, None] * D + d[None, :], (acc / total[:, None]).to(OUT.dtype.element_ty), mask=mask)
        tl.store(LSE + target, tl.where(some, m + tl.log2(total), float("-inf")), mask=inside)


@triton.jit
def _merge(PARTS, LSE, OUT, rows, runs, D, BD: tl.constexpr, ACC: tl.constexpr):
    """One (query, head): the runs' results weighted by exp2(lse)."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BD)
    m, l, acc = tl.full([1], float("-inf"), ACC), tl.zeros([1], ACC), tl.zeros([BD], ACC)
    at = row
    for _ in range(runs):
        lse = tl.load(LSE + at + tl.arange(0, 1)).to(ACC)
        new = tl.maximum(m, lse)
        finite = tl.where(new == float("-inf"), 0.0, new)
        decay, weight = tl.exp2(m - finite), tl.exp2(lse - finite)
        acc = acc * decay + weight * tl.load(PARTS + at * D + d, mask=d < D, other=0.0).to(ACC)
        l, m = l * decay + weight, new
        at += rows
    tl.store(OUT + row * D + d, (acc / l).to(OUT.dtype.element_ty), mask=d < D)


INTERPRETED = not isinstance(_merge, triton.runtime.JITFunction)  # TRITON_INTERPRET=1 was set before the import


def _width(D):
    return max(16, triton.next_power_of_2(D))


def _paged_triton(q, k_cache, v_cache, block_table, lengths, cu_queries, scale, window, longest, runs):
    (Tq, N, D), (_, B, G, _) = q.shape, k_cache.shape
    S, R, acc = len(lengths), N // G, torch.promote_types(q.dtype, torch.float32)
    many = longest >= MANY
    rows, keys, warps, stages = TILES[many, _width(D)]
    fold = 1 if many else triton.next_power_of_2(max(2, R))
    rows = max(rows, fold)
    tiles, heads = triton.cdiv(longest * fold, rows), N if many else G
    if runs is None:  # a function of shapes alone, so that bits repeat
        most = max(1, block_table.shape[1] * B // (2 * keys))
        runs = max(1, min(PROGRAMS // (S * tiles * heads), most, 64))
    parts = q.new_empty((runs, Tq, N, D), dtype=q.dtype if runs == 1 else acc)
    lse = q.new_empty((runs, Tq, N), dtype=acc)
    tl_acc = tl.float64 if acc == torch.float64 else tl.float32
    with torch.cuda.device_of(q):
        _forward[(S * tiles * runs * heads,)](
            q, k_cache, v_cache, parts, lse, block_table, lengths, cu_queries, len(k_cache), block_table.shape[1], tiles, runs,
            2**31 - 1 if window is None else window, scale * LOG2E, D, *q.stride()[:2], *k_cache.stride()[:3],
            *v_cache.stride()[:3], Tq, N=N, R=R, FOLD=fold, B=B, BM=rows, BN=keys, BD=_width(D), ACC=tl_acc,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        if runs == 1:
            return parts[0]
        out = q.new_empty((Tq, N, D))
        _merge[(Tq * N,)](parts, lse, out, Tq * N, runs, D, BD=_width(D), ACC=tl_acc, num_warps=1)
    return out


def _paged_torch(q, k_cache, v_cache, block_table, lengths, cu_queries, scale, window):
    """One sequence after the other: its blocks are gathered, the rest is the tiled path; never [queries, keys] at once."""
    out = torch.empty_like(q)
    B = k_cache.shape[1]
    bounds = cu_queries.tolist()
    for s, (a, b, length) in enumerate(zip(bounds, bounds[1:], lengths.tolist())):
        if a == b:
            continue
        blocks = block_table[s, : -(-length // B)].long()
        k, v = (x[blocks].flatten(0, 1) for x in (k_cache, v_cache))  # causality hides what is after the last token
        position = torch.arange(length - (b - a), length, device=q.device)
        low = torch.zeros_like(position) if window is None else (position - window + 1).clamp_(min=0)
        acc = torch.zeros(b - a, *q.shape[1:], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        lse = acc.new_full(acc.shape[:2], -math.inf)
        attention_torch.forward(q[a:b], k, v, acc, lse, low, length - (b - a), 0, scale)
        out[a:b] = acc
    return out


@torch.no_grad()
def attention_paged(
    q, k_cache, v_cache, block_table, lengths, cu_queries, *, scale=None, window=None, longest=None, runs=None,
    implementation="auto",
):  # fmt: skip
    """q [Tq, N, D] against blocks of keys and values [blocks, B, G, D] -> out [Tq, N, D]. Not differentiable.

    block_table [S, M] int32: the blocks of each sequence. lengths [S]: tokens in the cache, the queries' own included.
    cu_queries [S+1]: the rows of q of each sequence, its newest tokens; a sequence may have none.
    longest: the most queries of one sequence. Passing it says that the table, lengths and bounds were checked before, so
    nothing waits for the device. runs: into how many the keys are cut (split-K); chosen from the shapes by default.
    implementation: "auto" (triton for 16-bit on CUDA, torch elsewhere), "torch", "triton".
    Raises ValueError for shapes, types, devices and indices that do not fit.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    _check(q, k_cache, v_cache, block_table, lengths, cu_queries, scale, window)
    half = q.dtype in (torch.bfloat16, torch.float16)
    if implementation not in ("auto", "torch", "triton"):
        raise ValueError(f"implementation={implementation!r} must be 'auto', 'torch' or 'triton'")
    if implementation == "triton" and not (q.is_cuda and half or INTERPRETED):
        raise ValueError(f"implementation='triton' needs 16-bit CUDA tensors, q is {q.dtype} on {q.device}; use 'torch'")
    if longest is None:
        longest = _check_values(q, k_cache, block_table, lengths, cu_queries)
    if not q.numel():
        return torch.empty_like(q)
    if implementation == "triton" or implementation == "auto" and q.is_cuda and half:
        if _width(q.shape[-1]) > 256:
            raise ValueError(f"head size D={q.shape[-1]} must be at most 256 for the kernel; use implementation='torch'")
        return _paged_triton(q, k_cache, v_cache, block_table, lengths, cu_queries, scale, window, longest, runs)
    return _paged_torch(q, k_cache, v_cache, block_table, lengths, cu_queries, scale, window)


def _check(q, k_cache, v_cache, block_table, lengths, cu_queries, scale, window):
    integers = (torch.int32, torch.int64)
    wanted = {"q": (q, 3, (q.dtype,)), "k_cache": (k_cache, 4, (q.dtype,)), "v_cache": (v_cache, 4, (q.dtype,))}
    wanted |= {"block_table": (block_table, 2, integers), "lengths": (lengths, 1, integers)}
    wanted |= {"cu_queries": (cu_queries, 1, integers)}
    for name, (x, dimensions, dtypes) in wanted.items():
        if x.dim() != dimensions or x.dtype not in dtypes or x.device != q.device:
            found = f"{name} is {x.dtype} {list(x.shape)} on {x.device}"
            raise ValueError(f"{found}, must have {dimensions} dimensions and {' or '.join(map(str, dtypes))} on {q.device}")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name} has strides {x.stride()}: its last dimension must be contiguous; call .contiguous()")
    (_, N, D), (_, _, G, _) = q.shape, k_cache.shape
    if not q.dtype.is_floating_point or k_cache.shape != v_cache.shape or k_cache.shape[3] != D or not G or N % G:
        found = f"q {q.dtype} {list(q.shape)}, k_cache {list(k_cache.shape)}, v_cache {list(v_cache.shape)}"
        raise ValueError(f"{found}: need floating point, equal caches, one head size and N a multiple of G")
    if len(lengths) != len(block_table) or len(cu_queries) != len(lengths) + 1:
        found = f"{len(block_table)} rows of block_table, {len(lengths)} lengths, {len(cu_queries)} bounds"
        raise ValueError(f"{found}: S sequences have S, S and S + 1 of them")
    if block_table.stride(0) != block_table.shape[1]:
        raise ValueError(f"block_table has strides {block_table.stride()}: it must be contiguous; call .contiguous()")
    if not (math.isfinite(scale) and scale > 0) or (window is not None and window < 1):
        raise ValueError(f"scale={scale} must be positive and finite, window={window} at least 1")


def _check_values(q, k_cache, block_table, lengths, cu_queries):
    """The most queries of a sequence; ValueError where an index would leave its tensor. Waits for the device once."""
    bounds, known = cu_queries.tolist(), lengths.tolist()
    queries = [b - a for a, b in zip(bounds, bounds[1:])]
    if bounds[0] != 0 or bounds[-1] != len(q) or min(queries, default=0) < 0:
        raise ValueError(f"cu_queries={bounds[:8]}{'...' * (len(bounds) > 8)} must rise from 0 to Tq = {len(q)}")
    room = block_table.shape[1] * k_cache.shape[1]
    for s, (count, length) in enumerate(zip(queries, known)):
        if not count <= length <= room:
            raise ValueError(f"lengths[{s}]={length} must be from its {count} queries to the {room} tokens of its blocks")
    used = torch.arange(block_table.shape[1], device=q.device) * k_cache.shape[1] < lengths[:, None]
    wrong = used & ((block_table < 0) | (block_table >= len(k_cache)))
    if bool(wrong.any()):
        s, i = wrong.nonzero()[0].tolist()
        raise ValueError(f"block_table[{s}, {i}]={int(block_table[s, i])} must be in [0, {len(k_cache)}), the cache's blocks")
    return max(queries, default=0)


def compile_cases():
    """For compile_check: decoding and prefill at each head size, and the merge of runs."""
    types = dict.fromkeys(("LSE",), "*fp32") | {"TABLE": "*i32", "LENGTHS": "*i64", "CU": "*i64", "scale2": "fp32"}
    types |= dict.fromkeys(("D", "stride_q", "stride_qh", "stride_block", "stride_key", "stride_head"), "i32:16")
    types |= dict.fromkeys(("stride_vblock", "stride_vkey", "stride_vhead"), "i32:16")
    for (many, width), (rows, keys, warps, stages) in TILES.items():
        result = "bf16" if many else "fp32"
        constants = {"N": 20, "R": 5, "FOLD": 1 if many else 8, "B": 64, "BM": rows, "BN": keys, "BD": width, "ACC": tl.float32}
        name = f"attention_paged {'prefill' if many else 'decode'} D{width}{' (may spill)' if width == 256 else ''}"
        matrices = dict.fromkeys(("Q", "K", "V"), "*bf16") | {"OUT": f"*{result}"}
        options = {"num_warps": warps, "num_stages": stages}
        yield name, _forward, types | matrices, constants, options, "wgmma" if many else False
        if (many, width) == (False, 128):  # the JIT makes an argument of 1 a constant: one query
            yield f"{name}, one query", _forward, types | matrices, constants | {"Tq": 1}, options, False
    types = {"PARTS": "*fp32", "LSE": "*fp32", "OUT": "*bf16", "D": "i32:16"}
    yield "attention_paged merge D128", _merge, types, {"BD": 128, "ACC": tl.float32}, {"num_warps": 1}, False
