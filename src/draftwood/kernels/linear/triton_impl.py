"""linear in Triton: one program per tile of the output, which goes through all of K by itself, in one order.

One tile shape per dtype and one compiled program per weight serve every number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.compile_case import CompileCase

_WARPS, _STAGES = 4, 4


@triton.jit(do_not_specialize=["N"])
def product(
    x,  # [G, N, K]
    weight,  # [G, M, K]
    out,  # [G, N, M]
    N,
    M,
    K,
    weight_g,
    weight_m,
    weight_k,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(2).to(tl.int64)
    row = (group * N + n)[:, None]
    rows = x + row * K
    columns = weight + group * weight_g + m.to(tl.int64)[:, None] * weight_m
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)[None, :]
        a = tl.load(rows + k, mask=(n < N)[:, None] & (k < K), other=0.0)
        w = tl.load(columns + k.to(tl.int64) * weight_k, mask=(m < M)[:, None] & (k < K), other=0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    mask = (n < N)[:, None] & (m < M)[None, :]
    tl.store(out + row * M + m[None, :], acc.to(out.dtype.element_ty), mask=mask)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `draftwood.kernels.linear.linear`. bf16, fp16 and fp32; raises `TypeError` for another dtype or two of them."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"`x`: expected bfloat16, float16 or float32, got {x.dtype}")
    if weight.dtype != x.dtype:
        raise TypeError(f"`weight`: expected {x.dtype} as `x`, got {weight.dtype}")
    shape = (*x.shape[:-1], weight.shape[-2])
    x, weight = (a if a.dim() == 3 else a[None] for a in (x, weight))
    x = aligned(x.contiguous())
    (G, N, K), M = x.shape, weight.shape[1]
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    tile = _tile(x.element_size())
    grid = (triton.cdiv(M, tile["BLOCK_M"]), triton.cdiv(N, tile["BLOCK_N"]), G)
    product[grid](x, weight, out, N, M, K, *weight.stride(), **tile, num_warps=_WARPS, num_stages=_STAGES)
    return out


def aligned(x: Tensor) -> Tensor:
    """x at a multiple of 16 bytes, where a part of a larger tensor need not be.

    Triton compiles another program for what is not, and that could add in another order.
    """
    return x.clone() if x.data_ptr() % 16 else x


def _tile(item_size: int) -> dict[str, int]:
    """Rows of a draft tree, for which the weight is read once; up to 24 KiB of it are under way per program."""
    if item_size == 4:
        return {"BLOCK_N": 16, "BLOCK_M": 32, "BLOCK_K": 32}
    return {"BLOCK_N": 32, "BLOCK_M": 64, "BLOCK_K": 64}


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`. The same on every chip."""
    shapes: tuple[tuple[str, int, int, int, tuple[int, int, int]], ...] = (
        ("bf16", 33, 2112, 7168, (0, 7168, 1)),
        ("bf16", 33, 512, 128, (128 * 512, 1, 512)),
        ("fp32", 33, 2112, 7168, (0, 7168, 1)),
    )
    return [_compile_case(*shape) for shape in shapes]


def _compile_case(item: str, N: int, M: int, K: int, strides: tuple[int, int, int]) -> CompileCase:
    arguments: dict[str, Any] = dict.fromkeys(("x", "weight", "out"), f"*{item}")
    arguments |= {"N": "i32", "M": M, "K": K}
    arguments |= zip(("weight_g", "weight_m", "weight_k"), strides, strict=True)
    tile = _tile(4 if item == "fp32" else 2)
    return CompileCase(f"{item} {N}x{M}x{K}", product, arguments, tile, _WARPS, _STAGES)
