"""attention in pieces: exact in float64 on both paths, merged over simulated ranks, frugal, strict about inputs."""

import contextlib
import math

import pytest
import torch
from nb_kernels import attention as module
from nb_kernels import attention_torch, attention_triton
from nb_kernels.attention import attention, attention_backward, attention_forward, cases, document_starts, reference

from tests.kernels.allocations import MARGIN, LiveBytes, guarded
from tests.kernels.interpreter_bf16 import bf16_interpreter

needs_interpreter = pytest.mark.skipif(not attention_triton.INTERPRETED, reason="float64 kernels run in the interpreter")
PATHS = ["torch", pytest.param("triton", marks=needs_interpreter)]
PACKS = {
    "one-token": ([1], 2, 1, 16),
    "63": ([63], 2, 2, 16),
    "257": ([257], 2, 1, 16),
    "documents-of-1": ([1, 1, 5, 33, 1, 30, 1], 4, 2, 24),
    "wide-head": ([9, 12], 2, 1, 256),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles of each kind in every test."""
    monkeypatch.setattr(attention_torch, "TILE_KEYS", 32)
    monkeypatch.setattr(attention_torch, "TILE_SCORES", 1 << 10)
    for kernel, width in attention_triton.TILES:
        monkeypatch.setitem(attention_triton.TILES, (kernel, width), (16, 32, 4, 1) if kernel == "keys" else (32, 16, 4, 1))


def pack(lengths, N, G, D, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    T = sum(lengths)
    q, k, v, dout = (torch.randn(T, heads, D, dtype=torch.float64).to(dtype) for heads in (N, G, G, N))
    return q, k, v, dout, torch.tensor([0, *lengths]).cumsum(0)


def output_and_gradients(function, q, k, v, dout, cu_seqlens, **options):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = function(*leaves, cu_seqlens, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def zigzag(T, ranks):
    """First and last position of the chunks in the order in which the ranks hold them."""
    size = T // (2 * ranks)
    return [(c * size, (c + 1) * size) for r in range(ranks) for c in (r, 2 * ranks - 1 - r)]


def in_blocks(q, k, v, dout, cu_seqlens, blocks, path, window=None, scale=None):
    """out, dq, dk, dv from one call per pair of blocks, as context-parallel ranks make them."""
    start, acc = document_starts(cu_seqlens), torch.promote_types(q.dtype, torch.float32)
    options = {"scale": scale or q.shape[-1] ** -0.5, "window": window, "implementation": path}
    out, lse = torch.zeros(q.shape, dtype=acc), torch.full(q.shape[:2], -math.inf, dtype=acc)
    pairs = [(slice(*a), slice(*b), {"q_offset": a[0], "k_offset": b[0]}) for a in blocks for b in blocks]
    for a, b, offsets in pairs:
        attention_forward(q[a], k[b], v[b], out[a], lse[a], start=start[a], **offsets, **options)
    delta = (dout.to(acc) * out).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=acc) for x in (q, k, v))
    for a, b, offsets in pairs:
        attention_backward(
            dout[a], q[a], k[b], v[b], lse[a], delta[a], dq[a], dk[b], dv[b], start=start[a], **offsets, **options
        )  # fmt: skip
    return [out, dq, dk, dv]


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1.0))  # a lone token's dq is 0


def assert_close(found, exact, bound=1e-12):
    for f, e in zip(found, exact):
        assert f.shape == e.shape and error(f, e) < bound


@pytest.mark.parametrize("window", [None, 7], ids=["causal", "window7"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", PACKS)
def test_float64_output_and_gradients_equal_autograd(name, path, window):
    inputs = pack(*PACKS[name])
    exact = output_and_gradients(reference, *inputs, window=window)
    assert_close(output_and_gradients(attention, *inputs, window=window, implementation=path), exact)


@pytest.mark.parametrize("ranks, path", [(1, "torch"), (2, "torch"), (4, "torch"), (1, PATHS[1].values[0]), (2, "triton")])
def test_zigzag_blocks_of_any_context_size_merge_to_the_same_result(ranks, path):
    if path == "triton" and not attention_triton.INTERPRETED:
        pytest.skip("float64 kernels run in the interpreter")
    inputs = pack([1, 19, 3, 37, 4], 2, 1, 16)  # documents straddle chunks, no length divides by 2 * ranks
    exact = output_and_gradients(reference, *inputs)
    assert_close(in_blocks(*inputs, zigzag(64, ranks), path), exact)


@pytest.mark.parametrize("path", PATHS)
def test_blocks_of_unequal_and_no_length_merge_in_any_order(path):
    inputs = pack([5, 1, 31, 10], 2, 2, 16)
    exact = output_and_gradients(reference, *inputs)
    blocks = [(33, 47), (0, 0), (0, 7), (7, 33)]
    assert_close(in_blocks(*inputs, blocks, path), exact)


@pytest.mark.parametrize("path", PATHS)
def test_a_window_crosses_blocks(path):
    inputs = pack([40, 8], 2, 1, 16)
    exact = output_and_gradients(reference, *inputs, window=9)
    assert_close(in_blocks(*inputs, [(0, 13), (13, 48)], path, window=9), exact)


@pytest.mark.parametrize("path", PATHS)
def test_a_block_that_no_row_sees_changes_no_bit(path):
    q, k, v, dout, _ = pack([40], 2, 1, 16)
    start = torch.cat([torch.zeros(8), torch.full((12,), 28.0)]).long()  # rows 20..39; the later ones begin at 28
    out, lse = torch.randn(20, 2, 16).double(), torch.randn(20, 2).double()
    grads = [torch.randn(n, h, 16).double() for n, h in ((20, 2), (20, 1), (20, 1))]
    before = [x.clone() for x in (out, lse, *grads)]
    options = {"scale": 0.25, "implementation": path, "q_offset": 0, "k_offset": 20, "start": start * 0}
    attention_forward(q[:20], k[20:], v[20:], out, lse, **options)
    attention_backward(dout[:20], q[:20], k[20:], v[20:], lse, lse, *grads, **options)
    assert all(torch.equal(a, b) for a, b in zip(before, (out, lse, *grads)))
    options |= {"q_offset": 20, "k_offset": 0, "start": start}
    attention_forward(q[20:], k[:20], v[:20], out, lse, **options)  # rows 8.. begin after the block's last key
    assert torch.equal(out[8:], before[0][8:]) and error(lse[8:], before[1][8:]) < 1e-15
    assert error(lse[:8], before[1][:8]) > 1e-3


@pytest.mark.parametrize("path", PATHS)
def test_a_row_that_has_seen_nothing_is_zero_and_has_no_gradient(path):
    q, k, v, dout, _ = pack([40], 2, 1, 16)
    start = torch.full((20,), 30)
    start[:5] = 0
    out, lse = torch.full((20, 2, 16), torch.nan).double(), torch.full((20, 2), -math.inf).double()
    options = {"scale": 0.25, "implementation": path, "q_offset": 20, "k_offset": 0, "start": start}
    attention_forward(q[20:], k[:20], v[:20], out, lse, **options)
    assert lse[:5].isfinite().all() and (lse[5:] == -math.inf).all() and out[:5].isfinite().all() and not out[5:].any()
    dq, dk, dv = (torch.zeros(20, h, 16).double() for h in (2, 1, 1))
    attention_backward(dout[20:], q[20:], k[:20], v[:20], lse, torch.zeros_like(lse), dq, dk, dv, **options)
    assert dq[:5].all() and not dq[5:].any() and dk.isfinite().all() and dv.isfinite().all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_shifted_scores_lose_no_digits(path, shift):
    q, k, v, dout, cu_seqlens = pack([37, 20], 2, 1, 16)
    q, k = (x.mul(256).round().div(256) for x in (q, k))  # on a coarse grid every score is exact
    q[..., 0], k[..., 0] = 1.0, shift * 4  # scale 1/4
    exact = output_and_gradients(reference, q, k, v, dout, cu_seqlens)
    assert error(attention(q, k, v, cu_seqlens, implementation=path), exact[0]) < 1e-12
    # merging and backward take lse, whose last digit is 2e-12 at 1e4
    out, dq, dk, dv = in_blocks(q, k, v, dout, cu_seqlens, [(0, 30), (30, 57)], path)
    assert error(out, exact[0]) < 1e-11
    assert max(error(dq[..., 1:], exact[1][..., 1:]), error(dk, exact[2]), error(dv, exact[3])) < 1e-11


def test_scores_that_outgrow_their_reference_are_rescaled():
    """The torch path keeps the first tile's maximum as long as the exponentials stay in range."""
    q, k, v, dout, cu_seqlens = pack([200], 1, 1, 16)
    k = k * torch.linspace(0, 400, 200)[:, None, None].double()
    exact = output_and_gradients(reference, q, k, v, dout, cu_seqlens)
    assert_close(in_blocks(q, k, v, dout, cu_seqlens, [(0, 200)], "torch"), exact, 1e-11)
    narrow = in_blocks(*(x.float() for x in (q, k, v, dout)), cu_seqlens, [(0, 200)], "torch")
    assert all(x.isfinite().all() for x in narrow)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name, _ in cases("cpu", torch.float32)])
