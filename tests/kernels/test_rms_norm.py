"""rms_norm: exact in float64 by both paths, as accurate as torch below, inside its buffers, strict about inputs."""

import contextlib

import pytest
import torch
from nb_kernels import rms_norm as module
from nb_kernels.rms_norm import cases, reference, rms_norm

from tests.kernels.allocations import canaries, guarded
from tests.kernels.interpreter_bf16 import bf16_interpreter

needs_interpreter = pytest.mark.skipif(not module.INTERPRETED, reason="float64 kernels run in the interpreter")
PATHS = ["torch", pytest.param("triton", marks=needs_interpreter)]
CASES = dict(cases("cpu", torch.float64))


def outputs_and_gradients(function, x, weight, residual):
    torch.manual_seed(1)
    leaves = [a.detach().requires_grad_() for a in (x, weight, residual) if a is not None]
    outputs = function(*leaves[:2], residual=leaves[2] if residual is not None else None)
    outputs = (outputs,) if residual is None else outputs
    upstream = [torch.randn(o.shape, dtype=torch.float64).to(o.dtype) for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


def error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


def ours(path):
    return lambda x, weight, residual: rms_norm(x, weight, residual=residual, implementation=path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
def test_float64_outputs_and_gradients_equal_autograd(name, path):
    exact = outputs_and_gradients(reference, *CASES[name])
    for found, expected in zip(outputs_and_gradients(ours(path), *CASES[name]), exact):
        assert found.shape == expected.shape and error(found, expected) < 1e-12


@pytest.mark.parametrize("path", PATHS)
def test_rows_of_many_programs_all_count_in_dweight(path, monkeypatch):
    monkeypatch.setattr(module, "ELEMENTS", 64)
    monkeypatch.setattr(module, "PROGRAMS", 3)
    x, weight = torch.randn(63, 24, dtype=torch.float64), torch.randn(24, dtype=torch.float64)
    exact = outputs_and_gradients(reference, x, weight, None)
    for found, expected in zip(outputs_and_gradients(ours(path), x, weight, None), exact):
        assert error(found, expected) < 1e-12


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_error_is_at_most_twice_that_of_torch(name, dtype, path):
    inputs = [None if a is None else a.to(dtype) for a in CASES[name]]
    exact = outputs_and_gradients(reference, *(None if a is None else a.double() for a in inputs))
    plain = outputs_and_gradients(reference, *inputs)
    with bf16_interpreter() if dtype == torch.bfloat16 else contextlib.nullcontext():
        found = outputs_and_gradients(ours(path), *inputs)
    for f, p, e in zip(found, plain, exact):
        assert f.dtype == dtype and error(f, e) <= 2 * error(p, e) + 1e-7


@needs_interpreter
def test_no_kernel_reads_or_writes_outside_its_buffers():
    (x, _), (weight, _), (residual, _) = (guarded(a) for a in CASES["9x257-residual"])
    exact = outputs_and_gradients(reference, x, weight, residual)
    with canaries():
        found = outputs_and_gradients(ours("triton"), x, weight, residual)
    for f, e in zip(found, exact):
        assert error(f, e) < 1e-12


@pytest.mark.parametrize("path", PATHS)
def test_no_rows_give_zero_weight_gradient(path):
    y, dx, dweight = outputs_and_gradients(ours(path), torch.randn(0, 8), torch.randn(8), None)
    assert y.shape == dx.shape == (0, 8) and dweight.shape == (8,) and not dweight.any()


@pytest.mark.parametrize("path", PATHS)
def test_only_the_sum_used_downstream_passes_its_gradient_through(path):
    x, residual = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    _, h = rms_norm(x, torch.ones(8), residual=residual, implementation=path)
    dx, dresidual = torch.autograd.grad(h.sum(), (x, residual))
    assert torch.equal(dx, torch.ones(3, 8)) and torch.equal(dresidual, dx)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"weight": torch.randn(7)}, r"weight is torch.float32 \[7\].*\[8\]"),
        ({"weight": torch.randn(8).double()}, "weight is torch.float64"),
        ({"residual": torch.randn(2, 8)}, r"residual is torch.float32 \[2, 8\].*\[3, 8\]"),
        ({"x": torch.ones(3, 8, dtype=torch.int64), "weight": torch.ones(8, dtype=torch.int64)}, "floating point"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"implementation": "cuda"}, "implementation='cuda'"),
    ],
)
def test_bad_input_raises_before_any_launch(change, words):
    inputs = {"x": torch.randn(3, 8), "weight": torch.randn(8)} | change
    with pytest.raises(ValueError, match=words):
        rms_norm(inputs.pop("x"), inputs.pop("weight"), **inputs)


@needs_interpreter
def test_a_second_derivative_is_refused():
    x, upstream = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(rms_norm(x, torch.ones(8), implementation="triton"), x, upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
