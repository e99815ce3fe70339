"""The merge of tiles that several programs of the Gluon verify_attn shared."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from draftwood.kernels.triton_line import LOWEST, fold
from draftwood.kernels.verify_attn.gluon_line import (
    LN_2,
    SIZES,
    blocks_of,
    lengths_of,
    owner,
    part_slot,
    per_tile,
    plan_of,
    tiles_of,
)


@triton.jit(do_not_specialize=SIZES)
def merge_parts(
    prefix_len,
    n_slots,
    o,  # [B, T, H, 512]
    lse,
    part_o,
    part_lse,
    B,
    T,
    H,
    M,
    PAGE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    B_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Combine the partial results of ROWS rows of one tile, and give inert slots their 0 and -inf."""
    gdc_launch_dependents()
    request = tl.arange(0, B_PAD)
    prefix, n = lengths_of((prefix_len, n_slots), request, request < B, T, M * PAGE)
    blocks = blocks_of(prefix, n)
    tiles = tiles_of(n, H)
    if B_PAD == 1:
        each, total = plan_of(tl.sum(blocks, 0), tl.sum(tiles, 0), PROGRAMS, True)
    else:
        each, total = plan_of(blocks, tiles, PROGRAMS, False)
    units = tiles * per_tile(blocks, each)
    begin = tl.sum(tl.where(request < tl.program_id(1), units, 0), 0)
    here = request == tl.program_id(1)
    n = tl.sum(tl.where(here, n, 0), 0)
    units = per_tile(tl.sum(tl.where(here, blocks, 0), 0), each)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    to = tl.program_id(1).to(tl.int64) * T * H + row
    where = o + to[:, None] * 512 + tl.arange(0, 512)[None, :]
    dead = row >= n * H
    inside = row < T * H
    gdc_wait()
    tl.store(lse + to, -float("inf"), mask=dead & inside)
    tl.store(where, tl.zeros([ROWS, 512], o.dtype.element_ty), mask=(dead & inside)[:, None])
    if tl.program_id(0) * ROWS < n * H:
        tile_start = begin + tl.program_id(0) * ROWS // 64 * units
        first = owner(tile_start, each, total, PROGRAMS)
        last = owner(tile_start + units - 1, each, total, PROGRAMS)
        if first < last:
            merged, log2_sum = _merge(
                (part_o, part_lse), first, last, tile_start, each, total, row % 64, PROGRAMS, ROWS
            )
            tl.store(lse + to, log2_sum * LN_2, mask=~dead)
            tl.store(where, merged.to(o.dtype.element_ty), mask=(~dead)[:, None])


@triton.jit
def _merge(parts, first, last, tile_start, each, total, row, PROGRAMS: tl.constexpr, ROWS: tl.constexpr):
    """What programs first..last left of a tile's rows: output [ROWS, 512] and log2-sum [ROWS]."""
    part_o, part_lse = parts
    PARTS: tl.constexpr = 16 // ROWS  # read together
    col = tl.arange(0, 512)
    top = tl.full([ROWS], LOWEST, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, 512], tl.float32)
    for program in range(first, last + 1, PARTS):
        who = program + tl.arange(0, PARTS)
        live = (who <= last)[:, None]
        part = part_slot(who, tile_start, each, total, PROGRAMS)[:, None] * 64 + row[None, :]
        log2_sum = tl.load(part_lse + part, mask=live, other=-float("inf"))
        value = tl.load(
            part_o + part[:, :, None] * 512 + col[None, None, :], mask=live[:, :, None], other=0.0
        )
        acc, top, weight = fold(acc, top, weight, value, log2_sum)
    some = tl.where(weight == 0, 1.0, weight)
    return acc / some[:, None], tl.where(weight == 0, -float("inf"), top + tl.log2(some))
