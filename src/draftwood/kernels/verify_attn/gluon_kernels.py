"""The Gluon kernel of verify_attn for Hopper: attention by two warpgroups that a TMA warp feeds.

Warpgroup w owns half w of the value columns, an accumulator of 64 x 256 in registers. Of a pair of blocks it scores block w,
publishes those softmax weights and their reference in shared memory, and adds both blocks' weighted values to its half (the
"seesaw" of FlashMLA: one's softmax runs beside the other's products). The even blocks have one buffer, the odd ones another,
and a block's weights take the place of its rope columns, which nothing reads after its scores.

Both operands of every product come from shared memory: ptxas before CUDA 13.3 can overwrite a register operand of an
asynchronous product too early. Each barrier is an allocation of its own, for the compiler synchronises the warps between
accesses to the same one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from draftwood.kernels.triton_line import LOWEST
from draftwood.kernels.verify_attn.gluon_line import LN_2, SIZES, part_slot, run, segment
from draftwood.kernels.verify_attn.gluon_products import add_values, clear, hide, rescale, scores


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    barriers = ()
    for _ in gl.static_range(COUNT):
        barriers += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)  # type: ignore[assignment]
    return barriers


@gluon.jit
def _produce(lengths, sizes, descs, page_table, n_pages, shared, B_PAD: gl.constexpr, GRAIN: gl.constexpr):
    """The TMA warp: the queries of every tile, then its blocks."""
    _, T, H, M, _ = sizes
    tiles, _, barriers = shared
    queries, left, right, rope = tiles
    q_full, q_free, full, left_free, right_free, _, _ = barriers
    q_desc, kv_desc, tree_desc = descs
    left = left._reinterpret(left.dtype, [8, 64, 64], queries.layout)
    right = right._reinterpret(right.dtype, [8, 64, 64], queries.layout)
    to = (left, right, rope, full, left_free, right_free)
    at, stop, _total = run(lengths, sizes, B_PAD)
    count = 0
    evens = 0
    odds = 0
    while at < stop:
        b, prefix, _n, tile_row, first, last, units, _begin, _whole = segment(at, stop, lengths, sizes, B_PAD)
        table = page_table + b.to(gl.int64) * M
        pages = (prefix + 63) // 64
        page = gl.load(table + first, mask=first < pages, other=0)
        mbarrier.wait(q_free, (count & 1) ^ 1)
        mbarrier.expect(q_full, 9 * 64 * 64 * 2)
        for piece in gl.static_range(9):
            q_at = [b * T * H + tile_row, piece * 64]
            tma.async_copy_global_to_shared(q_desc, q_at, q_full, queries.index(piece))
        for i in range(first, last):
            row = gl.minimum(gl.maximum(page, 0), n_pages - 1) * 64
            page = gl.load(table + i + 1, mask=i + 1 < pages, other=0)
            is_tree = i >= pages
            source = (kv_desc, tree_desc, is_tree, gl.where(is_tree, b * T + (i - pages) * 64, row))
            if (i - first) % 2 == 0:
                _load_block(source, to, 0, (evens & 1) ^ 1, GRAIN)
                evens += 1
            else:
                _load_block(source, to, 1, (odds & 1) ^ 1, GRAIN)
                odds += 1
        count += 1
        at += units


@gluon.jit
def _load_block(source, to, BUFFER: gl.constexpr, phase, GRAIN: gl.constexpr):
    """Load a block in the order in which its scores read it, each half as soon as its warpgroup has freed it."""
    left, right, rope, full, left_free, right_free = to
    FIRST: gl.constexpr = BUFFER * (8 // GRAIN + 1)
    for half in gl.static_range(2):
        if half == BUFFER:
            mbarrier.wait(left_free[BUFFER], phase)
            for j in gl.static_range(4):
                _load(source, j, left.index(BUFFER * 4 + j), full, FIRST, GRAIN)
        else:
            mbarrier.wait(right_free[BUFFER], phase)
            for j in gl.static_range(4):
                _load(source, 4 + j, right.index(BUFFER * 4 + j), full, FIRST, GRAIN)
    _load(source, 8, rope.index(BUFFER), full, FIRST, GRAIN)


@gluon.jit
def _load(source, PIECE: gl.constexpr, to, full, FIRST: gl.constexpr, GRAIN: gl.constexpr):
    """Load 64 columns of a block; GRAIN such pieces share a barrier, but the rope has its own."""
    kv_desc, tree_desc, is_tree, row = source
    barrier = full[FIRST + PIECE // GRAIN]
    if PIECE == 8:
        mbarrier.expect(barrier, 64 * 64 * 2)
    elif PIECE % GRAIN == 0:
        mbarrier.expect(barrier, GRAIN * 64 * 64 * 2)
    tma.async_copy_global_to_shared(kv_desc, [row, PIECE * 64], barrier, to, pred=is_tree == 0)
    tma.async_copy_global_to_shared(tree_desc, [row, PIECE * 64], barrier, to, pred=is_tree)


@gluon.jit
def _weigh(s, top, weight, own_top):
    """Softmax weights of scores against the reference `top`, and the sum so far, whose reference was `own_top`."""
    p = gl.exp2(s - top[:, None])
    return p, weight * gl.exp2(own_top - top) + gl.sum(p, 1)


@gluon.jit
def _reference(top, peak, LAZY: gl.constexpr):
    """What weights refer to, the running maximum; or LAZY, a number that it exceeds by no more than 8."""
    if LAZY:
        return gl.where(peak > top + 8, peak, top)
    return gl.maximum(top, peak)


@gluon.jit
def _publish(shared, BLOCK: gl.constexpr, p, top):
    """Give the other warpgroup a block's weights and their reference."""
    tiles, told, barriers = shared
    told[0].index(BLOCK).store(top)
    tiles[3].index(BLOCK).store(p.to(tiles[3].dtype))
    fence_async_shared()
    mbarrier.arrive(barriers[5][BLOCK], count=1)


