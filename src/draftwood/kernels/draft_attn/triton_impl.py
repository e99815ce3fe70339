"""draft_attn in Triton: one launch over equal runs of (request, key head, block of keys), one that merges cut tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from draftwood.kernels.chip import Chip, chip_of
from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.draft_attn import triton_kernels
from draftwood.kernels.triton_rows import check_rows

_LOG2_E = math.log2(math.e)
_MERGE_ROWS = 2
_MERGE_PARTS = 8
_MERGE_WARPS = 1


def draft_attn(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    context_len: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """See `draftwood.kernels.draft_attn.draft_attn`.

    bf16, fp16 and fp32. Raises `TypeError` for another dtype and `ValueError` where the numbers of one head are not
    contiguous. Lengths and page ids out of range are clamped.
    """
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"`q`: expected bfloat16, float16 or float32, got {q.dtype}")
    check_rows(q=q, k_pages=k_pages, v_pages=v_pages, block_k=block_k, block_v=block_v)
    B, S, Hq, hd = q.shape
    n_pages, page, Hkv = k_pages.shape[:3]
    chip = chip_of(q.device)
    capacity = page_table.shape[1] * page
    tiles = choose_tiles(chip, q.element_size(), B * Hkv, S * Hq // Hkv, hd, page, capacity + S)
    programs = chip.n_sms * tiles.programs
    out = torch.empty((B, S, Hq, hd), dtype=q.dtype, device=q.device)
    part_lse = torch.empty((programs, 2, tiles.block_m), dtype=torch.float32, device=q.device)
    part_o = torch.empty((*part_lse.shape, tiles.width), dtype=torch.float32, device=q.device)
    lengths = context_len.contiguous()
    sizes = {"B": B, "S": S, "Hkv": Hkv, "M": page_table.shape[1], "programs": programs}
    sizes["window"] = window or 0
    attend, merge = _constexprs(chip, tiles, B, Hq // Hkv, hd, page, causal, window is not None)
    triton_kernels.attend[(programs,)](
        *(q, k_pages, v_pages, page_table.contiguous(), lengths),
        *(block_k, block_v, out, part_o, part_lse, scale * _LOG2_E),
        **sizes,
        n_pages=n_pages,
        **_strides(*(tensor.stride() for tensor in (q, k_pages, v_pages, block_k, block_v))),
        **attend,
        num_warps=tiles.num_warps,
    )
    grid = (triton.cdiv(S * Hq // Hkv, _MERGE_ROWS), Hkv, B)
    triton_kernels.merge_parts[grid](
        *(lengths, out, part_o, part_lse),
        **sizes,
        **merge,
        num_warps=_MERGE_WARPS,
        launch_pdl=chip.overlaps,
    )
    return out


@dataclass(frozen=True)
class Tiles:
    """How `attend` cuts the rows (slot, query head) of a key head, and its keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int  # per multiprocessor
    width: int  # the head's, padded

    def shared(self, item_size: int) -> int:
        """Bytes of shared memory of a program: queries, keys and values in flight, weights; or the output, at last."""
        keys = 2 * self.num_stages * self.block_n * self.width
        working = item_size * (keys + self.block_m * (self.width + self.block_n))
        return max(working, 4 * self.block_m * self.width) + 2048


