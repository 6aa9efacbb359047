"""swiglu: exact in float64 by both paths, as accurate as torch below, inside its buffers, strict about inputs."""

import contextlib

import pytest
import torch
from nb_kernels import swiglu as module
from nb_kernels.swiglu import cases, reference, swiglu

from tests.kernels.allocations import canaries, guarded
from tests.kernels.interpreter_bf16 import bf16_interpreter

needs_interpreter = pytest.mark.skipif(not module.INTERPRETED, reason="float64 kernels run in the interpreter")
PATHS = ["torch", pytest.param("triton", marks=needs_interpreter)]
CASES = {name: x for name, (x,) in cases("cpu", torch.float64)}


def output_and_gradient(function, x):
    torch.manual_seed(1)
    x = x.detach().requires_grad_()
    y = function(x)
    return y, *torch.autograd.grad(y, x, torch.randn(y.shape, dtype=torch.float64).to(y.dtype))


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
def test_float64_output_and_gradient_equal_autograd(name, path):
    exact = output_and_gradient(reference, CASES[name])
    for found, expected in zip(output_and_gradient(lambda x: swiglu(x, implementation=path), CASES[name]), exact):
        assert found.shape == expected.shape and error(found, expected) < 1e-12


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_error_is_at_most_twice_that_of_torch(dtype, path):
    x = CASES["2x5x2100"].to(dtype)
    exact, plain = output_and_gradient(reference, x.double()), output_and_gradient(reference, x)
    with bf16_interpreter() if dtype == torch.bfloat16 else contextlib.nullcontext():
        found = output_and_gradient(lambda x: swiglu(x, implementation=path), x)
    for f, p, e in zip(found, plain, exact):
        assert f.dtype == dtype and error(f, e) <= 2 * error(p, e) + 1e-7


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.filterwarnings("ignore:overflow encountered")  # exp of 1000 is inf, and 1 / inf is the right 0
def test_gates_far_from_zero_stay_finite(path):
    x = torch.tensor([[-1000.0, 1000.0, 2.0, 3.0]])
    y, dx = output_and_gradient(lambda x: swiglu(x, implementation=path), x)
    assert torch.equal(y, torch.tensor([[0.0, 3000.0]])) and dx.isfinite().all()


@needs_interpreter
def test_no_kernel_reads_or_writes_outside_its_buffers(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 16)
    x, _ = guarded(CASES["3x14"])
    exact = output_and_gradient(reference, x)
    with canaries():
        found = output_and_gradient(lambda x: swiglu(x, implementation="triton"), x)
    for f, e in zip(found, exact):
        assert error(f, e) < 1e-12


@pytest.mark.parametrize("path", PATHS)
def test_no_rows_give_an_empty_result(path):
    assert swiglu(torch.randn(0, 8), implementation=path).shape == (0, 4)


@pytest.mark.parametrize(
    "x, path, words",
    [
        (torch.randn(3, 7), "auto", r"\[3, 7\]"),
        (torch.ones(3, 8, dtype=torch.int32), "auto", "torch.int32"),
        (torch.tensor(1.0), "auto", r"\[\]"),
        (torch.randn(3, 8), "cuda", "implementation='cuda'"),
    ],
)
def test_bad_input_raises_before_any_launch(x, path, words):
    with pytest.raises(ValueError, match=words):
        swiglu(x, implementation=path)


@needs_interpreter
def test_a_second_derivative_is_refused():
    x, upstream = torch.randn(3, 8, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    (dx,) = torch.autograd.grad(swiglu(x, implementation="triton"), x, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
