"""The Triton kernels of verify_attn: split-KV attention over pages and tree, and the merge of the splits.

Rows are (slot, head) pairs, slot-major. Scores are computed transposed, [keys, rows]: so the softmax weights are the B
operand of the second product, which Hopper reads from shared memory (A may come from registers, where ptxas before CUDA
13.3 can overwrite it too early), and few rows need no padding to 64.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from draftwood.kernels.triton_line import LOWEST, finish, merge, owner, part_slot, run_start
from draftwood.kernels.triton_overlap import await_previous, begin_next

LN_2 = tl.constexpr(math.log(2))


@triton.jit
def _line(
    prefix_len, n_slots, B, T, H, capacity, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, B_PAD: tl.constexpr
):
    """Every request's prefix, live slots, blocks per tile, units, and where it ends on the line."""
    row = tl.arange(0, B_PAD)
    prefix = tl.load(prefix_len + row, mask=row < B, other=0)
    n = tl.load(n_slots + row, mask=row < B, other=0)
    prefix = tl.minimum(tl.maximum(prefix, 0), capacity)
    n = tl.minimum(tl.maximum(n, 0), T)
    blocks = tl.cdiv(prefix, BLOCK_N) + tl.cdiv(n, BLOCK_N)
    units = blocks * tl.cdiv(n * H, BLOCK_M)
    return prefix, n, blocks, units, tl.cumsum(units, 0)


@triton.jit
def _locate(
    at,
    prefix_len,
    n_slots,
    B,
    T,
    H,
    capacity,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    B_PAD: tl.constexpr,
):
    """The request at a point of the line: index, prefix, live slots, blocks per tile, and where it begins."""
    prefix, n, blocks, units, end = _line(prefix_len, n_slots, B, T, H, capacity, BLOCK_M, BLOCK_N, B_PAD)
    b = tl.sum((end <= at).to(tl.int32), 0)
    here = tl.arange(0, B_PAD) == b
    return (
        b.to(tl.int64),
        tl.sum(tl.where(here, prefix, 0), 0),
        tl.sum(tl.where(here, n, 0), 0),
        tl.sum(tl.where(here, blocks, 0), 0),
        tl.sum(tl.where(here, end - units, 0), 0),
    )


@triton.jit
def absorb(acc, top, weight, latent, s):
    """Online softmax, base 2: one more block of latents [keys, R] and their transposed scores [keys, rows].

    `weight` keeps a sum per place in the block: one sum over all keys at the end is cheaper than one per block.
    Weights are relative to a power of two, so that rounding them gives the same whichever blocks came before.
    """
    new_top = tl.maximum(top, tl.ceil(tl.max(s, 0)))
    decay = tl.exp2(top - new_top)
    p = tl.exp2(s - new_top[None, :])
    weight = weight * decay[None, :] + p
    acc = tl.dot(tl.trans(latent), p.to(latent.dtype), acc * decay[None, :], input_precision="ieee")
    return acc, new_top, weight