def choose_tiles(
    chip: Chip, item_size: int, heads: int, rows: int, head_dim: int, page: int, keys: int
) -> Tiles:
    """For that many key heads of all requests, with `rows` rows and at most `keys` keys each: the deepest pipeline that fits.

    Rows up to 64 share a tile. Where no program can have more than two blocks there is no pipeline: less code, which runs
    once, takes less time. Raises `ValueError` where nothing fits.

    With wgmma, tiles have 64 rows, however few are needed. Weights of fewer rows have another swizzle than the keys whose
    shared memory they take, and for two such operands at one address ptxas 12.8 derives some descriptors from a register
    that was never written. Heads narrower than 64 would leave wgmma.
    """
    width = max(64 if chip.has_wgmma and item_size == 2 else 16, triton.next_power_of_2(head_dim))
    if item_size == 4:
        shapes = [(16, 16, 4, 1, 2)]
    elif chip.has_wgmma and width > 128:  # the output takes the registers that a pipeline's addresses need
        shapes = [(64, 64, 8, 1, 1)]
    else:
        block_m, block_n = 64, 32 if page >= 32 else 64
        if not chip.has_wgmma:
            block_m, block_n = max(16, min(32, triton.next_power_of_2(rows))), max(16, min(32, page))
        few = heads * triton.cdiv(rows, block_m) * (triton.cdiv(keys, block_n) + 1) <= 4 * chip.n_sms
        # Deeper pipelines of narrow blocks, or of keys from several pages, spill.
        deepest = 2 if page < block_n else 3 if chip.has_wgmma or block_n == 16 else 4
        depths = [1] if few else range(deepest, 1, -1)
        warps = 4 if width <= 128 else 8
        shapes = [(block_m, block_n, warps, stages, programs) for programs in (2, 1) for stages in depths]
    for shape in shapes:
        tiles = Tiles(*shape, width)
        if tiles.programs * tiles.shared(item_size) <= chip.shared:
            return tiles
    raise ValueError(
        f"draft_attn: no tile of heads {head_dim} wide fits {chip.shared} bytes of shared memory"
    )


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`."""
    chip = Chip(capability, 132)
    return [
        case
        for item, B, S, group, hd, page, causal, window in (
            ("bf16", 8, 8, 8, 128, 64, False, None),
            ("bf16", 9, 7, 3, 256, 16, False, None),
            ("fp16", 1, 1, 4, 64, 16, True, 128),
            ("fp32", 2, 8, 8, 128, 64, False, None),
        )
        for case in _compile_cases(chip, item, B, S, group, hd, page, causal, window)
    ]


def _compile_cases(
    chip: Chip,
    item: str,
    B: int,
    S: int,
    group: int,
    hd: int,
    page: int,
    causal: bool,
    window: int | None,
) -> list[CompileCase]:
    Hkv = 8
    tiles = choose_tiles(chip, 4 if item == "fp32" else 2, B * Hkv, S * group, hd, page, 65 * page + S)
    attend, merge = _constexprs(chip, tiles, B, group, hd, page, causal, window is not None)
    outputs: dict[str, Any] = {"out": f"*{item}", "part_o": "*fp32", "part_lse": "*fp32"}
    sizes = {"B": B, "S": S, "Hkv": Hkv, "M": 65, "programs": chip.n_sms * tiles.programs}
    sizes["window"] = window or 0
    arguments: dict[str, Any] = dict.fromkeys(("q", "k_pages", "v_pages", "block_k", "block_v"), f"*{item}")
    arguments |= {"page_table": "*i32", "context_len": "*i32", **outputs, "scale_log2": "fp32", **sizes}
    kv = (page * Hkv * hd, Hkv * hd, hd)
    row = (group + 2) * Hkv * hd  # of a block's projections
    block = (S * (group + 1) * Hkv * hd, (group + 1) * Hkv * hd, hd), (S * row, row, hd)
    arguments |= {"n_pages": 4099, **_strides(block[0], kv, kv, *block)}
    name = f"{item} {B}x{S} group {group} x {hd} page {page}"
    merged = {"context_len": "*i32", **outputs, **sizes}
    launch = (tiles.num_warps, tiles.num_stages)
    return [
        CompileCase(f"attend {name}", triton_kernels.attend, arguments, attend, *launch),
        CompileCase(f"merge {name}", triton_kernels.merge_parts, merged, merge, _MERGE_WARPS),
    ]


def _strides(q: Any, k: Any, v: Any, block_k: Any, block_v: Any) -> dict[str, int]:
    names = [
        f"{tensor}_{axis}" for tensor, axes in (("q", "bsh"), ("k", "nph"), ("v", "nph")) for axis in axes
    ]
    names += [f"block_{tensor}_{axis}" for tensor in "kv" for axis in "bsh"]
    return dict(zip(names, (*q[:3], *k[:3], *v[:3], *block_k[:3], *block_v[:3]), strict=True))


def _constexprs(
    chip: Chip, tiles: Tiles, B: int, group: int, hd: int, page: int, causal: bool, windowed: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile-time arguments of `attend` and of `merge_parts`."""
    both = {
        "OVERLAP": chip.overlaps,
        "GROUP": group,
        "HD": hd,
        "HD_PAD": tiles.width,
        "PAGE": page,
        "WINDOW": windowed,
    }
    both |= {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "B_PAD": max(2, triton.next_power_of_2(B))}
    return {**both, "CAUSAL": causal, "STAGES": tiles.num_stages}, {
        **both,
        "ROWS": _MERGE_ROWS,
        "PARTS": _MERGE_PARTS,
    }
