"""keep_features in Triton: a program per row, which alone moves its count."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.triton_rows import check_contiguous, warps

_TILE = 4096  # numbers at a time
_EACH = 8  # numbers per thread: one 16-byte load of bf16


def keep_features(ring: Tensor, first: Tensor, count: Tensor, features: Tensor, position: Tensor) -> None:
    """See `draftwood.kernels.keep_features.keep_features`. Raises `ValueError` where what is written is not contiguous."""
    check_contiguous(ring=ring, first=first, count=count)
    B, R, F = ring.shape
    tile = min(_TILE, triton.next_power_of_2(F))
    if B > 0:
        _keep[(B,)](
            *(ring, first, count, features.contiguous(), position.contiguous()),
            R=R,
            WIDTH=F,
            TILE=tile,
            num_warps=warps(tile, _EACH),
        )


@triton.jit
def _keep(
    ring,  # [B, R, WIDTH]
    first,  # [B]
    count,
    features,  # [B, WIDTH]
    position,  # [B]
    R: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    n = tl.load(count + b)
    target, source = ring + (b * R + n % R) * WIDTH, features + b * WIDTH
    for start in range(0, WIDTH, TILE):
        c = start + tl.arange(0, TILE)
        tl.store(target + c, tl.load(source + c, mask=c < WIDTH), mask=c < WIDTH)
    tl.store(first + b, tl.load(position + b), mask=n == 0)
    tl.debug_barrier()  # every thread has read the count
    tl.store(count + b, n + 1)


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`."""
    constexprs = {"R": 16, "WIDTH": 6 * 7168, "TILE": _TILE}
    arguments: dict[str, str | int] = {"ring": "*bf16", "features": "*bf16"}
    arguments |= dict.fromkeys(("first", "count", "position"), "*i32")
    return [CompileCase("K2.6", _keep, arguments, constexprs, warps(_TILE, _EACH))]
