"""Root-mean-square normalisation, with the residual addition before it fused in (Zhang & Sennrich 2019, arXiv:1910.07467).

    h = x + residual (rounded to the inputs' dtype)      y = h * r * w,      r = 1 / sqrt(mean(h^2) + eps)

Backward, with g = dy * w and dh the gradient that reaches h beside y:
    dx = dresidual = dh + r * (g - h * r^2 * mean(g * h)),      dw = sum_t dy * h * r

Shapes: x, residual, h, y [..., H]; w [H]; r [T], T = product of the leading sizes. Sums in fp32, fp64 for fp64 inputs.
A program holds ROWS whole rows (one of the hidden size, many of a head's size), so each is read once. dw: every program sums
its rows in a fixed order, then the programs' sums are added: no atomics, bits repeat. All is bound by memory:
forward 2 H (4 H with the residual), backward 3 H (4 H) numbers a row.
"""
import torch
import triton
import triton.language as tl

PROGRAMS = 264  # of the backward pass: two per streaming multiprocessor of an H100
ELEMENTS = 4096  # of a tile: 16 a thread with 8 warps
WIDEST = 8192  # the widest row that a program holds without register spills


def reference(x, weight, eps=1e-5, residual=None):
    """The definition in plain torch; tests call it in float64."""
    h = x if residual is None else x + residual
    y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * weight
    return y if residual is None else (y, h)


def cases(device, dtype):
    """(name, (x, weight, residual or None)): ragged widths, a head's width; on CUDA the 3B model's own."""
    shapes = [((3, 100), False), ((5, 7, 64), False), ((9, 257), True), ((1, 2560), True)]
    if device != "cpu":
        shapes += [((32768, 2560), False), ((32768, 2560), True), ((32768, 20, 128), False)]
    for shape, fused in shapes:
        x, residual = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        weight = 1 + 0.1 * torch.randn(shape[-1], device=device, dtype=dtype)
        yield f"{'x'.join(map(str, shape))}{'-residual' if fused else ''}", (x, weight, residual if fused else None)


