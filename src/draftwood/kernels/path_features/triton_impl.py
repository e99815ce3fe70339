"""path_features in Triton: a program per path entry and part of a row, over all taps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.triton_rows import warps

_TILE = 1024  # numbers of a tap per program
_EACH = 8  # numbers per thread and tap: one 16-byte load of bf16


def path_features(taps: Sequence[Tensor], path: Tensor) -> Tensor:
    """See `draftwood.kernels.path_features.path_features`."""
    rows = tuple(tap.contiguous() for tap in taps)
    T, d = rows[0].shape[1:]
    B, S = path.shape
    out = torch.empty((B, S, len(rows) * d), dtype=rows[0].dtype, device=path.device)
    block = min(_TILE, triton.next_power_of_2(d))
    if B * S > 0:
        _gather[(B * S, triton.cdiv(d, block))](
            *(rows, path, out, *path.stride(), S, T),
            K=len(rows),
            WIDTH=d,
            BLOCK=block,
            num_warps=warps(block, _EACH),
        )
    return out


@triton.jit(do_not_specialize=["path_b", "path_s", "S", "T"])
def _gather(
    taps,  # K of [B, T, WIDTH]
    path,  # [B, S]
    out,  # [B, S, K WIDTH]
    path_b,
    path_s,
    S,
    T,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b, j = row // S, row % S
    slot = tl.maximum(tl.load(path + b * path_b + j * path_s), 0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < WIDTH
    source, place = (b * T + slot) * WIDTH + c, row * (K * WIDTH) + c
    for k in tl.static_range(K):
        tl.store(out + place + k * WIDTH, tl.load(taps[k] + source, mask=inside), mask=inside)


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`."""
    constexprs = {"K": 6, "WIDTH": 7168, "BLOCK": _TILE}
    arguments: dict[str, str | int | tuple[str, ...]] = {
        "taps": ("*bf16",) * 6,
        "path": "*i32",
        "out": "*bf16",
    }
    arguments |= dict.fromkeys(("path_b", "path_s", "S", "T"), "i32")
    return [CompileCase("K2.6", _gather, arguments, constexprs, warps(_TILE, _EACH))]
