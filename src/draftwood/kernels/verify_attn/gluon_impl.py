"""verify_attn in Gluon, for Hopper: latents of 512 + 64 numbers, bf16 and fp16.

One launch over runs of (request, tile of 64 rows, block of 64 keys), one that merges cut tiles (see `gluon_line`). Each is
launched before the one ahead of it has ended, and waits for that before it touches memory.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from draftwood.kernels.chip import chip_of
from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.verify_attn import gluon_kernels, gluon_merge
from draftwood.kernels.verify_attn.tiles import merge_rows

PAGES = (16, 32, 64)
VALUE_DIM, WIDTH = 512, 576

TUNING = {"GRAIN": 2, "AHEAD": 1}
"""GRAIN: pieces of 64 columns to a barrier. AHEAD: see `gluon_kernels`."""

_LOG2_E = math.log2(math.e)
_WARPS = 4  # of `attend`'s first warpgroup, which asks for the others, and of the merge
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def verify_attn(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    prefix_len: Tensor,
    tree_kv: Tensor,
    ancestors: Tensor,
    n_slots: Tensor,
    scale: float,
    *,
    value_dim: int,
) -> tuple[Tensor, Tensor]:
    """See `draftwood.kernels.verify_attn.verify_attn`.

    Raises `TypeError` for a dtype, and `ValueError` for widths, a page size, a chip or strides, that this is not made for.
    Lengths and page ids out of range are clamped.
    """
    _check(q, pages, value_dim)
    B, T, H, _ = q.shape
    programs = chip_of(q.device).n_sms
    o = torch.empty((B, T, H, value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, T, H), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((programs, 2, 64), dtype=torch.float32, device=q.device)
    part_o = torch.empty((programs, 2, 64, value_dim), dtype=q.dtype, device=q.device)
    lengths = prefix_len.contiguous(), n_slots.contiguous()
    outputs = o, lse, part_o, part_lse
    sizes = {"B": B, "T": T, "H": H, "M": page_table.shape[1]}
    b_pad = 1 if B == 1 else max(32, triton.next_power_of_2(B))
    gluon_kernels.attend[(programs,)](
        _descriptor(q, 64),
        _descriptor(pages, pages.shape[1]),
        _descriptor(tree_kv, 64),
        page_table.contiguous(),
        *lengths,
        ancestors.contiguous(),
        *outputs,
        scale * _LOG2_E,
        **sizes,
        n_pages=pages.shape[0],
        words=ancestors.shape[2],
        PAGE=pages.shape[1],
        PROGRAMS=programs,
        B_PAD=b_pad,
        **TUNING,
        num_warps=_WARPS,
        launch_pdl=True,
    )
    rows = merge_rows(B * T * H, programs)
    gluon_merge.merge_parts[(triton.cdiv(T * H, rows), B)](
        *lengths,
        *outputs,
        **sizes,
        PAGE=pages.shape[1],
        PROGRAMS=programs,
        B_PAD=b_pad,
        ROWS=rows,
        num_warps=_WARPS,
        launch_pdl=True,
    )
    return o, lse


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`; nothing for other chips."""
    if capability != 90:
        return []
    return [*_compile_cases("bf16", 1), *_compile_cases("fp16", 32)]


def _compile_cases(item: str, b_pad: int) -> list[CompileCase]:
    outputs = {"o": f"*{item}", "lse": "*fp32", "part_o": f"*{item}", "part_lse": "*fp32"}
    lengths = {"prefix_len": "*i32", "n_slots": "*i32"}
    sizes = dict.fromkeys(("B", "T", "H", "M"), "i32")
    rows = f"tensordesc<{item}[64, 64],{_LAYOUT!r}>"
    arguments = {"q_desc": rows, "kv_desc": rows, "tree_desc": rows, "page_table": "*i32", **lengths}
    arguments |= {
        "ancestors": "*i64",
        **outputs,
        "scale_log2": "fp32",
        **sizes,
        "n_pages": "i32",
        "words": "i32",
    }
    attend = {"PAGE": 64, "PROGRAMS": 132, "B_PAD": b_pad, **TUNING}
    merge = {"PAGE": 64, "PROGRAMS": 132, "B_PAD": b_pad, "ROWS": 1}
    return [
        CompileCase(f"attend {item} {b_pad}", gluon_kernels.attend, arguments, attend, _WARPS),
        CompileCase(
            f"merge {item} {b_pad}", gluon_merge.merge_parts, {**lengths, **outputs, **sizes}, merge, _WARPS
        ),
    ]


def _check(q: Tensor, pages: Tensor, value_dim: int) -> None:
    chip = chip_of(q.device)
    if not chip.has_wgmma:
        raise ValueError(f"`q`: expected a GPU of compute capability 9.0, got {chip.capability / 10}")
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"`q`: expected bfloat16 or float16, got {q.dtype}")
    if (value_dim, q.shape[3]) != (VALUE_DIM, WIDTH):
        raise ValueError(
            f"`q`: expected {VALUE_DIM} values of {WIDTH} numbers, got {value_dim} of {q.shape[3]}"
        )
    if pages.shape[1] not in PAGES or pages.shape[2] != WIDTH or not pages.is_contiguous():
        raise ValueError(
            f"`pages`: expected [n_pages, one of {PAGES}, {WIDTH}], contiguous, got {tuple(pages.shape)}, strides {pages.stride()}"
        )


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Of the rows of `x`, which TMA reads in pieces."""
    return TensorDescriptor.from_tensor(x.reshape(-1, WIDTH), [rows, 64], _LAYOUT)
