"""The Gluon kernel of verify_attn for Hopper: attention by two warpgroups that a TMA warp feeds.

Warpgroup w owns half w of the value columns, an accumulator of 64 x 256 in registers. Of a pair of blocks it scores block w,
publishes those softmax weights and their reference in shared memory, and adds both blocks' weighted values to its half (the
"seesaw" of FlashMLA: one's softmax runs beside the other's products; so the odd block's scores take their turn after the even
one's). The even blocks have one buffer, the odd ones another, and a block's weights take the place of its rope columns,
which nothing reads after its scores.

Both operands of every product come from shared memory: ptxas before CUDA 13.3 can overwrite a register operand of an
asynchronous product too early. Each barrier is an allocation of its own, for the compiler synchronises the warps between
accesses to the same one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from draftwood.kernels.triton_line import LOWEST
from draftwood.kernels.verify_attn.gluon_line import LN_2, SIZES, part_slot, segment
from draftwood.kernels.verify_attn.gluon_loads import produce
from draftwood.kernels.verify_attn.gluon_plan import FIELDS, planned_run, planned_segment
from draftwood.kernels.verify_attn.gluon_products import (
    add_values,
    clear,
    exp2_less,
    fetch_masks,
    hide,
    rescale,
    scores,
)
from draftwood.kernels.verify_attn.gluon_share import acquire, bury, deliver, in_lanes_order, merge_share


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    barriers = ()
    for _ in gl.static_range(COUNT):
        barriers += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)  # type: ignore[assignment]
    return barriers


@gluon.jit
def _weigh(s, top, scale_log2):
    """Softmax weights of a block's scores, their sums, and the reference that they are relative to.

    That is `top`, unless the block exceeds it by a factor of more than 2^8 (or nothing has been seen yet): so it changes
    seldom, and what depends on it can be guessed before the maximum is known.
    """
    fresh = top == LOWEST
    base = gl.where(fresh, 0.0, top)
    relative = s * scale_log2 - base[:, None]
    peak = gl.max(relative, 1)
    over = peak > gl.where(fresh, LOWEST, 8.0)
    p = exp2_less(relative, gl.where(over, peak, 0.0))
    return p, gl.sum(p, 1), gl.where(over, base + peak, top)


@gluon.jit
def _publish(shared, BLOCK: gl.constexpr, p, top):
    """Give the other warpgroup a block's weights and their reference."""
    tiles, told, barriers = shared
    tiles[3].index(BLOCK).store(p.to(tiles[3].dtype))
    told[BLOCK].store(top)
    fence_async_shared()
    mbarrier.arrive(barriers[4][BLOCK], count=1)


@gluon.jit
def _attend(
    plans,
    lengths,
    sizes,
    tree,
    outputs,
    arrivals,
    scale_log2,
    shared,
    W: gl.constexpr,
    PROGRAMS: gl.constexpr,
    B_PAD: gl.constexpr,
    GRAIN: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """Warpgroup W, over the tiles of a run."""
    _, told, barriers = shared
    sums = told[2]
    q_free, _, _, _, _, done, _ = barriers
    RS: gl.constexpr = gl.SliceLayout(1, _score_layout())
    at, stop, each, total = planned_run(plans)
    b, prefix, n, tile_row, first, last, go_on, begin, units, whole = planned_segment(plans)
    fetch_masks(tree, b, n, tile_row, sizes)
    gdc_wait()
    launches_at = plans + gl.program_id(0) * FIELDS + 20 + W
    launches = acquire(launches_at)
    bury(outputs, lengths, sizes, W, PROGRAMS)
    count = 0
    evens = 0
    odds = 0
    while at < stop:
        if count > 0:
            b, prefix, n, tile_row, first, last, go_on, begin, units, whole = segment(
                at, stop, each, (prefix, n), lengths, sizes, B_PAD
            )
            fetch_masks(tree, b, n, tile_row, sizes)
        tile = (b, prefix, n, tile_row, first, last)
        if W == 0:
            acc, top, weight = _even(tile, sizes, tree, scale_log2, shared, evens, odds, GRAIN, AHEAD)
        else:
            acc, top, weight = _odd(tile, sizes, tree, scale_log2, shared, evens, odds, GRAIN)
        mbarrier.arrive(q_free, count=1)
        evens += (last - first + 1) // 2
        odds += (last - first) // 2
        mine = (count & 1) * 2  # the other warpgroup may still read the sum of the tile before
        sums.index(mine + W).store(weight)
        mbarrier.arrive(done, count=1)
        mbarrier.wait(done, count & 1)
        weight += sums.index(mine + 1 - W).load(RS)
        part = part_slot(gl.program_id(0), begin, each, total, PROGRAMS)
        _write(outputs, acc, top, weight, b, tile_row, n, sizes, whole, part, W)
        count += 1
        at += go_on
        if not whole:
            span = deliver(arrivals, begin, units, each, total, W, PROGRAMS)
            if at == stop:
                merge_share(outputs, arrivals, (b, n, tile_row), span, sizes, launches, W)
    gl.store(launches_at, launches + 1)


@gluon.constexpr_function
def _score_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])


