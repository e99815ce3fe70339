"""embed in Triton: a program per row and tile of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.triton_rows import check_rows, warps

_TILE = 1024  # columns per program
_EACH = 8  # numbers per thread: one 16-byte load of bf16


def embed(tokens: Tensor, table: Tensor, *, block: int = 1, filler: int = 0) -> Tensor:
    """See `draftwood.kernels.embed.embed`. Raises `ValueError` where the numbers of a row are not contiguous."""
    check_rows(table=table)
    N, (V, d) = len(tokens) * block, table.shape
    out = torch.empty((N, d), dtype=table.dtype, device=table.device)
    tile = min(_TILE, triton.next_power_of_2(d))
    if N > 0:
        _embed[(N, triton.cdiv(d, tile))](
            *(tokens.contiguous(), table, out, table.stride(0), filler, block, V),
            WIDTH=d,
            BLOCK=tile,
            num_warps=warps(tile, _EACH),
        )
    return out


@triton.jit(do_not_specialize=["filler", "block", "V"])
def _embed(
    tokens,  # [N]
    table,  # [V, WIDTH]
    out,  # [N block, WIDTH]
    table_v,
    filler,
    block,
    V,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.where(n % block == 0, tl.load(tokens + n // block), filler)
    token = tl.minimum(tl.maximum(token, 0), V - 1).to(tl.int64)
    x = tl.load(table + token * table_v + c, mask=c < WIDTH)
    tl.store(out + n.to(tl.int64) * WIDTH + c, x, mask=c < WIDTH)


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`."""
    arguments: dict[str, str | int] = {"tokens": "*i32", "table": "*bf16", "out": "*bf16", "table_v": 7168}
    arguments |= dict.fromkeys(("filler", "block", "V"), "i32")
    return [CompileCase("K2.6", _embed, arguments, {"WIDTH": 7168, "BLOCK": _TILE}, warps(_TILE, _EACH))]
