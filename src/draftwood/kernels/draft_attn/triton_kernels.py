"""The Triton kernels of draft_attn: split-KV grouped-query attention over a paged context and a block, and the merge.

The queries of a key head's group are the rows of its tiles. Scores are [rows, keys], so that a row's best is found within
a warp. The output is computed transposed, [hd, rows]: so the weights are the B operand, for the reason that verify_attn gives.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.kernels.triton_line import LOWEST, finish, merge, owner, part_slot, run_start
from draftwood.kernels.triton_overlap import await_previous, begin_next


@triton.jit
def _line(
    context_len,
    B,
    S,
    tiles,
    capacity,
    window,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    B_PAD: tl.constexpr,
):
    """Every request's context length, first block in the window, blocks, and where it ends on the line."""
    row = tl.arange(0, B_PAD)
    length = tl.load(context_len + row, mask=row < B, other=0)
    length = tl.minimum(tl.maximum(length, 0), capacity)
    from_block = tl.zeros_like(length)
    if WINDOW:
        from_block = tl.maximum(length - window + 1, 0) // BLOCK_N
    blocks = tl.cdiv(length, BLOCK_N) - from_block + tl.cdiv(S, BLOCK_N)
    blocks = tl.where(row < B, blocks, 0)
    return length, from_block, blocks, tl.cumsum(blocks * tiles, 0)


@triton.jit
def _at(values, b, B_PAD: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, B_PAD) == b, values, 0), 0)


@triton.jit
def _absorb(acc, top, weight, v, s):
    """Online softmax, base 2: one more block of values [keys, hd] and their scores [rows, keys].

    `weight` keeps a sum per place in eight keys: one sum over all keys at the end is cheaper than one per block.
    """
    new_top = tl.maximum(top, tl.max(s, 1))
    decay = tl.exp2(top - new_top)
    p = tl.exp2(s - new_top[:, None])
    weight = weight * decay[:, None] + tl.sum(tl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)
    acc = tl.dot(tl.trans(v), tl.trans(p.to(v.dtype)), acc * decay[None, :], input_precision="ieee")
    return acc, new_top, weight