@gluon.constexpr_function
def _value_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])


@gluon.constexpr_function
def _store_layout():
    """`_value_layout`, but with four columns in a row to a thread, for which two lanes exchange a half of theirs."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64], [0, 128]],
        lane_bases=[[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 256],
    )


@gluon.jit
def _start():
    """Reference, sum and accumulator of nothing."""
    RS: gl.constexpr = gl.SliceLayout(1, _score_layout())
    top = gl.full([64], LOWEST, gl.float32, RS)
    return (top, gl.zeros([64], gl.float32, RS), gl.zeros([64, 256], gl.float32, _value_layout()))


@gluon.jit
def _even(tile, sizes, tree, scale_log2, shared, evens, odds, GRAIN: gl.constexpr, AHEAD: gl.constexpr):
    """Warpgroup 0 over a tile's blocks: its half of the accumulator, the reference, its share of the sum.

    Scores of the next even block are issued behind the last product of a pair, which AHEAD steps of them are not held up by.
    """
    tiles, told, barriers = shared
    _, half, _, rope = tiles
    _, _, free, _, ready, _, turn = barriers
    _, prefix, n, _, first, last = tile
    top, weight, acc = _start()
    s = gl.zeros([64, 64], gl.float32, _score_layout())
    coming = scores(shared, evens & 1, 0, 0, 8 // GRAIN + 1, s, GRAIN)
    mbarrier.arrive(turn, count=1)
    s = warpgroup_mma_wait(0, [coming])
    for i in range(first, last, 2):
        s = hide(s, i, tile, sizes, tree)
        p, mass, top_0 = _weigh(s, top, scale_log2)
        _publish(shared, 0, p, top_0)
        decay = gl.exp2(top - top_0)
        acc = rescale(acc, decay)
        clear(half, 0, i, prefix, n)
        flying = add_values(rope, half, 0, acc)
        weight = weight * decay + mass
        acc = warpgroup_mma_wait(0, [flying])
        mbarrier.arrive(free[0], count=1)
        evens += 1
        top = top_0
        if i + 1 < last:
            mbarrier.wait(ready[1], odds & 1)
            top = told[1].load(top.type.layout)
            decay = gl.exp2(top_0 - top)
            acc = rescale(acc, decay)
            clear(half, 1, i + 1, prefix, n)
            flying = add_values(rope, half, 1, acc)
            weight = weight * decay
            odds += 1
            if i + 2 < last:
                coming = scores(shared, evens & 1, 0, 0, AHEAD, s, GRAIN)
                acc = warpgroup_mma_wait(AHEAD, [flying])
                mbarrier.arrive(free[1], count=1)
                coming = scores(shared, evens & 1, 0, AHEAD, 8 // GRAIN + 1, coming, GRAIN)
                mbarrier.arrive(turn, count=1)
                s = warpgroup_mma_wait(0, [coming])
            else:
                acc = warpgroup_mma_wait(0, [flying])
                mbarrier.arrive(free[1], count=1)
    return acc, top, weight


@gluon.jit
def _odd(tile, sizes, tree, scale_log2, shared, evens, odds, GRAIN: gl.constexpr):
    """Warpgroup 1 over a tile's blocks, as `_even`.

    It takes its turn at scores when those of the even block are issued: then the queries are there, its scores do not
    delay the others, and they fill the time of the other's softmax. It must not wait for what the even block's loads
    arrive at: the left half of the buffer is freed without it, so that barrier may be two phases on before it looks.
    """
    tiles, told, barriers = shared
    _, _, half, rope = tiles
    _, _, _, free, ready, _, turn = barriers
    _, prefix, n, _, first, last = tile
    top, weight, acc = _start()
    for i in range(first, last - 1, 2):
        acc = warpgroup_mma_wait(
            0, [acc]
        )  # nothing to wait for, but ptxas then sees that `acc` is there to be rescaled
        s = gl.zeros([64, 64], gl.float32, _score_layout())
        mbarrier.wait(turn, evens & 1)
        coming = scores(shared, odds & 1, 1, 0, 8 // GRAIN + 1, s, GRAIN)
        mbarrier.wait(ready[0], evens & 1)
        top_0 = told[0].load(top.type.layout)
        decay = gl.exp2(top - top_0)
        acc = rescale(acc, decay)
        clear(half, 0, i, prefix, n)
        flying = add_values(rope, half, 0, acc)
        weight = weight * decay
        s = hide(warpgroup_mma_wait(1, [coming]), i + 1, tile, sizes, tree)
        p, mass, top = _weigh(s, top_0, scale_log2)
        _publish(shared, 1, p, top)
        decay = gl.exp2(top_0 - top)
        weight = weight * decay + mass
        acc = warpgroup_mma_wait(0, [flying])
        mbarrier.arrive(free[0], count=1)
        acc = rescale(acc, decay)
        clear(half, 1, i + 1, prefix, n)
        acc = warpgroup_mma_wait(0, [add_values(rope, half, 1, acc)])
        mbarrier.arrive(free[1], count=1)
        evens += 1
        odds += 1
    if (last - first) % 2 != 0:
        mbarrier.wait(ready[0], evens & 1)
        top_0 = told[0].load(top.type.layout)
        decay = gl.exp2(top - top_0)
        acc = rescale(acc, decay)
        clear(half, 0, last - 1, prefix, n)
        acc = warpgroup_mma_wait(0, [add_values(rope, half, 0, acc)])
        mbarrier.arrive(free[0], count=1)
        weight = weight * decay
        top = top_0
    return acc, top, weight


@gluon.jit
def _write(outputs, acc, top, weight, b, tile_row, n, sizes, whole, slot, W: gl.constexpr):
    """A finished tile's half of the output, or of a partial result."""
    o, lse, part_o, part_lse = outputs
    _, T, H, _ = sizes
    some = gl.where(weight == 0, 1.0, weight)
    log2_sum = gl.where(weight == 0, -float("inf"), top + gl.log2(some))
    acc = acc * gl.convert_layout(1.0 / some, gl.SliceLayout(1, acc.type.layout))[:, None]
    out = acc.to(o.dtype.element_ty)
    line = gl.arange(0, 64, layout=top.type.layout)
    if whole:
        LAYOUT: gl.constexpr = _store_layout()
        by_row = gl.convert_layout(out, LAYOUT)
        to = b.to(gl.int64) * T * H + tile_row
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        col = W * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, LAYOUT))
        alive = (row < n * H - tile_row)[:, None]
        gl.store(o + to * 512 + (row * 512)[:, None] + col[None, :], by_row, mask=alive)
        if W == 0:
            gl.store(lse + to + line, log2_sum * LN_2, mask=line < n * H - tile_row)
    else:
        half = slot.to(gl.int64) * 2 + W
        flat = in_lanes_order(out)
        LANES: gl.constexpr = flat.type.layout
        at = gl.arange(0, 2048, layout=gl.SliceLayout(1, LANES)) * 8
        inner = gl.arange(0, 8, layout=gl.SliceLayout(0, LANES))
        gl.store(part_o + half * 16384 + at[:, None] + inner[None, :], flat)
        gl.store(part_lse + half * 64 + line, log2_sum)


