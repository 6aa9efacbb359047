"""The gated activation of the MLP (Shazeer 2020, arXiv:2002.05202).

    y = silu(gate) * up,      silu(g) = g * s,      s = 1 / (1 + exp(-g))

Backward:    dup = dy * g * s,      dgate = dy * up * s * (1 + g * (1 - s));    s is computed again, only x is kept.

Shapes: x [..., 2F], gate first, then up (what one matrix product gives); y [..., F]. Arithmetic in fp32, fp64 for fp64 inputs.
Bound by memory: 3 F numbers a row forward, 5 F backward.
"""
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

BLOCK = 1024


def reference(x):
    """The definition in plain torch; tests call it in float64."""
    gate, up = x.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def cases(device, dtype):
    """(name, (x,)): ragged widths; on CUDA the 3B model's own."""
    shapes = [(3, 14), (2, 5, 2100), (1, 2048)] + ([] if device == "cpu" else [(32768, 20992)])
    for shape in shapes:
        yield "x".join(map(str, shape)), (torch.randn(shape, device=device, dtype=dtype) * 3,)


@triton.jit
def _place(F, BLOCK: tl.constexpr):
    """Row and columns of this program; one grid axis only, the others end at 65535."""
    blocks = tl.cdiv(F, BLOCK)
    return (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _forward(X, Y, F, BLOCK: tl.constexpr, ACC: tl.constexpr):
    row, column = _place(F, BLOCK)
    mask, at = column < F, X + row * 2 * F + column
    g, u = tl.load(at, mask=mask, other=0.0).to(ACC), tl.load(at + F, mask=mask, other=0.0).to(ACC)
    tl.store(Y + row * F + column, (g / (1.0 + tl.exp(-g)) * u).to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(X, DY, DX, F, BLOCK: tl.constexpr, ACC: tl.constexpr):
    row, column = _place(F, BLOCK)
    mask, at = column < F, row * 2 * F + column
    g, u = tl.load(X + at, mask=mask, other=0.0).to(ACC), tl.load(X + at + F, mask=mask, other=0.0).to(ACC)
    dy = tl.load(DY + row * F + column, mask=mask, other=0.0).to(ACC)
    s = 1.0 / (1.0 + tl.exp(-g))
    tl.store(DX + at, (dy * u * s * (1.0 + g * (1.0 - s))).to(DX.dtype.element_ty), mask=mask)
    tl.store(DX + at + F, (dy * g * s).to(DX.dtype.element_ty), mask=mask)


INTERPRETED = not isinstance(_forward, triton.runtime.JITFunction)  # TRITON_INTERPRET=1 was set before the import


def _launch(kernel, x, *others):
    T, F = x.shape[0], x.shape[1] // 2
    if T * F:
        acc = tl.float64 if x.dtype == torch.float64 else tl.float32
        with torch.cuda.device_of(x):
            kernel[(T * triton.cdiv(F, BLOCK),)](x, *others, F, BLOCK=BLOCK, ACC=acc, num_warps=4)


class _Triton(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # [T, 2F]
        y = x.new_empty(x.shape[0], x.shape[1] // 2)
        _launch(_forward, x, y)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        _launch(_backward, x, dy.contiguous(), dx)
        return dx


class _Torch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
        return F.silu(gate).mul_(up).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        (gate, up), dy = x.to(wide).chunk(2, -1), dy.to(wide)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, -1)
        dgate.copy_(torch.ops.aten.silu_backward(dy * up, gate))
        dup.copy_(F.silu(gate).mul_(dy))
        return dx


def swiglu(x, *, implementation="auto"):
    """x [..., 2F], gate then up -> silu(gate) * up [..., F], differentiable.

    implementation: "auto" (triton on CUDA, torch elsewhere), "torch", "triton".
    Raises ValueError for an odd width, a type that is not floating point, or a device that does not fit.
    """
    if not x.dtype.is_floating_point or not x.dim() or x.shape[-1] % 2 or not x.shape[-1]:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}: need floating point [..., 2F], gate and up beside each other")
    if implementation not in ("auto", "torch", "triton"):
        raise ValueError(f"implementation={implementation!r} must be 'auto', 'torch' or 'triton'")
    if implementation == "triton" and not (x.is_cuda or INTERPRETED):
        raise ValueError(f"implementation='triton' needs CUDA tensors, x is on {x.device}; use 'auto' or 'torch'")
    triton_path = implementation == "triton" or implementation == "auto" and x.is_cuda
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return (_Triton if triton_path else _Torch).apply(rows).view(*x.shape[:-1], x.shape[-1] // 2)


def compile_cases():
    """For compile_check."""
    for dtype in ("bf16", "fp32"):
        types = dict.fromkeys(("X", "Y", "DX", "DY"), f"*{dtype}") | {"F": "i32:16"}
        constants = {"BLOCK": BLOCK, "ACC": tl.float32}
        for kernel in (_forward, _backward):
            yield f"swiglu{kernel.__name__} {dtype}", kernel, types, constants, {"num_warps": 4}, False