def test_error_is_at_most_twice_that_of_torch(name, dtype, path):
    torch.manual_seed(0)
    q, k, v, cu_seqlens = dict(cases("cpu", dtype))[name]
    dout = torch.randn(q.shape).to(dtype)
    exact = output_and_gradients(reference, *(x.double() for x in (q, k, v, dout)), cu_seqlens)
    plain = output_and_gradients(reference, q, k, v, dout, cu_seqlens)
    with bf16_interpreter() if dtype == torch.bfloat16 and path == "triton" else contextlib.nullcontext():
        found = output_and_gradients(attention, q, k, v, dout, cu_seqlens, implementation=path)
    for f, p, e in zip(found, plain, exact):
        assert f.dtype == dtype and error(f, e) <= 2 * error(p, e)


@pytest.mark.parametrize("path", PATHS)
def test_a_ring_in_bf16_is_as_accurate_as_one_rank(path):
    inputs = pack([50, 14], 2, 1, 16, torch.bfloat16)
    exact = output_and_gradients(reference, *(x.double() for x in inputs[:4]), inputs[4])
    plain = output_and_gradients(reference, *inputs)
    with bf16_interpreter():
        found = in_blocks(*inputs, zigzag(64, 2), path)
    for f, p, e in zip(found, plain, exact):
        assert f.dtype == torch.float32 and error(f, e) <= 2 * error(p, e)