@gluon.jit
def _attend(
    lengths,
    sizes,
    tree,
    outputs,
    scale_log2,
    shared,
    W: gl.constexpr,
    B_PAD: gl.constexpr,
    GRAIN: gl.constexpr,
    AHEAD: gl.constexpr,
    LAZY: gl.constexpr,
):
    """Warpgroup W, over the tiles of a run."""
    _, told, barriers = shared
    _, sums = told
    q_full, q_free, _, _, _, _, done = barriers
    RS: gl.constexpr = gl.SliceLayout(1, _score_layout())
    at, stop, total = run(lengths, sizes, B_PAD)
    count = 0
    evens = 0
    odds = 0
    while at < stop:
        b, prefix, n, tile_row, first, last, units, begin, whole = segment(at, stop, lengths, sizes, B_PAD)
        mbarrier.wait(q_full, count & 1)
        tile = (b, prefix, n, tile_row, first, last)
        if W == 0:
            acc, top, weight = _even(tile, sizes, tree, scale_log2, shared, evens, odds, GRAIN, AHEAD, LAZY)
        else:
            acc, top, weight = _odd(tile, sizes, tree, scale_log2, shared, evens, odds, GRAIN, LAZY)
        mbarrier.arrive(q_free, count=1)
        evens += (last - first + 1) // 2
        odds += (last - first) // 2
        mine = (count & 1) * 2  # the other warpgroup may still read the sum of the tile before
        sums.index(mine + W).store(weight)
        mbarrier.arrive(done, count=1)
        mbarrier.wait(done, count & 1)
        weight += sums.index(mine + 1 - W).load(RS)
        part = part_slot(gl.program_id(0), begin, total, sizes[4]) * 64
        _write(outputs, acc, top, weight, b, tile_row, n, sizes, whole, part, W)
        count += 1
        at += units


@gluon.constexpr_function
def _score_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])


@gluon.constexpr_function
def _value_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])