@triton.jit
def _forward(X, RESIDUAL, W, Y, SUM, R, T, H, eps, FUSED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
             ACC: tl.constexpr):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * H + column[None, :]
    mask = (row < T)[:, None] & (column < H)[None, :]
    x = tl.load(X + at, mask=mask, other=0.0)
    if FUSED:
        x = (x.to(ACC) + tl.load(RESIDUAL + at, mask=mask, other=0.0).to(ACC)).to(x.dtype)
        tl.store(SUM + at, x, mask=mask)
    x = x.to(ACC)
    r = 1.0 / tl.sqrt(tl.sum(x * x, 1) / H + eps)
    w = tl.load(W + column, mask=column < H, other=0.0).to(ACC)
    tl.store(R + row, r, mask=row < T)
    tl.store(Y + at, (x * r[:, None] * w[None, :]).to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(X, W, R, DY, DSUM, DX, DW, T, H, FUSED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
              ACC: tl.constexpr):
    column = tl.arange(0, BLOCK)
    w = tl.load(W + column, mask=column < H, other=0.0).to(ACC)
    dw = tl.zeros([BLOCK], ACC)
    for first in range(tl.program_id(0) * ROWS, T, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * H + column[None, :]
        mask = (row < T)[:, None] & (column < H)[None, :]
        x = tl.load(X + at, mask=mask, other=0.0).to(ACC)
        dy = tl.load(DY + at, mask=mask, other=0.0).to(ACC)
        r = tl.load(R + row, mask=row < T, other=0.0).to(ACC)[:, None]
        g = dy * w[None, :]
        dx = r * (g - x * (r * r * (tl.sum(g * x, 1) / H)[:, None]))
        if FUSED:
            dx += tl.load(DSUM + at, mask=mask, other=0.0).to(ACC)
        tl.store(DX + at, dx.to(DX.dtype.element_ty), mask=mask)
        dw += tl.sum(dy * x * r, 0)
    tl.store(DW + tl.program_id(0).to(tl.int64) * H + column, dw, mask=column < H)


INTERPRETED = not isinstance(_forward, triton.runtime.JITFunction)  # TRITON_INTERPRET=1 was set before the import
_ACC = {torch.float32: tl.float32, torch.float64: tl.float64}


def _tile(H):
    block = triton.next_power_of_2(H)
    return {"ROWS": max(1, ELEMENTS // block), "BLOCK": block, "num_warps": 8 if block <= 4096 else 16}


class _Triton(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps):  # x, residual [T, H]
        (T, H), tile = x.shape, _tile(x.shape[1])
        r = x.new_empty(T, dtype=torch.promote_types(x.dtype, torch.float32))
        y, h = torch.empty_like(x), x if residual is None else torch.empty_like(x)
        if T:
            with torch.cuda.device_of(x):
                _forward[(triton.cdiv(T, tile["ROWS"]),)](
                    x, x if residual is None else residual, weight, y, h, r, T, H, eps, residual is not None,
                    ACC=_ACC[r.dtype], **tile,
                )  # fmt: skip
        ctx.save_for_backward(h, weight, r)
        ctx.fused = residual is not None
        return y, h if ctx.fused else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy, dh):
        h, weight, r = ctx.saved_tensors
        (T, H), tile = h.shape, _tile(h.shape[1])
        fused = ctx.fused and dh is not None
        programs = min(PROGRAMS, triton.cdiv(T, tile["ROWS"]))
        dx, dw = torch.empty_like(h), h.new_empty((programs, H), dtype=r.dtype)
        if T:
            with torch.cuda.device_of(h):
                _backward[(programs,)](
                    h, weight, r, dy.contiguous(), dh.contiguous() if fused else h, dx, dw, T, H, fused,
                    ACC=_ACC[r.dtype], **tile,
                )  # fmt: skip
        return dx, dx if ctx.fused else None, dw.sum(0).to(weight.dtype), None


class _Torch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps):
        h = x if residual is None else x + residual
        wide = h.to(torch.promote_types(h.dtype, torch.float32))
        r = (torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(h.shape[-1]) + eps).rsqrt_()
        ctx.save_for_backward(h, weight, r)
        ctx.fused = residual is not None
        return (wide * r).mul_(weight).to(h.dtype), h if ctx.fused else None

    @staticmethod
    def backward(ctx, dy, dh):
        h, weight, r = ctx.saved_tensors
        unit, dy = h.to(r.dtype) * r, dy.to(r.dtype)
        weight = weight.to(r.dtype)
        products = dy * unit
        dx = (dy * weight).addcmul_(unit, (products @ weight)[:, None].div_(-h.shape[-1])).mul_(r)
        if ctx.fused and dh is not None:
            dx += dh
        dx = dx.to(h.dtype)
        return dx, dx if ctx.fused else None, products.sum(0).to(h.dtype), None


def rms_norm(x, weight, *, eps=1e-5, residual=None, implementation="auto"):
    """x [..., H], weight [H] -> y [..., H]; with residual [..., H] -> (y, x + residual), both differentiable.

    implementation: "auto" (triton on CUDA, torch elsewhere), "torch", "triton".
    Raises ValueError for shapes, types and devices that do not fit.
    """
    H = x.shape[-1] if x.dim() else 0
    for name, other, shape in (("weight", weight, (H,)), ("residual", residual, x.shape)):
        if other is not None and (other.shape != shape or other.dtype != x.dtype or other.device != x.device):
            found = f"{name} is {other.dtype} {list(other.shape)} on {other.device}"
            raise ValueError(f"{found}, must be {x.dtype} {list(shape)} on {x.device} like x")
    if not x.dtype.is_floating_point or not H or not eps >= 0:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}, eps={eps}: need floating point, H > 0 and eps >= 0")
    if implementation not in ("auto", "torch", "triton"):
        raise ValueError(f"implementation={implementation!r} must be 'auto', 'torch' or 'triton'")
    if implementation == "triton" and not (x.is_cuda or INTERPRETED):
        raise ValueError(f"implementation='triton' needs CUDA tensors, x is on {x.device}; use 'auto' or 'torch'")
    triton_path = implementation == "triton" or implementation == "auto" and x.is_cuda
    if triton_path and H > WIDEST:
        raise ValueError(f"H={H} must be at most {WIDEST}: a program holds a whole row; use implementation='torch'")
    rows = [None if a is None else a.reshape(-1, H).contiguous() for a in (x, residual)]
    y, h = (_Triton if triton_path else _Torch).apply(*rows, weight.contiguous(), eps)
    return y.view(x.shape) if residual is None else (y.view(x.shape), h.view(x.shape))


def compile_cases():
    """For compile_check: the hidden size, a head's size, the widest row."""
    pointers = dict.fromkeys(("X", "RESIDUAL", "W", "Y", "SUM", "DY", "DSUM", "DX"))
    for H in (2560, 128, WIDEST):
        for dtype in ("bf16", "fp32") if H == 2560 else ("bf16",):
            for fused in (True, False):
                tile = _tile(H)
                options = {"num_warps": tile.pop("num_warps")}
                types = {n: f"*{dtype}" for n in pointers} | {"R": "*fp32", "DW": "*fp32", "H": "i32:16", "eps": "fp32"}
                name = f"H{H} {dtype}{' + residual' if fused else ''}{' (may spill)' if H == WIDEST else ''}"
                for kernel in (_forward, _backward):
                    constants = tile | {"FUSED": fused, "ACC": tl.float32}
                    yield f"rms_norm{kernel.__name__} {name}", kernel, types, constants, options, False