@pytest.mark.parametrize("path", PATHS)
def test_a_change_in_one_document_leaves_every_bit_of_the_others(path):
    q, k, v, dout, cu_seqlens = pack([21, 30, 13], 2, 1, 16, torch.float32)
    before = output_and_gradients(attention, q, k, v, dout, cu_seqlens, implementation=path)
    q[25], k[25], v[25] = q[25] + 1, k[25] * 50, v[25] - 1
    after = output_and_gradients(attention, q, k, v, dout, cu_seqlens, implementation=path)
    others = torch.cat([torch.arange(21), torch.arange(51, 64)])
    for a, b in zip(before, after):
        assert torch.equal(a[others], b[others]) and not torch.equal(a[21:51], b[21:51])


@pytest.mark.parametrize("path", PATHS)
def test_two_runs_agree_in_every_bit(path):
    inputs = pack([50, 14], 4, 2, 16, torch.float32)
    for a, b in zip(*(output_and_gradients(attention, *inputs, implementation=path) for _ in range(2))):
        assert torch.equal(a, b)


@needs_interpreter
def test_no_kernel_reads_or_writes_outside_its_buffers():
    q, k, v, dout, cu_seqlens = pack([1, 20, 12], 2, 1, 24)
    exact = output_and_gradients(reference, q, k, v, dout, cu_seqlens)
    start, _ = guarded(document_starts(cu_seqlens))
    (q, _), (k, _), (v, _), (dout, _) = map(guarded, (q, k, v, dout))
    results = [guarded(torch.zeros_like(x)) for x in (q, q, k, v)]
    lse, lse_buffer = guarded(torch.full(q.shape[:2], -math.inf).double())
    options = {"start": start, "q_offset": 0, "k_offset": 0, "scale": 24**-0.5, "implementation": "triton"}
    out, *grads = [x for x, _ in results]
    attention_forward(q, k, v, out, lse, **options)
    attention_backward(dout, q, k, v, lse, (dout * out).sum(-1), *grads, **options)
    assert_close([out, *grads], exact)
    for buffer in (lse_buffer, *(b for _, b in results)):
        assert torch.cat([buffer[:MARGIN], buffer[-MARGIN:]]).isnan().all()


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_visited_tiles_hold_all_that_is_visible_and_little_else(seed, by_key):
    torch.manual_seed(seed)
    lengths = torch.randint(1, (4, 30, 90)[seed % 3], (12,))
    position, start = torch.arange(int(lengths.sum())), torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    window = None if seed % 2 else 11
    q_first, k_first = (int(torch.randint(0, len(position) // 2, ())) for _ in range(2))
    rows, keys = position[q_first : q_first + 60], position[k_first : k_first + 70]
    low = module._low(start[rows], q_first, window)
    seen = (low[:, None] <= keys) & (keys <= rows[:, None])  # [Tq, Tk]
    visible = sum(int(seen[r, c].any()) for r, c, _ in _kernel_tiles(low, q_first, k_first, len(keys), False))
    visited = _kernel_tiles(low, q_first, k_first, len(keys), by_key)
    covered = torch.zeros_like(seen)
    for r, c, whole in visited:
        covered[r, c] = True
        assert not whole or (seen[r, c].all() and seen[r, c].shape == (16, 8))
    assert (covered | ~seen).all()
    assert sum(int(seen[r, c].any()) for r, c, _ in visited) == visible
    assert len(visited) <= visible + 2 * (-(-len(rows) // 16) + -(-len(keys) // 8))
    covered.zero_()
    for r, tiles in attention_torch._tiles(low, q_first, k_first, len(keys), 1):
        for c, masked in tiles:
            covered[r, c] = True
            assert masked or seen[r, c].all()
    assert (covered | ~seen).all()


def _kernel_tiles(low, q_offset, k_offset, Tk, by_key):
    """[(rows, keys, whole?)] that the kernels visit with tiles of 16 rows and 8 keys."""
    found = []
    for own, lo, full_lo, full_hi, hi in attention_triton.tile_map(low, q_offset, k_offset, Tk, 16, 8, by_key).tolist():
        for other in range(lo, hi):
            row, key = (other, own) if by_key else (own, other)
            found.append((slice(row * 16, row * 16 + 16), slice(key * 8, key * 8 + 8), full_lo <= other < full_hi))
    return found


def test_tiles_with_most_work_come_first():
    tiles = attention_triton.tile_map(torch.zeros(256, dtype=torch.long), 0, 0, 256, 16, 16)
    work = tiles[:, 4] - tiles[:, 1]
    assert torch.equal(work, work.sort(descending=True).values) and sorted(tiles[:, 0].tolist()) == list(range(16))


def test_documents_are_batched_with_little_padding_and_none_is_lost():
    torch.manual_seed(0)
    bounds = (0, *torch.randint(1, 300, (60,)).cumsum(0).tolist())
    source, place, shapes = attention_torch._buckets(bounds)
    assert torch.equal(source[place], torch.arange(bounds[-1]))
    padded = sum(count * length * length for count, length in shapes)
    exact = sum((b - a) ** 2 for a, b in zip(bounds, bounds[1:]))
    assert padded < 1.25 * exact and len(shapes) < 20
    assert attention_torch._buckets((0, 7))[0] is None  # a lone document is not copied


@pytest.mark.parametrize("whole", [True, False], ids=["documents", "blocks"])
def test_memory_is_linear_in_tokens(monkeypatch, whole):
    monkeypatch.undo()  # tiles of the real size
    peaks = []
    for T in (4096, 8192):
        q, k, v, dout, cu_seqlens = pack([T], 1, 1, 16, torch.float32)
        watch = LiveBytes()
        with watch:
            if whole:
                output_and_gradients(attention, q, k, v, dout, cu_seqlens)
            else:
                in_blocks(q, k, v, dout, cu_seqlens, [(0, T)], "torch")
        peaks.append(watch.peak)
        assert watch.largest <= 4 * attention_torch.TILE_SCORES < T * T * 4 / 8
    assert peaks[1] - peaks[0] < 16 * 4096 * 16 * 4  # sixteen more arrays of the shape of q


def test_bounds_are_looked_at_again_after_a_change_in_place():
    q, k, v, _, cu_seqlens = pack([4, 6], 1, 1, 16)
    attention(q, k, v, cu_seqlens)
    cu_seqlens[1] = 7
    assert error(attention(q, k, v, cu_seqlens), reference(q, k, v, cu_seqlens)) < 1e-12
    cu_seqlens[2] = 11
    with pytest.raises(ValueError, match="11"):
        attention(q, k, v, cu_seqlens)


@needs_interpreter
@pytest.mark.parametrize("stride", [1, 16])
def test_one_token_may_have_any_stride_to_the_next(stride):
    x = torch.randn(64, dtype=torch.float64).as_strided((1, 4, 16), (stride, 16, 1))
    rows = attention_triton._matrix(x, 16)
    assert rows.strides[0] >= rows.shape[1]  # the driver refuses rows that overlap
    assert torch.equal(attention(x, x, x, torch.tensor([0, 1]), implementation="triton"), x)


@pytest.mark.parametrize("path", PATHS)
def test_a_second_derivative_is_refused(path):
    q, k, v, dout, cu_seqlens = pack([5, 3], 2, 1, 16)
    q.requires_grad_()
    out = attention(q, k, v, cu_seqlens, window=4, implementation=path)
    (dq,) = torch.autograd.grad(out, q, dout.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@pytest.mark.parametrize("path", PATHS)
def test_no_tokens_give_an_empty_result(path):
    q = torch.randn(0, 2, 16, requires_grad=True)
    out = attention(q, q[:, :1], q[:, :1], torch.tensor([0]), implementation=path)
    out.sum().backward()
    assert out.shape == (0, 2, 16)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"q": torch.randn(10, 3, 16)}, "3 query heads .* 2 key heads"),
        ({"k": torch.randn(9, 2, 16)}, r"k has shape \[9, 2, 16\]"),
        ({"v": torch.randn(10, 2, 8)}, r"v has shape \[10, 2, 8\]: D is 16"),
        ({"v": torch.randn(10, 2, 16).bfloat16()}, "v is torch.bfloat16"),
        ({"q": torch.randn(10, 16, 4).mT}, "contiguous"),
        ({"q": torch.randn(10, 64)}, "3 dimensions"),
        ({"cu_seqlens": torch.tensor([0, 4, 9])}, r"\[0, 4, 9\] must rise from 0 to T = 10"),
        ({"cu_seqlens": torch.tensor([0, 6, 4, 10])}, "must rise"),
        ({"cu_seqlens": torch.tensor([0, 4, 4, 10])}, "must rise"),
        ({"cu_seqlens": torch.tensor([1, 10])}, "must rise"),
        ({"cu_seqlens": torch.tensor([0.0, 10.0])}, "int32 or int64"),
        ({"scale": -1.0}, "scale=-1.0"),
        ({"window": 0}, "window=0"),
        ({"implementation": "cuda"}, "implementation='cuda'"),
    ],
)
def test_bad_input_raises_before_any_launch(change, words):
    inputs = {"q": torch.randn(10, 4, 16), "k": torch.randn(10, 2, 16), "v": torch.randn(10, 2, 16)}
    inputs |= {"cu_seqlens": torch.tensor([0, 4, 10])} | change
    with pytest.raises(ValueError, match=words):
        attention(**inputs)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"out": torch.zeros(10, 4, 16).bfloat16()}, "out is torch.bfloat16"),
        ({"lse": torch.zeros(10, 3)}, r"lse has shape \[10, 3\]: N is 4"),
        ({"lse": torch.zeros(4, 10).mT}, "lse has strides"),
        ({"start": torch.zeros(10).int()}, "start is torch.int32"),
        ({"start": torch.zeros(9).long()}, r"start has shape \[9\]: Q is 10"),
        ({"q_offset": -1}, "q_offset=-1"),
        ({"k_offset": 2**31}, "k_offset=2147483648"),
        ({"scale": math.inf}, "scale=inf"),
        pytest.param({"q": torch.randn(10 * 64 + 1)[1:].view(10, 4, 16), "implementation": "triton"}, "16-byte aligned",
                     marks=needs_interpreter),
        pytest.param({"k": torch.randn(2, 7, 16).transpose(0, 1), "implementation": "triton"}, "heads must lie together",
                     marks=needs_interpreter),
        pytest.param(dict.fromkeys("qkv", torch.randn(10, 1, 300)) | {"out": torch.zeros(10, 1, 300), "lse": torch.zeros(10, 1),
                     "implementation": "triton"}, "at most 256", marks=needs_interpreter),
    ],
)  # fmt: skip
def test_bad_blocks_raise_before_any_launch(change, words):
    inputs = {"q": torch.randn(10, 4, 16), "k": torch.randn(7, 2, 16), "v": torch.randn(7, 2, 16), "lse": torch.zeros(10, 4)}
    inputs |= {"out": torch.zeros(10, 4, 16), "start": torch.zeros(10).long(), "q_offset": 7, "k_offset": 0, "scale": 0.25}
    with pytest.raises(ValueError, match=words):
        attention_forward(**inputs | change)
