"""attention_paged: exact in float64 on both paths, the same however the keys are cut or stored, strict about inputs."""

import contextlib

import pytest
import torch
from nb_kernels import attention_paged as module
from nb_kernels.attention import attention
from nb_kernels.attention_paged import attention_paged, cases, reference

from tests.kernels.allocations import LiveBytes, canaries, guarded
from tests.kernels.interpreter_bf16 import bf16_interpreter

needs_interpreter = pytest.mark.skipif(not module.INTERPRETED, reason="float64 kernels run in the interpreter")
PATHS = ["torch", pytest.param("triton", marks=needs_interpreter)]
torch.manual_seed(0)
CASES = dict(cases("cpu", torch.float64))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    for key in module.TILES:
        monkeypatch.setitem(module.TILES, key, (16, 16, 4, 1))


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("window", [None, 7], ids=["causal", "window7"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
def test_float64_output_equals_the_reference(name, path, window):
    found = attention_paged(*CASES[name], window=window, implementation=path)
    exact = reference(*CASES[name], window=window)
    assert found.shape == exact.shape and error(found, exact) < 1e-12


@needs_interpreter
@pytest.mark.parametrize("name, runs", [("decode", 1), ("decode", 5), ("mixed-idle", 2)])
def test_cutting_the_keys_into_runs_changes_nothing(name, runs):
    assert error(attention_paged(*CASES[name], implementation="triton", runs=runs), reference(*CASES[name])) < 1e-12


@pytest.mark.parametrize("path", PATHS)
def test_chunks_and_single_tokens_give_what_one_pass_gives(path):
    """A prompt prefilled in chunks, then one token a step, equals packed attention over the whole."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(21, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    whole = attention(q, k, v, torch.tensor([0, 21]))
    cache = [torch.full((5, 8, 2, 16), torch.nan, dtype=torch.float64) for _ in range(2)]
    table = torch.tensor([[3, 0, 4]], dtype=torch.int32)
    for begin, end in ((0, 11), (11, 19), (19, 20), (20, 21)):
        for position in range(begin, end):
            for stored, new in zip(cache, (k, v)):
                stored[table[0, position // 8], position % 8] = new[position]
        bounds = torch.tensor([0, end - begin])
        out = attention_paged(q[begin:end], *cache, table, torch.tensor([end]), bounds, implementation=path)
        assert error(out, whole[begin:end]) < 1e-12


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_error_is_at_most_twice_that_of_torch(name, dtype, path):
    q, k, v, *rest = CASES[name]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    exact, plain = reference(q.double(), k.double(), v.double(), *rest), reference(q, k, v, *rest)
    with bf16_interpreter() if dtype == torch.bfloat16 and path == "triton" else contextlib.nullcontext():
        found = attention_paged(q, k, v, *rest, implementation=path)
    assert found.dtype == dtype and error(found, exact) <= 2 * error(plain, exact)


@needs_interpreter
@pytest.mark.parametrize("runs", [1, 3])
def test_no_kernel_reads_or_writes_outside_its_buffers(runs):
    inputs = [guarded(x)[0] for x in CASES["mixed-idle"]]
    exact = reference(*inputs)
    with canaries():
        found = attention_paged(*inputs, implementation="triton", runs=runs)
    assert error(found, exact) < 1e-12


@pytest.mark.parametrize("path", PATHS)
def test_stale_keys_in_the_rest_of_a_block_and_the_next_are_not_read(path):
    q, k, v, table, lengths, bounds = CASES["decode"]
    before = attention_paged(*CASES["decode"], implementation=path)
    k, v = k.clone(), v.clone()
    for s, length in enumerate(lengths.tolist()):
        for position in range(length, table.shape[1] * 8):
            for cache in (k, v):
                cache[table[s, position // 8], position % 8] = torch.nan
    assert torch.equal(attention_paged(q, k, v, table, lengths, bounds, implementation=path), before)


@needs_interpreter
def test_unchecked_wrong_tables_stay_inside_the_cache():
    q, k, v, table, lengths, bounds = CASES["decode"]
    (k, _), (v, _) = guarded(k), guarded(v)
    wrong = table.clone()
    wrong[0, 0], wrong[2, 1] = -1000, 10**6
    options = {"longest": 1, "implementation": "triton"}
    out = attention_paged(q, k, v, wrong, lengths + 10**4, bounds, **options)
    assert out.isfinite().all() and torch.equal(out, attention_paged(q, k, v, wrong, lengths * 0 + 32, bounds, **options))


def test_the_torch_path_never_holds_all_scores():
    torch.manual_seed(2)
    q, cache, table = torch.randn(4096, 1, 16), torch.randn(64, 64, 1, 16), torch.arange(64)[None].int()
    with LiveBytes() as watch:
        attention_paged(q, cache, cache, table, torch.tensor([4096]), torch.tensor([0, 4096]))
    assert watch.largest <= 2**22 < 4096 * 4096 * 4


@pytest.mark.parametrize("path", PATHS)
def test_no_queries_give_an_empty_result(path):
    q, k, v, table, lengths, bounds = CASES["decode"]
    assert attention_paged(q[:0], k, v, table, lengths, bounds * 0, implementation=path).shape == (0, 10, 32)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"q": torch.randn(3, 9, 32)}, "N a multiple of G"),
        ({"q": torch.randn(3, 10, 16)}, "one head size"),
        ({"k_cache": torch.randn(4, 8, 2, 32).bfloat16()}, "k_cache is torch.bfloat16"),
        ({"v_cache": torch.randn(4, 8, 2, 32)}, "equal caches"),
        ({"block_table": torch.zeros(3, 4)}, "block_table is torch.float32"),
        ({"block_table": torch.zeros(2, 4).int()}, "2 rows of block_table, 3 lengths"),
        ({"block_table": torch.full((3, 4), 40).int()}, r"block_table\[0, 0\]=40 must be in \[0, 15\)"),
        ({"block_table": torch.full((3, 4), -1).int()}, r"block_table\[0, 0\]=-1"),
        ({"block_table": torch.zeros(4, 3).int().T}, "contiguous"),
        ({"lengths": torch.tensor([9, 0, 30])}, r"lengths\[1\]=0"),
        ({"lengths": torch.tensor([9, 1, 33])}, r"lengths\[2\]=33 .* 32 tokens"),
        ({"cu_queries": torch.tensor([0, 1, 2, 4])}, "must rise from 0 to Tq = 3"),
        ({"cu_queries": torch.tensor([0, 2, 1, 3])}, "must rise"),
        ({"window": 0}, "window=0"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"implementation": "cuda"}, "implementation='cuda'"),
    ],
)
def test_bad_input_raises_before_any_launch(change, words):
    names = ("q", "k_cache", "v_cache", "block_table", "lengths", "cu_queries")
    inputs = {n: x.float() if x.is_floating_point() else x for n, x in zip(names, CASES["decode"])} | change
    with pytest.raises(ValueError, match=words):
        attention_paged(**inputs)
