"""What the Triton kernels with a row or a part of one per program share.

Every program goes through its numbers in one order, in one tile whose shape follows from the widths alone: a row's result does
not depend on other rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def warps(numbers: int, each: int) -> int:
    """For a tile of so many numbers, of which a thread holds `each`: a power of two up to 16."""
    return min(16, max(1, numbers // (32 * each)))


def check_rows(**tensors: Tensor | None) -> None:
    """Raise `ValueError` naming a tensor whose last axis is not contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.stride(-1) != 1:
            raise ValueError(f"`{name}`: the last axis must be contiguous, got strides {tensor.stride()}")


def check_contiguous(**tensors: Tensor) -> None:
    """Raise `ValueError` naming a tensor that is not contiguous."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"`{name}`: must be contiguous, got strides {tensor.stride()}")


@triton.jit
def wide(x):
    """f32, or f64 for f64: what is computed in."""
    return x.to(tl.float64 if x.dtype == tl.float64 else tl.float32)


@triton.jit
def inverse_rms(x, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """1 / sqrt(mean of squares + EPS) over the last axis of wide numbers, 0 where they fill up; that axis stays, with length 1."""
    mean = tl.sum(x * x, -1, keep_dims=True) / WIDTH + EPS
    return 1 / tl.sqrt(mean) if x.dtype == tl.float64 else tl.rsqrt(mean)


@triton.jit
def partner(p, WIDTH: tl.constexpr):
    """Where the other number of each pair (j, j + WIDTH / 2) is."""
    return tl.where(p < WIDTH // 2, p + WIDTH // 2, p - WIDTH // 2)
