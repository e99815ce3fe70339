"""rotary in Triton: angles are brought to within an eighth of a turn, where short series are exact to fp64.

Not the library's functions: for huge angles those keep tables in local memory.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.triton_rows import warps

_TILE = 256  # numbers per program
_EACH = 2  # numbers per thread

_QUARTER = tl.constexpr(math.pi / 2)
_QUARTER_REST = tl.constexpr(6.123233995736766e-17)  # pi / 2 - _QUARTER
_QUARTERS_PER_RADIAN = tl.constexpr(2 / math.pi)


def rotary(
    positions: Tensor,
    frequencies: Tensor,
    amplitude: float,
    *,
    start: Tensor | None = None,
    double: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `draftwood.kernels.rotary.rotary`."""
    N, width = positions.numel(), len(frequencies)
    rows, dtype = tuple(positions.shape), torch.float64 if double else torch.float32
    if start is None:
        positions = positions.reshape(1, N)
    else:
        rows, start = (N,), start.contiguous()
    cos, sin = (torch.empty((*rows, 1, width), dtype=dtype, device=positions.device) for _ in range(2))
    constexprs, num_warps = _config(width)
    grid = (triton.cdiv(N, constexprs["ROWS"]),)
    _tables[grid](
        *(positions, start, frequencies, cos, sin, N, positions.shape[1], *positions.stride()),
        **constexprs,
        AMPLITUDE=float(amplitude),
        num_warps=num_warps,
    )
    return cos, sin


def _config(width: int) -> tuple[dict[str, int], int]:
    """Compile-time arguments and warps."""
    pad = triton.next_power_of_2(width)
    rows = max(1, _TILE // pad)
    return {"WIDTH": width, "ROWS": rows, "PAD": pad}, warps(rows * pad, _EACH)


@triton.jit(do_not_specialize=["N", "T"])
def _tables(
    positions,  # [N / T, T]
    start,  # [N / T], or None
    frequencies,  # [WIDTH]
    cos,  # [N, WIDTH]
    sin,
    N,
    T,
    positions_b,
    positions_t,
    WIDTH: tl.constexpr,
    AMPLITUDE: tl.constexpr,
    ROWS: tl.constexpr,
    PAD: tl.constexpr,
):
    dtype = cos.dtype.element_ty
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, PAD)[None, :]
    b, t = n // T, n % T
    position = tl.load(positions + b * positions_b + t * positions_t, mask=n < N, other=0)
    if start is not None:
        position += tl.load(start + b, mask=n < N, other=0)
    angle = position.to(tl.float64) * tl.load(frequencies + c, mask=c < WIDTH, other=0.0)
    quarters = tl.floor(angle * _QUARTERS_PER_RADIAN + 0.5)
    x = angle - quarters * _QUARTER - quarters * _QUARTER_REST
    square = x * x
    cosine = tl.full([ROWS, PAD], 1.0, tl.float64)
    sine = tl.full([ROWS, PAD], 1.0, tl.float64)
    for i in tl.static_range(8, 0, -1):  # Taylor: the first term left out is below 1e-16
        cosine = 1 - cosine * square * (1 / ((2 * i - 1) * 2 * i))
        sine = 1 - sine * square * (1 / (2 * i * (2 * i + 1)))
    sine = sine * x
    quarter = quarters.to(tl.int64)
    odd = (quarter & 1) != 0
    cosine, sine = tl.where(odd, sine, cosine), tl.where(odd, cosine, sine)
    cosine = tl.where(((quarter + 1) & 2) != 0, -cosine, cosine)
    sine = tl.where((quarter & 2) != 0, -sine, sine)
    place, mask = n * WIDTH + c, (n < N) & (c < WIDTH)
    tl.store(cos + place, (cosine * AMPLITUDE).to(dtype), mask=mask)
    tl.store(sin + place, (sine * AMPLITUDE).to(dtype), mask=mask)


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`. The same on every chip, so two will do."""
    if capability not in (80, 90):
        return []
    constexprs, num_warps = _config(64)
    arguments: dict[str, str | int] = {"positions": "*i32", "start": "*i32", "frequencies": "*fp64"}
    arguments |= {"cos": "*fp32", "sin": "*fp32", "N": "i32", "T": "i32", "positions_b": 32, "positions_t": 1}
    return [CompileCase("64", _tables, arguments, {**constexprs, "AMPLITUDE": 1.1}, num_warps)]
