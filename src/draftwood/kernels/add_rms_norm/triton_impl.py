"""add_rms_norm in Triton: one program per row, which holds all of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.triton_rows import check_rows, inverse_rms, warps, wide

_EACH = 16  # numbers per thread: two 16-byte loads of bf16 from each input


def add_rms_norm(
    x: Tensor, weight: Tensor, eps: float, a: Tensor | None = None, b: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `draftwood.kernels.add_rms_norm.add_rms_norm`. Raises `ValueError` where the numbers of a row are not contiguous."""
    check_rows(x=x, a=a, b=b)
    N, d = x.shape
    block = triton.next_power_of_2(d)
    total = x if a is None else torch.empty((N, d), dtype=x.dtype, device=x.device)
    normed = torch.empty((N, d), dtype=x.dtype, device=x.device)
    added = [part for part in (a, b) if part is not None]
    first, second = (*added, x, x)[:2]  # what is not there is not read
    _norm[(N,)](
        *(x, first, second, weight, total, normed, x.stride(0), first.stride(0), second.stride(0)),
        D=d,
        EPS=eps,
        ADDENDS=len(added),
        BLOCK=block,
        num_warps=warps(block, _EACH),
    )
    return total, normed


@triton.jit
def _norm(
    x,  # [N, D]
    a,
    b,
    weight,  # [D]
    total,  # [N, D]
    normed,
    x_n,
    a_n,
    b_n,
    D: tl.constexpr,
    EPS: tl.constexpr,
    ADDENDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype = x.dtype.element_ty
    n = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < D
    w = wide(tl.load(weight + c, mask=inside, other=0.0))
    row = wide(tl.load(x + n * x_n + c, mask=inside, other=0.0))
    if ADDENDS > 0:
        more = wide(tl.load(a + n * a_n + c, mask=inside, other=0.0))
        if ADDENDS > 1:
            more = wide((more + wide(tl.load(b + n * b_n + c, mask=inside, other=0.0))).to(dtype))
        rounded = (row + more).to(dtype)
        tl.store(total + n * D + c, rounded, mask=inside)
        row = wide(rounded)
    row = wide((row * inverse_rms(row, D, EPS)).to(dtype))
    tl.store(normed + n * D + c, (row * w).to(dtype), mask=inside)


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`. The same on every chip; numbers that are seldom used for one only."""
    narrow = [_compile_case("bf16", 7168, 2)]
    return [*narrow, _compile_case("fp64", 7168, 1)] if capability == 90 else narrow


def _compile_case(item: str, d: int, addends: int) -> CompileCase:
    arguments: dict[str, str | int] = dict.fromkeys(("x", "a", "b", "weight", "total", "normed"), f"*{item}")
    arguments |= dict.fromkeys(("x_n", "a_n", "b_n"), d)
    block = triton.next_power_of_2(d)
    constexprs = {"D": d, "EPS": 1e-6, "ADDENDS": addends, "BLOCK": block}
    return CompileCase(f"{item} {d} + {addends}", _norm, arguments, constexprs, warps(block, _EACH))