@gluon.jit
def _start(tile, sizes, tree):
    """Per row: reference and sum of nothing; where its words of ancestors begin, as if the tree's blocks began at 0."""
    b, prefix, n, tile_row, _, _ = tile
    _, T, H, _, _ = sizes
    ancestors, words = tree
    RS: gl.constexpr = gl.SliceLayout(1, _score_layout())
    row = tile_row + gl.arange(0, 64, layout=RS)
    slot = gl.minimum(row // H, T - 1)
    bits = ancestors + (b * T + slot).to(gl.int64) * words - (prefix + 63) // 64
    return gl.full([64], LOWEST, gl.float32, RS), gl.zeros([64], gl.float32, RS), bits, row < n * H


@gluon.jit
def _word(bits, live_row, i, tile):
    """Ancestors among the slots of a tree block; all ones of a prefix block."""
    return gl.load(bits + i, mask=(i >= (tile[1] + 63) // 64) & live_row, other=-1)


@gluon.jit
def _even(
    tile,
    sizes,
    tree,
    scale_log2,
    shared,
    evens,
    odds,
    GRAIN: gl.constexpr,
    AHEAD: gl.constexpr,
    LAZY: gl.constexpr,
):
    """Warpgroup 0 over a tile's blocks: its half of the accumulator, the reference, its share of the sum.

    Scores of the next even block are issued behind the last product of a pair, which AHEAD steps of them are not held up by.
    """
    tiles, told, barriers = shared
    _, half, _, rope = tiles
    tops, _ = told
    _, _, _, free, _, ready, _ = barriers
    _, prefix, n, _, first, last = tile
    top, weight, bits, live_row = _start(tile, sizes, tree)
    own_top = top
    acc = gl.zeros([64, 256], gl.float32, _value_layout())
    s = gl.zeros([64, 64], gl.float32, _score_layout())
    s = warpgroup_mma_wait(0, [scores(shared, evens & 1, 0, 0, 9, s, GRAIN)])
    for i in range(first, last, 2):
        word = _word(bits, live_row, i, tile)
        s = hide(s, i, prefix, n, word) * scale_log2
        top_0 = _reference(top, gl.max(s, 1), LAZY)
        p, weight = _weigh(s, top_0, weight, own_top)
        own_top = top_0
        _publish(shared, 0, p, top_0)
        acc = rescale(acc, gl.exp2(top - top_0), LAZY)
        clear(half, 0, i, prefix, n)
        acc = warpgroup_mma_wait(0, [add_values(rope, half, 0, acc)])
        mbarrier.arrive(free[0], count=1)
        evens += 1
        top = top_0
        if i + 1 < last:
            mbarrier.wait(ready[1], odds & 1)
            top = tops.index(1).load(top.type.layout)
            acc = rescale(acc, gl.exp2(top_0 - top), LAZY)
            clear(half, 1, i + 1, prefix, n)
            flying = add_values(rope, half, 1, acc)
            odds += 1
            if i + 2 < last:
                coming = scores(shared, evens & 1, 0, 0, AHEAD, s, GRAIN)
                acc = warpgroup_mma_wait(AHEAD, [flying])
                mbarrier.arrive(free[1], count=1)
                s = warpgroup_mma_wait(0, [scores(shared, evens & 1, 0, AHEAD, 9, coming, GRAIN)])
            else:
                acc = warpgroup_mma_wait(0, [flying])
                mbarrier.arrive(free[1], count=1)
    return acc, top, weight * gl.exp2(own_top - top)


@gluon.jit
def _odd(tile, sizes, tree, scale_log2, shared, evens, odds, GRAIN: gl.constexpr, LAZY: gl.constexpr):
    """Warpgroup 1 over a tile's blocks, as `_even`."""
    tiles, told, barriers = shared
    _, _, half, rope = tiles
    tops, _ = told
    _, _, _, _, free, ready, _ = barriers
    _, prefix, n, _, first, last = tile
    top, weight, bits, live_row = _start(tile, sizes, tree)
    own_top = top
    acc = gl.zeros([64, 256], gl.float32, _value_layout())
    for i in range(first, last - 1, 2):
        word = _word(bits, live_row, i + 1, tile)
        acc = warpgroup_mma_wait(
            0, [acc]
        )  # nothing to wait for, but ptxas then sees that `acc` is there to be rescaled
        s = gl.zeros([64, 64], gl.float32, _score_layout())
        coming = scores(shared, odds & 1, 1, 0, 9, s, GRAIN)
        mbarrier.wait(ready[0], evens & 1)
        top_0 = tops.index(0).load(top.type.layout)
        acc = rescale(acc, gl.exp2(top - top_0), LAZY)
        clear(half, 0, i, prefix, n)
        flying = add_values(rope, half, 0, acc)
        s = hide(warpgroup_mma_wait(1, [coming]), i + 1, prefix, n, word) * scale_log2
        top = _reference(top_0, gl.max(s, 1), LAZY)
        p, weight = _weigh(s, top, weight, own_top)
        own_top = top
        _publish(shared, 1, p, top)
        acc = warpgroup_mma_wait(0, [flying])
        mbarrier.arrive(free[0], count=1)
        acc = rescale(acc, gl.exp2(top_0 - top), LAZY)
        clear(half, 1, i + 1, prefix, n)
        acc = warpgroup_mma_wait(0, [add_values(rope, half, 1, acc)])
        mbarrier.arrive(free[1], count=1)
        evens += 1
        odds += 1
    if (last - first) % 2 != 0:
        mbarrier.wait(ready[0], evens & 1)
        top_0 = tops.index(0).load(top.type.layout)
        acc = rescale(acc, gl.exp2(top - top_0), LAZY)
        clear(half, 0, last - 1, prefix, n)
        acc = warpgroup_mma_wait(0, [add_values(rope, half, 0, acc)])
        mbarrier.arrive(free[0], count=1)
        top = top_0
    return acc, top, weight * gl.exp2(own_top - top)


@gluon.jit
def _write(outputs, acc, top, weight, b, tile_row, n, sizes, whole, part, W: gl.constexpr):
    """A finished tile's half of the output, or of a partial result."""
    o, lse, part_o, part_lse = outputs
    _, T, H, _, _ = sizes
    some = gl.where(weight == 0, 1.0, weight)
    log2_sum = gl.where(weight == 0, -float("inf"), top + gl.log2(some))
    acc = rescale(acc, 1.0 / some, False)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, acc.type.layout))
    col = W * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, acc.type.layout))
    row_of_sum = gl.arange(0, 64, layout=top.type.layout)
    if whole:
        to = b.to(gl.int64) * T * H + tile_row
        live = n * H - tile_row
        mask = (row < live)[:, None]
        gl.store(o + (to + row)[:, None] * 512 + col[None, :], acc.to(o.dtype.element_ty), mask=mask)
        if W == 0:
            gl.store(lse + to + row_of_sum, log2_sum * LN_2, mask=row_of_sum < live)
    else:
        gl.store(part_o + (part + row)[:, None] * 512 + col[None, :], acc)
        if W == 0:
            gl.store(part_lse + part + row_of_sum, log2_sum)


