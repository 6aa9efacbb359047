"""Rotary position embedding at explicit positions (Su et al. 2021, arXiv:2104.09864).

    angle[t, i] = position[t] * frequency[i]          (a, b) -> (a cos - b sin, b cos + a sin)

for each pair (a, b) of the first 2P of a head's D numbers: (x[i], x[i + P]) in the half layout (Llama, Hugging Face), or
(x[2i], x[2i + 1]) in the interleaved one (GPT-J); the other D - 2P pass unchanged. Backward is the rotation by minus the angle.

Shapes: x [T, N, D]; positions [T]; frequencies [P]; cos, sin [T, P]. T packed tokens, N heads, D head size.
The angle is one product in the frequencies' dtype, as Hugging Face forms it: in fp32 it is off by up to 0.01 at position
262144, and a model keeps the angles that it was trained with. The tables are kept as long as `positions` lives, so the layers
of a step share them. Rotation in fp32, fp64 for fp64 inputs. Bound by memory: 2 N D + 2 P numbers a token.
"""
import torch
import triton
import triton.language as tl
from torch.utils.weak import WeakIdKeyDictionary

ELEMENTS = 2048  # of a tile


def reference(x, positions, frequencies, interleaved=False):
    """The definition in plain torch, angles too; tests call it in float64."""
    P = len(frequencies)
    angle = (positions[:, None].to(frequencies.dtype) * frequencies)[:, None].to(x.dtype)  # [T, 1, P]
    first = slice(0, 2 * P, 2) if interleaved else slice(0, P)
    second = slice(1, 2 * P, 2) if interleaved else slice(P, 2 * P)
    a, b = x[..., first], x[..., second]
    turned = torch.empty_like(x)
    turned[..., first], turned[..., second] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    turned[..., 2 * P :] = x[..., 2 * P :]
    return turned


def frequencies(D, theta, dtype=torch.float32, device=None):
    """theta^(-2i/D) for i < D/2, formed as Hugging Face forms it."""
    return 1.0 / theta ** (torch.arange(0, D, 2, dtype=dtype, device=device) / D)


