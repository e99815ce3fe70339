"""silu_mul in Triton: a program per row and tile of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.triton_rows import check_rows, warps, wide

_TILE = 1024  # columns per program
_EACH = 8  # numbers per thread and factor: one 16-byte load of bf16


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `draftwood.kernels.silu_mul.silu_mul`. Raises `ValueError` where the numbers of a row are not contiguous."""
    check_rows(gate_up=gate_up)
    N, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((N, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(_TILE, triton.next_power_of_2(width))
    grid = (N, triton.cdiv(width, block))
    _activate[grid](gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=block, num_warps=warps(block, _EACH))
    return out


@triton.jit
def _activate(
    gate_up,  # [N, 2 WIDTH]
    out,  # [N, WIDTH]
    gate_up_n,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    dtype = out.dtype.element_ty
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < WIDTH
    row = gate_up + n * gate_up_n
    gate = wide(tl.load(row + c, mask=inside, other=0.0))
    up = wide(tl.load(row + WIDTH + c, mask=inside, other=0.0))
    activated = wide((gate / (1 + tl.exp(-gate))).to(dtype))
    tl.store(out + n * WIDTH + c, (activated * up).to(dtype), mask=inside)


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`. The same on every chip, so two will do."""
    if capability not in (80, 90):
        return []
    width = 2048
    arguments: dict[str, str | int] = {"gate_up": "*bf16", "out": "*bf16", "gate_up_n": 2 * width}
    return [CompileCase("K2.6", _activate, arguments, {"WIDTH": width, "BLOCK": _TILE}, warps(_TILE, _EACH))]
