"""verify_attn in Gluon, for Hopper: latents of 512 + 64 numbers in bf16 (see `draftwood.kernels.specialised`).

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
from draftwood.kernels.specialised import refusal
from draftwood.kernels.verify_attn import gluon_kernels, gluon_merge, use_of
from draftwood.kernels.verify_attn.tiles import merge_rows

WIDTH = 576

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

    Raises `NotImplementedError` for a use that this is not made for, and `ValueError` where the pages are not contiguous.
    Lengths and page ids out of range are clamped.
    """
    if why_not := refusal("verify_attn", "gluon", use_of(q, pages, value_dim)):
        raise NotImplementedError(f"gluon {why_not}")
    if not pages.is_contiguous():
        raise ValueError(f"`pages`: expected contiguous pages, got strides {pages.stride()}")
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
    return [*_compile_cases(64, 1), *_compile_cases(16, 32)]


def _compile_cases(page: int, b_pad: int) -> list[CompileCase]:
    outputs = {"o": "*bf16", "lse": "*fp32", "part_o": "*bf16", "part_lse": "*fp32"}
    lengths = {"prefix_len": "*i32", "n_slots": "*i32"}
    sizes = dict.fromkeys(("B", "T", "H", "M"), "i32")
    rows, paged = (f"tensordesc<bf16[{n}, 64],{_LAYOUT!r}>" for n in (64, page))
    arguments = {"q_desc": rows, "kv_desc": paged, "tree_desc": rows, "page_table": "*i32", **lengths}
    arguments |= {
        "ancestors": "*i64",
        **outputs,
        "scale_log2": "fp32",
        **sizes,
        "n_pages": "i32",
        "words": "i32",
    }
    both = {"PAGE": page, "PROGRAMS": 132, "B_PAD": b_pad}
    name = f"page {page}, requests {b_pad}"
    return [
        CompileCase(f"attend {name}", gluon_kernels.attend, arguments, {**both, **TUNING}, _WARPS),
        CompileCase(
            f"merge {name}",
            gluon_merge.merge_parts,
            {**lengths, **outputs, **sizes},
            {**both, "ROWS": 1},
            _WARPS,
        ),
    ]


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Of the rows of `x`, which TMA reads in pieces."""
    return TensorDescriptor.from_tensor(x.reshape(-1, WIDTH), [rows, 64], _LAYOUT)