@gluon.jit(do_not_specialize=SIZES)
def attend(
    q_desc,  # [B T H, 576], in pieces of [64, 64]
    kv_desc,  # [n_pages 64, 576]
    tree_desc,  # [B T, 576]
    page_table,  # [B, M]
    prefix_len,
    n_slots,
    ancestors,  # [B, T, words]
    o,  # [B, T, H, 512]
    lse,
    part_o,  # [programs, 2, 64, 512], see `triton_line`
    part_lse,
    scale_log2,
    B,
    T,
    H,
    M,
    programs,
    n_pages,
    words,
    B_PAD: gl.constexpr,  # 1 of one request, else a power of two from 32
    GRAIN: gl.constexpr,
    AHEAD: gl.constexpr,
    LAZY: gl.constexpr,
):
    gdc_launch_dependents()
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = q_desc.dtype
    tiles = (
        gl.allocate_shared_memory(dtype, [9, 64, 64], q_desc.layout),  # queries
        gl.allocate_shared_memory(dtype, [2, 64, 256], q_desc.layout),  # left half of the values
        gl.allocate_shared_memory(dtype, [2, 64, 256], q_desc.layout),  # right half
        gl.allocate_shared_memory(dtype, [2, 64, 64], q_desc.layout),  # rope, then weights
    )
    told = (
        gl.allocate_shared_memory(gl.float32, [2, 64], flat),  # reference of a block's weights
        gl.allocate_shared_memory(gl.float32, [4, 64], flat),  # sums: of two tiles, of two warpgroups
    )
    q_full, q_free, done = _barriers(3)
    full = _barriers(2 * (8 // GRAIN + 1))
    left_free, right_free, ready = _barriers(2), _barriers(2), _barriers(2)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    mbarrier.init(done, count=2)
    for i in gl.static_range(2 * (8 // GRAIN + 1)):
        mbarrier.init(full[i], count=1)
    for i in gl.static_range(2):
        mbarrier.init(left_free[i], count=1)
        mbarrier.init(right_free[i], count=1)
        mbarrier.init(ready[i], count=1)
    fence_async_shared()
    shared = (tiles, told, (q_full, q_free, full, left_free, right_free, ready, done))
    lengths = (prefix_len, n_slots)
    sizes = (B, T, H, M, programs)
    descs = (q_desc, kv_desc, tree_desc)
    tree = (ancestors, words)
    outputs = (o, lse, part_o, part_lse)
    EVEN: gl.constexpr = 0
    ODD: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_attend, (lengths, sizes, tree, outputs, scale_log2, shared, EVEN, B_PAD, GRAIN, AHEAD, LAZY)),
            (_attend, (lengths, sizes, tree, outputs, scale_log2, shared, ODD, B_PAD, GRAIN, AHEAD, LAZY)),
            (_produce, (lengths, sizes, descs, page_table, n_pages, shared, B_PAD, GRAIN)),
        ],
        [4, 1],
        [232, 40],
    )
