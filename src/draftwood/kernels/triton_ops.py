"""What the Triton kernels share: integers in the order of floats."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(x):
    """The i32 that is ordered as the f32 x is; x is not NaN. -0.0 comes just before 0.0."""
    return _flip(tl.cast(x, tl.float32).to(tl.int32, bitcast=True))


@triton.jit
def from_ordered(i):
    """The f32 of an i32 made by `ordered`."""
    return _flip(i).to(tl.float32, bitcast=True)


@triton.jit
def _flip(bits):
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def packed(x, index):
    """i64 keys in the order "larger f32 x first, then smaller index"; x is not NaN, 0 <= index < 2^31."""
    return (ordered(x + 0.0).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)  # -0.0 + 0.0 = 0.0


@triton.jit
def packed_value(key):
    return from_ordered((key >> 32).to(tl.int32))


@triton.jit
def packed_index(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
