"""How the programs of the Gluon verify_attn finish the tiles that they share, in the same launch.

A program that has a part of a tile writes its result to memory and adds itself to the tile's arrivals. Those whose run ends in
the tile then wait for the others and merge some of it each. Counts go on from launch to launch of a plan, so none is ever set back. All
programs run at once (a grid no larger than the chip), so those waited for have started. Each warpgroup keeps to its half of the columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from draftwood.kernels.triton_line import LOWEST
from draftwood.kernels.verify_attn.gluon_line import LN_2, lengths_of, owner, run_start


@gluon.constexpr_function
def _layout():
    """Of rows x 256 columns: a warp to a row, 16 bytes to a lane."""
    return gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])


@gluon.jit
def bury(outputs, lengths, sizes, W: gl.constexpr, PROGRAMS: gl.constexpr):
    """Give the rows of slots at or past `n_slots` their 0 and -inf."""
    o, lse, _, _ = outputs
    B, T, H, capacity = sizes
    tiles = (T * H + 63) // 64
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, _layout()))
    col = W * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, _layout()))
    for at in range(gl.program_id(0), B * tiles, PROGRAMS):
        b = at // tiles
        first = (at - b * tiles) * 64
        _prefix, n = lengths_of(lengths, b, True, T, capacity)
        if n * H < gl.minimum(first + 64, T * H):
            dead = (first + row >= n * H) & (first + row < T * H)
            to = b.to(gl.int64) * T * H + first + row
            zero = gl.zeros([64, 256], o.dtype.element_ty, _layout())
            gl.store(o + (to * 512)[:, None] + col[None, :], zero, mask=dead[:, None])
            if W == 0:
                gl.store(lse + to, gl.full([64], -float("inf"), gl.float32, row.type.layout), mask=dead)


@gluon.jit
def deliver(arrivals, begin, units, each, total, W: gl.constexpr, PROGRAMS: gl.constexpr):
    """Say that this program's part of a tile is written.

    Returns the tile's first program, the place of that one's part, the number of parts, and how many programs merge.
    """
    first = owner(begin, each, total, PROGRAMS)
    last = owner(begin + units - 1, each, total, PROGRAMS)
    goes_on = run_start(last + 1, each, total, PROGRAMS) > begin + units
    first_part = first * 2 + (run_start(first, each, total, PROGRAMS) < begin).to(gl.int32)
    gl.thread_barrier()
    gl.atomic_add(arrivals + first * 2 + W, 1, sem="release", scope="gpu")
    return first, first_part, last - first + 1, last - first + 1 - goes_on.to(gl.int32)


@gluon.constexpr_function
def _lanes():
    """What `in_lanes_order` gives, with a thread's eight numbers of a place in a row."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [32, 0], [64, 0], [128, 0], [256, 0]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        warp_bases=[[512, 0], [1024, 0]],
        block_bases=[],
        shape=[2048, 8],
    )


@gluon.jit
def in_lanes_order(half):
    """64 x 256 of a warpgroup's accumulator as [2048, 8], so that a thread stores what it holds as it is, 16 bytes at a time.

    Row 16 w + 8 i + r and column 32 c + 8 d + 2 l + k become place ((((w 2 + i) 8 + c) 8 + r) 4 + l, d 2 + k).
    """
    flat = half.reshape([4, 2, 8, 8, 4, 4, 2]).permute([0, 1, 3, 2, 5, 4, 6]).reshape([2048, 8])
    return gl.convert_layout(flat, _lanes())


@gluon.jit
def merge_share(outputs, arrivals, tile, span, sizes, launches, W: gl.constexpr):
    """Wait until a tile's parts are written and merge this program's share of it.

    The code is kept short, for it runs once and is read from L2.
    """
    first, _, parts, _ = span
    while acquire(arrivals + first * 2 + W) < parts * (launches + 1):
        pass
    if parts <= 4:
        _merge_places(outputs, tile, span, sizes, W, 4, 2)
    else:
        _merge_places(outputs, tile, span, sizes, W, 1, 8)


@gluon.jit
def acquire(count):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [count], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _merge_places(outputs, tile, span, sizes, W: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr):
    """This program's groups of 128 places, GROUPS of them side by side; PARTS parts of them are read together."""
    o, lse, part_o, part_lse = outputs
    _, T, H, _ = sizes
    b, n, tile_row = tile
    first, first_part, parts, mergers = span
    PLACES: gl.constexpr = 128 * GROUPS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0])
    BY_PLACE: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    one = gl.arange(0, PLACES, layout=BY_PLACE)
    inner = gl.arange(0, 8, layout=gl.SliceLayout(0, LAYOUT))
    mine = gl.program_id(0) - first
    for around in range(mine, 16, mergers * GROUPS):
        place = (around + one // 128 * mergers) * 128 + one % 128
        inside = place < 2048
        row = place // 256 * 8 + place // 4 % 8
        top = gl.full([PLACES], LOWEST, gl.float32, BY_PLACE)
        weight = gl.zeros([PLACES], gl.float32, BY_PLACE)
        acc = gl.zeros([PLACES, 8], gl.float32, LAYOUT)
        for start in range(0, parts, PARTS):
            values = ()
            logs = ()
            for j in gl.static_range(PARTS):
                i = start + j
                half = gl.where(i == 0, first_part, (first + i) * 2).to(gl.int64) * 2 + W
                there = inside & (i < parts)
                logs += (gl.load(part_lse + half * 64 + row, mask=there, other=-float("inf")),)  # type: ignore[assignment]
                at = part_o + half * 16384 + (place * 8)[:, None] + inner[None, :]
                values += (gl.load(at, mask=there[:, None], other=0.0),)  # type: ignore[assignment]
            new_top = top
            for j in gl.static_range(PARTS):
                new_top = gl.maximum(new_top, logs[j])
            decay = gl.exp2(top - new_top)
            weight = weight * decay
            acc = acc * decay[:, None]
            for j in gl.static_range(PARTS):
                p = gl.exp2(logs[j] - new_top)
                weight += p
                acc += values[j].to(gl.float32) * p[:, None]
            top = new_top
        some = gl.where(weight == 0, 1.0, weight)
        alive = inside & (tile_row + row < n * H)
        to = b.to(gl.int64) * T * H + tile_row + row
        col = (
            W * 256 + (place // 32 % 8 * 32 + place % 4 * 2)[:, None] + (inner // 2 * 8 + inner % 2)[None, :]
        )
        out = (acc * (1.0 / some)[:, None]).to(o.dtype.element_ty)
        gl.store(o + (to * 512)[:, None] + col, out, mask=alive[:, None])
        if W == 0:
            log2_sum = gl.where(weight == 0, -float("inf"), top + gl.log2(some))
            gl.store(lse + to, log2_sum * LN_2, mask=alive & (place % 4 == 0) & (place // 32 % 8 == 0))
