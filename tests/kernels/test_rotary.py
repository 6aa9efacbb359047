"""rotary: exact in float64 by both paths and layouts, as accurate as torch below, strict about inputs."""

import contextlib

import pytest
import torch
from nb_kernels import rotary as module
from nb_kernels.rotary import cases, frequencies, reference, rotary, tables

from tests.kernels.allocations import canaries, guarded
from tests.kernels.interpreter_bf16 import bf16_interpreter

needs_interpreter = pytest.mark.skipif(not module.INTERPRETED, reason="float64 kernels run in the interpreter")
PATHS = ["torch", pytest.param("triton", marks=needs_interpreter)]
CASES = dict(cases("cpu", torch.float64))


def output_and_gradient(function, x, *rest):
    torch.manual_seed(1)
    x = x.detach().requires_grad_()
    y = function(x, *rest)
    return y, *torch.autograd.grad(y, x, torch.randn(y.shape, dtype=torch.float64).to(y.dtype))


def ours(path):
    return lambda x, positions, f, interleaved: rotary(x, positions, f, interleaved=interleaved, implementation=path)


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
def test_float64_output_and_gradient_equal_autograd(name, path):
    exact = output_and_gradient(reference, *CASES[name])
    for found, expected in zip(output_and_gradient(ours(path), *CASES[name]), exact):
        assert found.shape == expected.shape and error(found, expected) < 1e-12


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_error_at_the_model_s_angles_is_at_most_twice_that_of_torch(name, dtype, path):
    x, positions, f, interleaved = CASES[name]
    x, f = x.to(dtype), f.float()
    angles = (positions[:, None].float() * f).double()  # the model's angles are float32 products
    plain = output_and_gradient(lambda x: reference(x.float(), positions, f, interleaved).to(dtype), x)
    turned = torch.ones(len(positions), dtype=torch.long)
    exact_of = [reference(x.double()[t : t + 1], turned[:1], angles[t], interleaved) for t in range(len(x))]
    with bf16_interpreter() if dtype == torch.bfloat16 else contextlib.nullcontext():
        y, dx = output_and_gradient(ours(path), x, positions, f, interleaved)
    exact = torch.cat(exact_of)
    assert y.dtype == dx.dtype == dtype
    assert error(y, exact) <= 2 * error(plain[0], exact) + 1e-7
    assert error(dx, plain[1].double()) <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("path", PATHS)
def test_heads_cut_from_a_wider_row_need_no_copy(path):
    x, positions, f, _ = CASES["T5-D64-rotated64"]
    wide = torch.randn(5, 3, 3 * 64, dtype=torch.float64)
    wide[:, :2, 64:128] = x
    whole = rotary(x, positions, f, implementation=path)
    assert torch.equal(rotary(wide[:, :2, 64:128], positions, f, implementation=path), whole)


def test_tables_restart_with_each_document_and_follow_changes_in_place():
    f = frequencies(8, 1e4)
    positions = torch.tensor([0, 1, 2, 0, 1])
    cos, sin = tables(positions, f, torch.float32)
    assert torch.equal(cos[3:], cos[:2]) and torch.equal(sin[3:], sin[:2]) and torch.equal(cos[0], torch.ones(4))
    assert tables(positions, f, torch.float32)[0] is cos
    positions += 1
    assert torch.equal(tables(positions, f, torch.float32)[0], ((positions[:, None] * f).cos()))


@needs_interpreter
@pytest.mark.parametrize("interleaved", [False, True])
def test_no_kernel_reads_or_writes_outside_its_buffers(monkeypatch, interleaved):
    monkeypatch.setattr(module, "ELEMENTS", 64)
    x, positions, f, _ = CASES["T7-D24-rotated12"]
    x, _ = guarded(x)
    exact = output_and_gradient(reference, x, positions, f, interleaved)
    with canaries():
        found = output_and_gradient(ours("triton"), x, positions, f, interleaved)
    for a, b in zip(found, exact):
        assert error(a, b) < 1e-12


@pytest.mark.parametrize("path", PATHS)
def test_no_tokens_give_an_empty_result(path):
    assert rotary(torch.randn(0, 2, 8), torch.arange(0), frequencies(8, 1e4), implementation=path).shape == (0, 2, 8)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": torch.randn(4, 2, 8, 1)}, r"\[4, 2, 8, 1\]"),
        ({"x": torch.randn(4, 8, 2).mT}, "contiguous"),
        ({"positions": torch.arange(5)}, r"positions is torch.int64 \[5\]"),
        ({"positions": torch.arange(4.0)}, "positions is torch.float32"),
        ({"frequencies": torch.ones(5)}, r"frequencies is \[5\].*D = 8"),
        ({"frequencies": torch.ones(4).bfloat16()}, "frequencies is torch.bfloat16"),
        ({"implementation": "cuda"}, "implementation='cuda'"),
    ],
)
def test_bad_input_raises_before_any_launch(change, words):
    inputs = {"x": torch.randn(4, 2, 8), "positions": torch.arange(4), "frequencies": torch.ones(4)} | change
    with pytest.raises(ValueError, match=words):
        rotary(**inputs)


@needs_interpreter
def test_a_second_derivative_is_refused():
    x, upstream = torch.randn(3, 2, 8, requires_grad=True), torch.randn(3, 2, 8, requires_grad=True)
    turned = rotary(x, torch.arange(3), torch.ones(4), implementation="triton")
    (dx,) = torch.autograd.grad(turned, x, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
