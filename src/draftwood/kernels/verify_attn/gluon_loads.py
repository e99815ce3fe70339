"""The TMA warp of the Gluon verify_attn: it loads the queries and blocks of a program's tiles into shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from draftwood.kernels.verify_attn.gluon_line import look_up, segment
from draftwood.kernels.verify_attn.gluon_plan import planned_rows, planned_run, planned_segment


@gluon.jit
def produce(
    plans,
    lengths,
    sizes,
    descs,
    page_table,
    M,
    n_pages,
    shared,
    PAGE: gl.constexpr,
    PROGRAMS: gl.constexpr,
    B_PAD: gl.constexpr,
    GRAIN: gl.constexpr,
):
    """The TMA warp: the queries of every tile, then its blocks."""
    _, T, H, _ = sizes
    tiles, _, barriers = shared
    queries, left, right, rope = tiles
    q_free, full, left_free, right_free, _, _, _ = barriers
    q_desc, kv_desc, tree_desc = descs
    left = left._reinterpret(left.dtype, [8, 64, 64], rope.layout)
    right = right._reinterpret(right.dtype, [8, 64, 64], rope.layout)
    to = (left, right, rope, full, left_free, right_free)
    at, stop, each, _total = planned_run(plans)
    b, prefix, n, tile_row, first, last, go_on, _begin, _units, _whole = planned_segment(plans)
    rows = planned_rows(plans, PAGE)
    gdc_wait()
    count = 0
    evens = 0
    odds = 0
    while at < stop:
        if count > 0:
            b, prefix, n, tile_row, first, last, go_on, _begin, _units, _whole = segment(
                at, stop, each, (prefix, n), lengths, sizes, B_PAD
            )
        table = page_table + b.to(gl.int64) * M
        tree_from = (prefix + 63) // 64
        pages = (prefix + PAGE - 1) // PAGE
        if count > 0:
            rows = look_up(table, first, pages, n_pages, PAGE)
        mbarrier.wait(q_free, (count & 1) ^ 1)
        mbarrier.wait(left_free[0], (evens & 1) ^ 1)
        asked = (q_desc, b * T * H + tile_row, queries)
        for piece in gl.static_range(4):  # while the page is looked up
            _ask(asked, piece, full, GRAIN)
        for i in range(first, last):
            here = rows
            rows = look_up(table, i + 1, pages, n_pages, PAGE)
            tree_row = (b * T + (i - tree_from) * 64,)
            if i == first:
                if i < tree_from:
                    _load_block(kv_desc, here, asked, to, 0, (evens & 1) ^ 1, GRAIN, True)
                else:
                    _load_block(tree_desc, tree_row, asked, to, 0, (evens & 1) ^ 1, GRAIN, True)
                evens += 1
            elif (i - first) % 2 == 0:
                if i < tree_from:
                    _load_block(kv_desc, here, 0, to, 0, (evens & 1) ^ 1, GRAIN, False)
                else:
                    _load_block(tree_desc, tree_row, 0, to, 0, (evens & 1) ^ 1, GRAIN, False)
                evens += 1
            else:
                if i < tree_from:
                    _load_block(kv_desc, here, 0, to, 1, (odds & 1) ^ 1, GRAIN, False)
                else:
                    _load_block(tree_desc, tree_row, 0, to, 1, (odds & 1) ^ 1, GRAIN, False)
                odds += 1
        count += 1
        at += go_on


@gluon.jit
def _load_block(
    desc, rows, asked, to, BUFFER: gl.constexpr, phase, GRAIN: gl.constexpr, QUERIES: gl.constexpr
):
    """Load a block in the order in which its scores read it, each half as soon as its warpgroup has freed it.

    QUERIES: with the tile's queries, each piece on the barrier of the block's; `_ask` has begun.
    """
    left, right, rope, full, left_free, right_free = to
    FIRST: gl.constexpr = BUFFER * (8 // GRAIN + 1)
    for half in gl.static_range(2):
        if half == BUFFER:
            if not QUERIES:
                mbarrier.wait(left_free[BUFFER], phase)
            for j in gl.static_range(4):
                _load(desc, rows, asked, j, left.index(BUFFER * 4 + j), full, FIRST, GRAIN, QUERIES)
        else:
            mbarrier.wait(right_free[BUFFER], phase)
            for j in gl.static_range(4):
                _load(desc, rows, asked, 4 + j, right.index(BUFFER * 4 + j), full, FIRST, GRAIN, QUERIES)
    _load(desc, rows, asked, 8, rope.index(BUFFER), full, FIRST, GRAIN, QUERIES)


@gluon.jit
def _load(
    desc,
    rows,
    asked,
    PIECE: gl.constexpr,
    to,
    full,
    FIRST: gl.constexpr,
    GRAIN: gl.constexpr,
    QUERIES: gl.constexpr,
):
    """Load 64 columns; GRAIN such pieces share a barrier, but the rope has its own."""
    barrier = full[FIRST + PIECE // GRAIN]
    if not QUERIES:
        _expect(barrier, PIECE, 1, GRAIN)
    ROWS: gl.constexpr = desc.block_shape[0]
    for part in gl.static_range(64 // ROWS):
        place = to if ROWS == 64 else to.slice(part * ROWS, ROWS, 0)
        tma.async_copy_global_to_shared(desc, [rows[part], PIECE * 64], barrier, place)
    if QUERIES and PIECE < 5:
        _ask(asked, PIECE + 4, full, GRAIN)


@gluon.jit
def _ask(asked, PIECE: gl.constexpr, full, GRAIN: gl.constexpr):
    """Load 64 columns of the queries, on the barrier of the same columns of buffer 0."""
    q_desc, q_row, queries = asked
    _expect(full[PIECE // GRAIN], PIECE, 2, GRAIN)
    to = queries[0].index(PIECE) if PIECE < 8 else queries[1]
    tma.async_copy_global_to_shared(q_desc, [q_row, PIECE * 64], full[PIECE // GRAIN], to)


@gluon.jit
def _expect(barrier, PIECE: gl.constexpr, SOURCES: gl.constexpr, GRAIN: gl.constexpr):
    if PIECE == 8:
        mbarrier.expect(barrier, SOURCES * 64 * 64 * 2)
    elif PIECE % GRAIN == 0:
        mbarrier.expect(barrier, SOURCES * GRAIN * 64 * 64 * 2)