@triton.jit
def attend(
    q,  # [B, S, Hq, hd]
    k_pages,  # [n_pages, PAGE, Hkv, hd]
    v_pages,
    page_table,  # [B, M]
    context_len,
    block_k,  # [B, S, Hkv, hd]
    block_v,
    out,  # [B, S, Hq, hd]
    part_o,  # see `triton_line`
    part_lse,
    scale_log2,
    B,
    S,
    Hkv,
    M,
    n_pages,
    programs,
    window,
    q_b,
    q_s,
    q_h,
    k_n,
    k_p,
    k_h,
    v_n,
    v_p,
    v_h,
    block_k_b,
    block_k_s,
    block_k_h,
    block_v_b,
    block_v_s,
    block_v_h,
    GROUP: tl.constexpr,
    HD: tl.constexpr,
    HD_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    B_PAD: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_next(OVERLAP)
    program = tl.program_id(0)
    row_tiles = tl.cdiv(S * GROUP, BLOCK_M)
    tiles = Hkv * row_tiles
    line = _line(context_len, B, S, tiles, M * PAGE, window, WINDOW, BLOCK_N, B_PAD)
    total = tl.max(line[3], 0)
    at = run_start(program, total, programs)
    stop = run_start(program + 1, total, programs)
    while at < stop:
        lengths, from_blocks, all_blocks, ends = _line(
            context_len, B, S, tiles, M * PAGE, window, WINDOW, BLOCK_N, B_PAD
        )
        b = tl.sum((ends <= at).to(tl.int32), 0)
        length = _at(lengths, b, B_PAD)
        from_block = _at(from_blocks, b, B_PAD)
        blocks = _at(all_blocks, b, B_PAD)
        offset = at - (_at(ends, b, B_PAD) - blocks * tiles)
        b = b.to(tl.int64)
        tile = offset // blocks
        head = (tile // row_tiles).to(tl.int64)
        row = tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
        live_row = row < S * GROUP
        slot = tl.where(live_row, row // GROUP, 0)
        first = offset % blocks + from_block
        last = tl.minimum(blocks + from_block, first + stop - at)

        col = tl.arange(0, HD_PAD)
        key = tl.arange(0, BLOCK_N)
        inside = (col < HD)[None, :]
        query = q + b * q_b + slot.to(tl.int64) * q_s + (head * GROUP + row % GROUP) * q_h
        query = tl.load(query[:, None] + col[None, :], mask=live_row[:, None] & inside, other=0.0)
        table = page_table + b * M
        k_head = k_pages + head * k_h
        v_head = v_pages + head * v_h
        acc = tl.zeros([HD_PAD, BLOCK_M], tl.float32)
        top = tl.full([BLOCK_M], LOWEST, tl.float32)
        weight = tl.zeros([BLOCK_M, 8], tl.float32)
        k_own = block_k + b * block_k_b + head * block_k_h
        v_own = block_v + b * block_v_b + head * block_v_h
        block_from = tl.cdiv(
            length, BLOCK_N
        )  # the block of queries follows the context's last, partly filled one
        page = tl.load(table + first * BLOCK_N // PAGE, mask=first < block_from, other=0)
        for i in tl.range(first, last, num_stages=STAGES):
            is_own = i >= block_from
            start = tl.where(is_own, i - block_from, i) * BLOCK_N
            index = start + key
            live = index < tl.where(is_own, S, length)
            if PAGE >= BLOCK_N:
                page = tl.minimum(tl.maximum(page, 0), n_pages - 1).to(tl.int64)
                k_at = tl.where(is_own, k_own + start * block_k_s, k_head + page * k_n + start % PAGE * k_p)
                v_at = tl.where(is_own, v_own + start * block_v_s, v_head + page * v_n + start % PAGE * v_p)
                k_at += key * tl.where(is_own, block_k_s, k_p)
                v_at += key * tl.where(is_own, block_v_s, v_p)
                page = tl.load(table + (i + 1) * BLOCK_N // PAGE, mask=i + 1 < block_from, other=0)
            else:
                page_of = tl.load(table + index // PAGE, mask=live & (not is_own), other=0)
                page_of = tl.minimum(tl.maximum(page_of, 0), n_pages - 1).to(tl.int64)
                k_at = k_head + page_of * k_n + index % PAGE * k_p
                v_at = v_head + page_of * v_n + index % PAGE * v_p
                k_at = tl.where(is_own, k_own + index * block_k_s, k_at)
                v_at = tl.where(is_own, v_own + index * block_v_s, v_at)
            k = tl.load(k_at[:, None] + col[None, :], mask=live[:, None] & inside, other=0.0)
            v = tl.load(v_at[:, None] + col[None, :], mask=live[:, None] & inside, other=0.0)
            s = tl.dot(query, tl.trans(k), input_precision="ieee") * scale_log2
            after = (index + tl.where(is_own, length, 0))[None, :] - (length + slot)[:, None]
            seen = live[None, :]
            if CAUSAL:
                seen = seen & (after <= 0)
            if WINDOW:
                seen = seen & (tl.abs(after) < window)
            acc, top, weight = _absorb(acc, top, weight, v, tl.where(seen, s, -float("inf")))

        acc, log2_sum = finish(acc, top, tl.sum(weight, 1))
        if last - first == blocks:
            to = ((b * S + slot) * Hkv + head) * GROUP + row % GROUP
            to = out + to[:, None] * HD + col[None, :]
            tl.store(to, tl.trans(acc).to(out.dtype.element_ty), mask=live_row[:, None] & inside)
        else:
            part = part_slot(program, at - offset % blocks, total, programs)
            part = part * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(part_lse + part, log2_sum)
            tl.store(part_o + part[:, None] * HD_PAD + col[None, :], tl.trans(acc))
        at += last - first


@triton.jit
def merge_parts(
    context_len,
    out,  # [B, S, Hq, hd]
    part_o,
    part_lse,
    B,
    S,
    Hkv,
    M,
    programs,
    window,
    GROUP: tl.constexpr,
    HD: tl.constexpr,
    HD_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    B_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Combine the partial results of ROWS rows of one tile."""
    row_tiles = tl.cdiv(S * GROUP, BLOCK_M)
    tiles = Hkv * row_tiles
    line = _line(context_len, B, S, tiles, M * PAGE, window, WINDOW, BLOCK_N, B_PAD)
    total = tl.max(line[3], 0)
    b = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    blocks = _at(line[2], b, B_PAD)
    tile = head * row_tiles + tl.program_id(0) * ROWS // BLOCK_M
    tile_start = _at(line[3], b, B_PAD) - blocks * (tiles - tile)
    first = owner(tile_start, total, programs)
    last = owner(tile_start + blocks - 1, total, programs)
    await_previous(OVERLAP)
    if first < last:
        merged = merge(
            *(part_o, part_lse, first, last, tile_start, total, programs),
            *(row % BLOCK_M, ROWS, HD_PAD, BLOCK_M, PARTS),
        )
        col = tl.arange(0, HD_PAD)
        to = ((b.to(tl.int64) * S + row // GROUP) * Hkv + head) * GROUP + row % GROUP
        mask = (row < S * GROUP)[:, None] & (col < HD)[None, :]
        tl.store(
            out + to[:, None] * HD + col[None, :], tl.trans(merged[0]).to(out.dtype.element_ty), mask=mask
        )
