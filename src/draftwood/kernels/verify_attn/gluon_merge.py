"""The merge of tiles that several programs of the Gluon verify_attn shared."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from draftwood.kernels.triton_line import LOWEST
from draftwood.kernels.verify_attn.gluon_line import LN_2, SIZES, lengths_of, owner, part_slot, units_of


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
    programs,
    B_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Combine the partial results of ROWS rows of one tile, and give inert slots their 0 and -inf."""
    request = tl.arange(0, B_PAD)
    prefix, n = lengths_of((prefix_len, n_slots), request, request < B, T, M)
    pairs, units = units_of(prefix, n, H)
    total = tl.sum(units, 0)
    begin = tl.sum(tl.where(request < tl.program_id(1), units, 0), 0)
    here = request == tl.program_id(1)
    n = tl.sum(tl.where(here, n, 0), 0)
    pairs = tl.sum(tl.where(here, pairs, 0), 0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    to = tl.program_id(1).to(tl.int64) * T * H + row
    where = o + to[:, None] * 512 + tl.arange(0, 512)[None, :]
    dead = row >= n * H
    inside = row < T * H
    gdc_wait()
    tl.store(lse + to, -float("inf"), mask=dead & inside)
    tl.store(where, tl.zeros([ROWS, 512], o.dtype.element_ty), mask=(dead & inside)[:, None])
    if tl.program_id(0) * ROWS < n * H:
        tile_start = begin + tl.program_id(0) * ROWS // 64 * pairs
        first = owner(tile_start, total, programs)
        last = owner(tile_start + pairs - 1, total, programs)
        if first < last:
            merged, log2_sum = _merge(
                (part_o, part_lse), first, last, tile_start, total, programs, row % 64, ROWS
            )
            tl.store(lse + to, log2_sum * LN_2, mask=~dead)
            tl.store(where, merged.to(o.dtype.element_ty), mask=(~dead)[:, None])


@triton.jit
def _merge(parts, first, last, tile_start, total, programs, row, ROWS: tl.constexpr):
    """What programs first..last left of a tile's rows: output [ROWS, 512] and log2-sum [ROWS]."""
    part_o, part_lse = parts
    PARTS: tl.constexpr = 16 // ROWS  # read together
    col = tl.arange(0, 512)
    top = tl.full([ROWS], LOWEST, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, 512], tl.float32)
    for program in range(first, last + 1, PARTS):
        each = program + tl.arange(0, PARTS)
        live = (each <= last)[:, None]
        part = part_slot(each, tile_start, total, programs)[:, None] * 64 + row[None, :]
        log2_sum = tl.load(part_lse + part, mask=live, other=-float("inf"))
        value = tl.load(
            part_o + part[:, :, None] * 512 + col[None, None, :], mask=live[:, :, None], other=0.0
        )
        new_top = tl.maximum(top, tl.max(log2_sum, 0))
        decay = tl.exp2(top - new_top)
        p = tl.exp2(log2_sum - new_top[None, :])
        weight = weight * decay + tl.sum(p, 0)
        acc = acc * decay[:, None] + tl.sum(value * p[:, :, None], 0)
        top = new_top
    some = tl.where(weight == 0, 1.0, weight)
    return acc / some[:, None], tl.where(weight == 0, -float("inf"), top + tl.log2(some))