@triton.jit
def attend(
    q,  # [B, T, H, C]
    pages,  # [n_pages, PAGE, C]
    page_table,  # [B, M]
    prefix_len,
    n_slots,
    tree_kv,  # [B, T, C]
    ancestors,  # [B, T, words]
    o,  # [B, T, H, R]
    lse,
    part_o,  # see `triton_line`
    part_lse,
    scale_log2,
    B,
    T,
    H,
    M,
    programs,
    n_pages,
    words,
    q_b,
    q_t,
    q_h,
    pages_n,
    C: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    P_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    B_PAD: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
    FEW: tl.constexpr,  # whether a program has but one or two blocks
):
    begin_next(OVERLAP)
    program = tl.program_id(0)
    capacity = M * PAGE
    line = _line(prefix_len, n_slots, B, T, H, capacity, BLOCK_M, BLOCK_N, B_PAD)
    total = tl.sum(line[3], 0)
    at = run_start(program, total, programs)
    stop = run_start(program + 1, total, programs)
    while at < stop:
        b, prefix, n, blocks, begin = _locate(
            at, prefix_len, n_slots, B, T, H, capacity, BLOCK_M, BLOCK_N, B_PAD
        )
        first = (at - begin) % blocks
        last = tl.minimum(blocks, first + stop - at)
        full = first  # end of the blocks that need no mask; with few blocks all go through the one loop that masks
        if not FEW:
            full = tl.minimum(last, prefix // BLOCK_N)
        row = (at - begin) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        live_row = row < n * H
        slot = tl.where(live_row, row // H, 0)

        col = tl.arange(0, R_PAD)
        rope = tl.arange(0, P_PAD)
        query = (q + b * q_b + slot.to(tl.int64) * q_t + row % H * q_h)[:, None]
        q_latent = tl.load(query + col[None, :], mask=live_row[:, None] & (col < R)[None, :], other=0.0)
        q_rope = tl.load(
            query + R + rope[None, :], mask=live_row[:, None] & (rope < C - R)[None, :], other=0.0
        )

        table = page_table + b * M
        key = tl.arange(0, BLOCK_N)
        acc = tl.zeros([R_PAD, BLOCK_M], tl.float32)
        top = tl.full([BLOCK_M], LOWEST, tl.float32)
        weight = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        # Two conditions below that always hold keep the compiler from bad choices. With the arithmetic in one of its own,
        # the pipeliner issues the next block's loads before it, not after. With the first products in another, the
        # compiler does not see that they feed the last, and lays their warps over keys and rows instead of keys alone.
        page = tl.load(table + first * BLOCK_N // PAGE, mask=first < full, other=0)
        for i in tl.range(first, full, num_stages=STAGES):
            position = i * BLOCK_N
            if PAGE >= BLOCK_N:
                page = tl.minimum(tl.maximum(page, 0), n_pages - 1)
                base = pages + page.to(tl.int64) * pages_n + position % PAGE * C
                keys = base + (key * C)[:, None]
                page = tl.load(table + (position + BLOCK_N) // PAGE, mask=i + 1 < full, other=0)
            else:
                pages_of = tl.load(table + (position + key) // PAGE)
                pages_of = tl.minimum(tl.maximum(pages_of, 0), n_pages - 1)
                base = pages + pages_of.to(tl.int64) * pages_n + (position + key) % PAGE * C
                keys = base[:, None]
            latent = tl.load(keys + col[None, :], mask=(col < R)[None, :], other=0.0)
            key_rope = tl.load(keys + R + rope[None, :], mask=(rope < C - R)[None, :], other=0.0)
            if i >= first:
                s = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                if i < full:
                    s = tl.dot(key_rope, tl.trans(q_rope), input_precision="ieee")
                if i + 1 <= full:
                    s = tl.dot(latent, tl.trans(q_latent), s, input_precision="ieee")
                acc, top, weight = absorb(acc, top, weight, latent, s * scale_log2)

        # The prefix's last, partly filled block and the tree.
        tree = tree_kv + b * T * C
        word_of = slot * words
        bits = ancestors + b * T * words
        tree_from = tl.cdiv(prefix, BLOCK_N)
        for i in tl.range(tl.maximum(first, full), last, num_stages=STAGES):
            is_tree = i >= tree_from
            position = tl.where(is_tree, i - tree_from, i) * BLOCK_N
            live = key < tl.where(is_tree, n, prefix) - position
            if PAGE >= BLOCK_N:
                page_of = tl.load(table + position // PAGE, mask=not is_tree, other=0)
                page_of = tl.minimum(tl.maximum(page_of, 0), n_pages - 1)
                base_m = pages + page_of.to(tl.int64) * pages_n + position % PAGE * C
                base_m = tl.where(is_tree, tree + position * C, base_m) + key * C
            else:
                page_of = tl.load(table + (position + key) // PAGE, mask=live & (not is_tree), other=0)
                page_of = tl.minimum(tl.maximum(page_of, 0), n_pages - 1)
                base_m = pages + page_of.to(tl.int64) * pages_n + (position + key) % PAGE * C
                base_m = tl.where(is_tree, tree + (position + key) * C, base_m)
            mask = live[:, None] & (col < R)[None, :]
            latent_m = tl.load(base_m[:, None] + col[None, :], mask=mask, other=0.0)
            mask = live[:, None] & (rope < C - R)[None, :]
            rope_m = tl.load(base_m[:, None] + R + rope[None, :], mask=mask, other=0.0)
            if i >= first:
                s = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                if i < last:
                    s = tl.dot(rope_m, tl.trans(q_rope), input_precision="ieee")
                if i + 1 <= last:
                    s = tl.dot(latent_m, tl.trans(q_latent), s, input_precision="ieee")
                word = tl.load(bits + word_of + position // 64, mask=is_tree & live_row, other=-1)
                word = word >> (position % 64)
                low = word.to(tl.int32)
                high = (word >> 32).to(tl.int32)
                seen = (tl.where((key < 32)[:, None], low[None, :], high[None, :]) >> (key % 32)[:, None]) & 1
                s = tl.where((seen != 0) & live[:, None], s * scale_log2, -float("inf"))
                acc, top, weight = absorb(acc, top, weight, latent_m, s)

        acc, log2_sum = finish(acc, top, tl.sum(weight, 0))
        out = tl.trans(acc)
        if last - first == blocks:
            to = b * T * H + row
            tl.store(lse + to, log2_sum * LN_2, mask=live_row)
            mask = live_row[:, None] & (col < R)[None, :]
            tl.store(o + to[:, None] * R + col[None, :], out.to(o.dtype.element_ty), mask=mask)
        else:
            to = part_slot(program, at - first, total, programs) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(part_lse + to, log2_sum)
            tl.store(part_o + to[:, None] * R_PAD + col[None, :], out)
        at += last - first


@triton.jit
def merge_parts(
    prefix_len,
    n_slots,
    o,  # [B, T, H, R]
    lse,
    part_o,
    part_lse,
    B,
    T,
    H,
    M,
    programs,
    PAGE: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    B_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Combine the partial results of ROWS rows of one tile, and give inert slots their 0 and -inf."""
    capacity = M * PAGE
    line = _line(prefix_len, n_slots, B, T, H, capacity, BLOCK_M, BLOCK_N, B_PAD)
    total = tl.sum(line[3], 0)
    here = tl.arange(0, B_PAD) == tl.program_id(1)
    n = tl.sum(tl.where(here, line[1], 0), 0)
    blocks = tl.sum(tl.where(here, line[2], 0), 0)
    begin = tl.sum(tl.where(here, line[4] - line[3], 0), 0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, R_PAD)
    to = tl.program_id(1).to(tl.int64) * T * H + row
    where = o + to[:, None] * R + col[None, :]
    inside = (row < T * H)[:, None] & (col < R)[None, :]
    dead = row >= n * H
    tile_start = begin + tl.program_id(0) * ROWS // BLOCK_M * blocks
    first = owner(tile_start, total, programs)
    last = owner(tile_start + blocks - 1, total, programs)
    await_previous(OVERLAP)
    tl.store(lse + to, -float("inf"), mask=dead & (row < T * H))
    tl.store(where, tl.zeros([ROWS, R_PAD], o.dtype.element_ty), mask=dead[:, None] & inside)
    if (tl.program_id(0) * ROWS < n * H) & (first < last):
        merged, log2_sum = merge(
            *(part_o, part_lse, first, last, tile_start, total, programs),
            *(row % BLOCK_M, ROWS, R_PAD, BLOCK_M, PARTS),
        )
        tl.store(lse + to, log2_sum * LN_2, mask=~dead)
        out = tl.trans(merged).to(o.dtype.element_ty)
        tl.store(where, out, mask=(~dead)[:, None] & inside)
