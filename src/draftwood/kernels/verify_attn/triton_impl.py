"""verify_attn in Triton: one launch over equal runs of (request, tile of rows, block of keys), one that merges cut tiles.

Every program works its run out for itself from the lengths on the device (see `triton_line`): grids depend on shapes alone.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from draftwood.kernels.chip import Chip, chip_of
from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.verify_attn import triton_kernels
from draftwood.kernels.verify_attn.tiles import Tiles, choose_tiles, has_few_blocks, merge_rows
from draftwood.tree import n_words

_LOG2_E = math.log2(math.e)
_MERGE_WARPS = 4
_MERGE_LOADS = 16  # rows of partial results that a program has in flight


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

    bf16, fp16 and fp32. Raises `TypeError` for another dtype and `ValueError` where the numbers of one key or query are
    not contiguous. Lengths and page ids out of range are clamped.
    """
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"`q`: expected bfloat16, float16 or float32, got {q.dtype}")
    B, T, H, C = q.shape
    if q.stride(3) != 1:
        raise ValueError(f"`q`: the numbers of a query must be contiguous, got strides {q.stride()}")
    if pages.stride()[1:] != (C, 1):
        raise ValueError(f"`pages`: the keys of a page must be contiguous, got strides {pages.stride()}")
    chip = chip_of(q.device)
    keys = page_table.shape[1] * pages.shape[1] + T
    tiles = choose_tiles(chip, q.element_size(), B, T * H, keys, value_dim, C - value_dim)
    o = torch.empty((B, T, H, value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, T, H), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((chip.n_sms, 2, tiles.block_m), dtype=torch.float32, device=q.device)
    part_o = torch.empty((*part_lse.shape, tiles.latent_pad), dtype=torch.float32, device=q.device)
    few = has_few_blocks(chip, tiles, B, T, H, page_table.shape[1] * pages.shape[1])
    sizes = {"B": B, "T": T, "H": H, "M": page_table.shape[1], "programs": chip.n_sms}
    rows = merge_rows(B * T * H, chip.n_sms)
    attend, merge = _constexprs(chip, tiles, B, C, value_dim, pages.shape[1], rows)
    lengths = prefix_len.contiguous(), n_slots.contiguous()
    triton_kernels.attend[(chip.n_sms,)](
        q,
        pages,
        page_table.contiguous(),
        *lengths,
        tree_kv.contiguous(),
        ancestors.contiguous(),
        *(o, lse, part_o, part_lse),
        scale * _LOG2_E,
        **sizes,
        n_pages=pages.shape[0],
        words=ancestors.shape[2],
        q_b=q.stride(0),
        q_t=q.stride(1),
        q_h=q.stride(2),
        pages_n=pages.stride(0),
        **attend,
        FEW=few,
        num_warps=tiles.num_warps,
    )
    grid = (triton.cdiv(T * H, rows), B)
    triton_kernels.merge_parts[grid](
        *lengths,
        *(o, lse, part_o, part_lse),
        **sizes,
        **merge,
        num_warps=_MERGE_WARPS,
        launch_pdl=chip.overlaps,
    )
    return o, lse


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`."""
    chip = Chip(capability, 132)
    return [
        case
        for item, B, T, H, page, R, P in (
            ("bf16", 8, 33, 64, 64, 512, 64),
            ("bf16", 1, 33, 64, 16, 512, 64),
            ("fp16", 9, 33, 8, 32, 16, 8),
            ("fp16", 2, 3, 8, 64, 512, 64),
            ("bf16", 1, 1, 8, 16, 128, 16),
            ("fp32", 8, 65, 8, 64, 512, 64),
        )
        for case in _compile_cases(chip, item, B, T, H, page, R, P)
    ]


def _compile_cases(
    chip: Chip, item: str, B: int, T: int, H: int, page: int, R: int, P: int
) -> list[CompileCase]:
    C = R + P
    tiles = choose_tiles(chip, 4 if item == "fp32" else 2, B, T * H, 65 * page + T, R, P)
    rows = merge_rows(B * T * H, chip.n_sms)
    attend, merge = _constexprs(chip, tiles, B, C, R, page, rows)
    outputs = {"o": f"*{item}", "lse": "*fp32", "part_o": "*fp32", "part_lse": "*fp32"}
    lengths = {"prefix_len": "*i32", "n_slots": "*i32"}
    sizes: dict[str, str | int] = {"B": B, "T": T, "H": H, "M": 65, "programs": chip.n_sms}
    inputs = {"q": f"*{item}", "pages": f"*{item}", "page_table": "*i32", "tree_kv": f"*{item}"}
    strides = {"q_b": T * H * C, "q_t": H * C, "q_h": C, "pages_n": page * C}
    arguments = {**inputs, **lengths, "ancestors": "*i64", **outputs, "scale_log2": "fp32", **sizes}
    arguments |= {"n_pages": 4099, "words": n_words(T), **strides}
    attend["FEW"] = has_few_blocks(chip, tiles, B, T, H, 65 * page)
    name = f"{item} {B}x{T}x{H} page {page} {R}+{P}"
    return [
        CompileCase(
            f"attend {name}", triton_kernels.attend, arguments, attend, tiles.num_warps, tiles.num_stages
        ),
        CompileCase(
            f"merge {name}",
            triton_kernels.merge_parts,
            {**lengths, **outputs, **sizes},
            merge,
            _MERGE_WARPS,
        ),
    ]


def _constexprs(
    chip: Chip, tiles: Tiles, B: int, C: int, R: int, page: int, rows: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Compile-time arguments of `attend` and of `merge_parts`."""
    both = {"PAGE": page, "R": R, "R_PAD": tiles.latent_pad, "B_PAD": max(2, triton.next_power_of_2(B))}
    both |= {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "OVERLAP": chip.overlaps}
    merge = {"ROWS": rows, "PARTS": max(1, _MERGE_LOADS // rows)}
    return {**both, "C": C, "P_PAD": tiles.rope_pad, "STAGES": tiles.num_stages}, {**both, **merge}