@gluon.jit(do_not_specialize=SIZES)
def attend(
    q_desc,  # [B T H, 576], in pieces of [64, 64]
    kv_desc,  # [n_pages PAGE, 576], in pieces of [PAGE, 64]
    tree_desc,  # [B T, 576]
    page_table,  # [B, M]
    prefix_len,
    n_slots,
    ancestors,  # [B, T, words]
    o,  # [B, T, H, 512]
    lse,
    part_o,  # [programs, 2, 2, 2048, 8], of either warpgroup, see `in_lanes_order`
    part_lse,  # [programs, 2, 2, 64], of either warpgroup
    arrivals,  # [programs, 2], zero
    plans,  # see `gluon_plan`
    scale_log2,
    B,
    T,
    H,
    M,
    n_pages,
    words,
    PAGE: gl.constexpr,
    PROGRAMS: gl.constexpr,
    B_PAD: gl.constexpr,  # 1 of one request, else a power of two from 32
    GRAIN: gl.constexpr,
    AHEAD: gl.constexpr,
):
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = q_desc.dtype
    tiles = (
        (
            gl.allocate_shared_memory(dtype, [8, 64, 64], q_desc.layout),  # queries
            gl.allocate_shared_memory(dtype, [64, 64], q_desc.layout),  # their rope columns
        ),
        gl.allocate_shared_memory(dtype, [2, 64, 256], q_desc.layout),  # left half of the values
        gl.allocate_shared_memory(dtype, [2, 64, 256], q_desc.layout),  # right half
        gl.allocate_shared_memory(dtype, [2, 64, 64], q_desc.layout),  # rope, then weights
    )
    told = (
        gl.allocate_shared_memory(gl.float32, [64], flat),  # reference of an even block's weights
        gl.allocate_shared_memory(gl.float32, [64], flat),  # of an odd block's
        gl.allocate_shared_memory(gl.float32, [4, 64], flat),  # sums: of two tiles, of two warpgroups
    )
    q_free, done, turn = _barriers(3)
    full = _barriers(2 * (8 // GRAIN + 1))
    left_free, right_free, ready = _barriers(2), _barriers(2), _barriers(2)
    mbarrier.init(q_free, count=2)
    mbarrier.init(done, count=2)
    mbarrier.init(turn, count=1)
    for i in gl.static_range(2 * (8 // GRAIN + 1)):
        mbarrier.init(full[i], count=1)
    for i in gl.static_range(2):
        mbarrier.init(left_free[i], count=1)
        mbarrier.init(right_free[i], count=1)
        mbarrier.init(ready[i], count=1)
    fence_async_shared()
    gdc_launch_dependents()
    shared = (tiles, told, (q_free, full, left_free, right_free, ready, done, turn))
    lengths = (prefix_len, n_slots)
    sizes = (B, T, H, M * PAGE)
    descs = (q_desc, kv_desc, tree_desc)
    tree = (ancestors, words)
    outputs = (o, lse, part_o, part_lse)
    EVEN: gl.constexpr = 0
    ODD: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    plans,
                    lengths,
                    sizes,
                    tree,
                    outputs,
                    arrivals,
                    scale_log2,
                    shared,
                    EVEN,
                    PROGRAMS,
                    B_PAD,
                    GRAIN,
                    AHEAD,
                ),
            ),
            (
                _attend,
                (
                    plans,
                    lengths,
                    sizes,
                    tree,
                    outputs,
                    arrivals,
                    scale_log2,
                    shared,
                    ODD,
                    PROGRAMS,
                    B_PAD,
                    GRAIN,
                    AHEAD,
                ),
            ),
            (
                produce,
                (plans, lengths, sizes, descs, page_table, M, n_pages, shared, PAGE, PROGRAMS, B_PAD, GRAIN),
            ),
        ],
        [4, 1],
        [240, 24],
    )