def cases(device, dtype):
    """(name, (x, positions, frequencies, interleaved)): restarting positions, odd sizes, partial rotation, both layouts."""
    shapes = [(5, 2, 64, 64, 1e4), (7, 3, 24, 12, 5e6), (3, 1, 96, 96, 7e7)]
    if device != "cpu":
        shapes += [(32768, 20, 128, 128, 7e7)]
    for T, N, D, rotated, theta in shapes:
        x = torch.randn(T, N, D, device=device, dtype=dtype)
        positions = torch.cat([torch.arange(T - T // 3), torch.arange(262144 - T // 3, 262144)]).to(device)
        f = frequencies(rotated, theta, torch.float64 if dtype == torch.float64 else torch.float32, device)
        for interleaved in (False, True):
            yield f"T{T}-D{D}-rotated{rotated}{'-interleaved' if interleaved else ''}", (x, positions, f, interleaved)


@triton.jit
def _rotate(X, COS, SIN, Y, T, N, D, P, stride_t, stride_n, sign, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr,
            BLOCK: tl.constexpr, REST: tl.constexpr, ACC: tl.constexpr):
    """One row is one head of one token; BLOCK >= P pairs; REST >= D - 2P numbers that pass."""
    row, i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    t, inside = row // N, row // N < T
    source, target = X + (t * stride_t + row % N * stride_n)[:, None], Y + (row * D)[:, None]
    mask = inside[:, None] & (i < P)[None, :]
    table = (t * P)[:, None] + i[None, :]
    cos = tl.load(COS + table, mask=mask, other=0.0).to(ACC)
    sin = tl.load(SIN + table, mask=mask, other=0.0).to(ACC) * sign
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK)[None, :]
        both_mask = inside[:, None] & (both < 2 * P)
        a, b = tl.split(tl.load(source + both, mask=both_mask, other=0.0).to(ACC).reshape(ROWS, BLOCK, 2))
        turned = tl.join(a * cos - b * sin, b * cos + a * sin).reshape(ROWS, 2 * BLOCK)
        tl.store(target + both, turned.to(Y.dtype.element_ty), mask=both_mask)
    else:
        a = tl.load(source + i[None, :], mask=mask, other=0.0).to(ACC)
        b = tl.load(source + P + i[None, :], mask=mask, other=0.0).to(ACC)
        tl.store(target + i[None, :], (a * cos - b * sin).to(Y.dtype.element_ty), mask=mask)
        tl.store(target + P + i[None, :], (b * cos + a * sin).to(Y.dtype.element_ty), mask=mask)
    if REST:
        rest = 2 * P + tl.arange(0, REST)[None, :]
        rest_mask = inside[:, None] & (rest < D)
        tl.store(target + rest, tl.load(source + rest, mask=rest_mask, other=0.0), mask=rest_mask)


INTERPRETED = not isinstance(_rotate, triton.runtime.JITFunction)  # TRITON_INTERPRET=1 was set before the import


def _tile(D, P):
    block = triton.next_power_of_2(P)
    rest = triton.next_power_of_2(D - 2 * P) if D > 2 * P else 0
    return {"ROWS": max(1, ELEMENTS // (2 * block)), "BLOCK": block, "REST": rest, "num_warps": 4}


def _rotated_triton(x, cos, sin, interleaved, sign):
    T, N, D = x.shape
    y = x.new_empty(T, N, D)
    if y.numel():
        tile, acc = _tile(D, cos.shape[1]), tl.float64 if x.dtype == torch.float64 else tl.float32
        with torch.cuda.device_of(x):
            _rotate[(triton.cdiv(T * N, tile["ROWS"]),)](
                x, cos, sin, y, T, N, D, cos.shape[1], x.stride(0), x.stride(1), sign, INTERLEAVED=interleaved, ACC=acc, **tile
            )
    return y


def _rotated_torch(x, cos, sin, interleaved, sign):
    P = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None] * sign  # [T, 1, P]
    first = slice(0, 2 * P, 2) if interleaved else slice(0, P)
    second = slice(1, 2 * P, 2) if interleaved else slice(P, 2 * P)
    wide, y = x.to(cos.dtype), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y[..., first] = (wide[..., first] * cos).addcmul_(wide[..., second], sin, value=-1)
    y[..., second] = (wide[..., second] * cos).addcmul_(wide[..., first], sin)
    y[..., 2 * P :] = x[..., 2 * P :]
    return y


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, interleaved, rotated):
        ctx.rest = cos, sin, interleaved, rotated
        return rotated(x, cos, sin, interleaved, 1.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        cos, sin, interleaved, rotated = ctx.rest
        return rotated(dy if dy.stride(-1) == 1 else dy.contiguous(), cos, sin, interleaved, -1.0), None, None, None, None


_TABLES = WeakIdKeyDictionary()  # positions -> (versions and sizes, cos, sin)


def tables(positions, frequencies, dtype):
    """positions [T], frequencies [P] -> cos, sin [T, P] in `dtype`."""
    key = positions._version, frequencies._version, frequencies.data_ptr(), frequencies.dtype, frequencies.shape, dtype
    known = _TABLES.get(positions)
    if known is None or known[0] != key:
        angle = positions[:, None].to(frequencies.dtype) * frequencies
        known = _TABLES[positions] = key, angle.cos().to(dtype), angle.sin().to(dtype), frequencies
    return known[1:3]


def rotary(x, positions, frequencies, *, interleaved=False, implementation="auto"):
    """x [T, N, D] turned by positions [T] * frequencies [P], 2P <= D -> [T, N, D], differentiable in x.

    positions: integers, restarting with each document. frequencies: fp32, or fp64 for fp64 inputs.
    interleaved: pairs are neighbours; otherwise (i, i + P). implementation: "auto" (triton on CUDA, torch elsewhere), "torch",
    "triton". Raises ValueError for shapes, types, devices and layouts that do not fit.
    """
    wide = torch.promote_types(x.dtype, torch.float32) if x.dtype.is_floating_point else None
    if wide is None or x.dim() != 3 or (x.shape[-1] > 1 and x.stride(-1) != 1):
        found = f"x is {x.dtype} {list(x.shape)} with strides {x.stride()}"
        raise ValueError(f"{found}, must be floating point [T, N, D] with contiguous rows; call .contiguous()")
    if positions.shape != x.shape[:1] or positions.dtype not in (torch.int32, torch.int64) or positions.device != x.device:
        found = f"positions is {positions.dtype} {list(positions.shape)} on {positions.device}"
        raise ValueError(f"{found}, must be int32 or int64 [{x.shape[0]}] on {x.device}")
    if frequencies.dim() != 1 or not 0 < 2 * len(frequencies) <= x.shape[-1] or frequencies.device != x.device:
        found = f"frequencies is {list(frequencies.shape)} on {frequencies.device}"
        raise ValueError(f"{found}, must be [P] on {x.device} with 0 < 2 P <= D = {x.shape[-1]}")
    if frequencies.dtype != wide:
        raise ValueError(f"frequencies is {frequencies.dtype}, must be {wide} for {x.dtype}: angles need the digits")
    if implementation not in ("auto", "torch", "triton"):
        raise ValueError(f"implementation={implementation!r} must be 'auto', 'torch' or 'triton'")
    if implementation == "triton" and not (x.is_cuda or INTERPRETED):
        raise ValueError(f"implementation='triton' needs CUDA tensors, x is on {x.device}; use 'auto' or 'torch'")
    triton_path = implementation == "triton" or implementation == "auto" and x.is_cuda
    cos, sin = tables(positions, frequencies, wide)
    return _Rotary.apply(x, cos, sin, interleaved, _rotated_triton if triton_path else _rotated_torch)


def compile_cases():
    """For compile_check: both layouts whole, and a partial rotation."""
    one = {"N": 1}  # the JIT makes an argument of 1 a constant
    for D, P, interleaved, heads in ((128, 64, False, {}), (128, 64, True, {}), (96, 24, False, {}), (128, 64, False, one)):
        tile = _tile(D, P)
        options = {"num_warps": tile.pop("num_warps")}
        types = {"X": "*bf16", "Y": "*bf16", "COS": "*fp32", "SIN": "*fp32", "sign": "fp32"}
        types |= dict.fromkeys(("D", "P", "stride_t", "stride_n"), "i32:16")
        constants = tile | heads | {"INTERLEAVED": interleaved, "ACC": tl.float32}
        name = f"rotary D{D}, {2 * P} turned{', interleaved' if interleaved else ''}{', one head' if heads else ''}"
        yield name, _rotate, types, constants, options, False
