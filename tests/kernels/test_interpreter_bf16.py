"""The bfloat16 patch must itself be right, and be needed."""

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.interpreter_bf16 import bf16_interpreter

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


@triton.jit
def _product(A, B, C, R, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    a, b = tl.load(A + at), tl.load(B + at)
    tl.store(C + at, tl.dot(a, b.T, out_dtype=tl.float32))
    tl.store(R + at, (a.to(tl.float32) * 1.0009765625 - b).to(tl.bfloat16))


def _run():
    torch.manual_seed(0)
    a, b = torch.randn(2, 32, 32).bfloat16()
    a[0, 0], a[0, 1] = torch.nan, torch.inf
    c, r = torch.empty(32, 32), torch.empty(32, 32, dtype=torch.bfloat16)
    _product[(1,)](a, b, c, r, N=32)
    return a, b, c, r


@interpreted
def test_dots_and_rounding_equal_torch_under_the_patch():
    with bf16_interpreter():
        a, b, c, r = _run()
    torch.testing.assert_close(c[1:], (a.float() @ b.float().T)[1:], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(r, (a.float() * 1.0009765625 - b.float()).bfloat16(), rtol=0, atol=0, equal_nan=True)


@interpreted
def test_the_interpreter_alone_is_wrong_and_the_patch_is_taken_back():
    with bf16_interpreter():
        pass
    a, b, c, _ = _run()
    assert not torch.allclose(c[1:], (a.float() @ b.float().T)[1:], rtol=0.1, atol=0.1)
