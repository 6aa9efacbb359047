"""bfloat16 in Triton's interpreter, which keeps it as raw uint16 and multiplies the bit patterns. For tests only."""

import contextlib

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def widen(bits):
    """uint16 bit patterns of bfloat16 -> float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values):
    """float32 -> uint16 bit patterns of bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


@contextlib.contextmanager
def bf16_interpreter():
    """Within: dots of bfloat16 blocks and casts from and to bfloat16 are right."""
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def as_float32(block):
        return TensorHandle(widen(block.data), tl.float32) if block.dtype.scalar == tl.bfloat16 else block

    def create_dot(self, a, b, d, *options):
        return dot(self, as_float32(a), as_float32(b), d, *options)

    def cast_impl(self, source, wanted):
        if source.dtype.scalar == tl.bfloat16 and wanted.scalar != tl.bfloat16:
            source = as_float32(source)
            return source if wanted.scalar == tl.float32 else cast(self, source, wanted)
        if source.dtype.scalar != tl.bfloat16 and wanted.scalar == tl.bfloat16:
            single = source if source.dtype.scalar == tl.float32 else cast(self, source, tl.float32)
            return TensorHandle(narrow(single.data), tl.bfloat16)
        return cast(self, source, wanted)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
    try:
        yield
    finally:
        InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = dot, cast
