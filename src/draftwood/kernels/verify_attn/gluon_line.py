"""How the work of the Gluon verify_attn is shared among programs, from the lengths on the device.

A tile is 64 rows (slot, head) of one request, and its blocks are 64 keys each: the pages of the prefix, then the tree. The
programs' runs cut the tiles in one of two ways:

* Every program gets (a share of) one tile, of `each` blocks at most: nothing but its partial result to write.
* Equal runs of all blocks of all tiles, end to end (see `triton_line`): where tiles outnumber programs, or do not divide well.

Both are a line of units: shares in the first case, blocks in the second.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LN_2 = tl.constexpr(math.log(2))

SIZES = ["B", "T", "H", "M", "n_pages", "words"]
"""Arguments of the kernels that no code is specialised for."""

# In the time of a block:
MERGE = tl.constexpr(1.7)  # merging at all
PART = tl.constexpr(0.02)  # each partial result


@triton.jit
def lengths_of(lengths, b, mask, T, capacity):
    """Prefix and live slots of requests, clamped."""
    prefix_len, n_slots = lengths
    prefix = tl.load(prefix_len + b, mask=mask, other=0)
    n = tl.load(n_slots + b, mask=mask, other=0)
    return tl.minimum(tl.maximum(prefix, 0), capacity), tl.minimum(tl.maximum(n, 0), T)


@triton.jit
def blocks_of(prefix, n):
    """Blocks of a tile."""
    return (prefix + 63) // 64 + (n + 63) // 64


@triton.jit
def tiles_of(n, H):
    return (n * H + 63) // 64


@triton.jit
def plan_of(blocks, tiles, PROGRAMS: tl.constexpr, ALONE: tl.constexpr):
    """`each`, or 0 for equal runs, and the number of units, from all requests' blocks of a tile and tiles.

    The more programs a tile has, the shorter their shares, but the more there is to merge: the best share is the root of
    PART times all blocks. It must be longer where there are not programs enough; much longer, and equal runs are better.
    Or there is so little to a tile that it is best left whole. ALONE: a single request.
    """
    if ALONE:
        total = blocks * tiles
        all_tiles = tiles
        longest = blocks
    else:
        total = tl.sum(blocks * tiles, 0)
        all_tiles = tl.sum(tiles, 0)
        longest = tl.max(blocks, 0)
    each = tl.maximum(tl.sqrt(PART * total).to(tl.int32), tl.maximum((total + PROGRAMS - 1) // PROGRAMS, 1))
    most = each + each // 4 + 4
    if ALONE:
        shares = tiles * _ceil(blocks, each)
        if shares > PROGRAMS:
            each = _ceil(blocks, tl.maximum(PROGRAMS // tiles, 1))
            shares = tiles * _ceil(blocks, each)
    else:
        shares = tl.sum(tiles * _ceil(blocks, each), 0)
        if shares > PROGRAMS:
            while (shares > PROGRAMS) & (each < most):
                each += tl.maximum(each // 8, 1)
                shares = tl.sum(tiles * _ceil(blocks, each), 0)
            even = _ceil(longest, _ceil(longest, each))  # the shares of the longest tiles made equal
            even_shares = tl.sum(tiles * _ceil(blocks, even), 0)
            each = tl.where(even_shares <= PROGRAMS, even, each)
            shares = tl.where(even_shares <= PROGRAMS, even_shares, shares)
    whole = longest <= each + MERGE + PART * shares
    each = tl.where(whole, tl.maximum(longest, 1), each)
    shares = tl.where(whole, all_tiles, shares)
    own = (shares <= PROGRAMS) & (each <= most)
    return tl.where(own, each, 0), tl.where(own, shares, total)


@triton.jit
def _ceil(x, y):
    return (x + y - 1) // y


@triton.jit
def per_tile(blocks, each):
    """Units of a tile."""
    return tl.where(each > 0, _ceil(blocks, tl.maximum(each, 1)), blocks)


@triton.jit
def run_start(program, each, total, PROGRAMS: tl.constexpr):
    """Where a program's run starts; equal runs are of two blocks at least, and the first ones longer by one if need be."""
    start = tl.minimum(program, total)
    if each == 0:
        active = tl.minimum(tl.maximum((total + 1) // 2, 1), PROGRAMS)
        length = total // active
        start = tl.minimum(program, active) * length + tl.minimum(program, total - length * active)
    return start


@triton.jit
def owner(at, each, total, PROGRAMS: tl.constexpr):
    """The program whose run holds a unit: the inverse of `run_start`."""
    program = at
    if each == 0:
        active = tl.minimum(tl.maximum((total + 1) // 2, 1), PROGRAMS)
        length = total // active
        longer = total - length * active
        inside = longer * (length + 1)
        beyond = longer + (at - inside) // tl.maximum(length, 1)
        program = tl.where(at < inside, at // (length + 1), beyond)
    return program


@triton.jit
def part_slot(program, tile_start, each, total, PROGRAMS: tl.constexpr):
    """Index of a program's partial result of the tile that starts at a unit."""
    return (program * 2 + (run_start(program, each, total, PROGRAMS) < tile_start)).to(tl.int64)


@gluon.jit
def _requests(lengths, sizes, B_PAD: gl.constexpr):
    """Blocks of a tile, and tiles, of every request, spread over the lanes of each warp."""
    B, T, H, capacity = sizes
    row = gl.arange(0, B_PAD, layout=gl.BlockedLayout([B_PAD // 32], [32], [gl.num_warps()], [0]))
    prefix, n = lengths_of(lengths, row, row < B, T, capacity)
    return blocks_of(prefix, n), tiles_of(n, H)


@gluon.jit
def run(lengths, sizes, PROGRAMS: gl.constexpr, B_PAD: gl.constexpr):
    """The run of this program, the plan, and what the segments of a single request share."""
    _, T, H, capacity = sizes
    prefix, n = lengths_of(lengths, 0, True, T, capacity)
    if B_PAD == 1:
        each, total = plan_of(blocks_of(prefix, n), tiles_of(n, H), PROGRAMS, True)
    else:
        blocks, tiles = _requests(lengths, sizes, B_PAD)
        each, total = plan_of(blocks, tiles, PROGRAMS, False)
    program = gl.program_id(0)
    at = run_start(program, each, total, PROGRAMS)
    stop = run_start(program + 1, each, total, PROGRAMS)
    return at, stop, each, total, (prefix, n)


@gluon.jit
def segment(at, stop, each, first_request, lengths, sizes, B_PAD: gl.constexpr):
    """What a run that has reached unit `at` does in that unit's tile.

    Request, its prefix and live slots, first row of the tile, blocks [first, last), units to go on by, where the tile
    begins on the line, how many units it has, and whether these are all its blocks.
    """
    _, T, _, capacity = sizes
    b = 0
    begin = 0
    prefix, n = first_request
    if B_PAD > 1:
        blocks, tiles = _requests(lengths, sizes, B_PAD)
        units = tiles * per_tile(blocks, each)
        before = gl.associative_scan(units, 0, _plus) <= at
        b = gl.sum(before.to(gl.int32), 0)
        begin = gl.sum(gl.where(before, units, 0), 0)
        prefix, n = lengths_of(lengths, b, True, T, capacity)
    blocks = blocks_of(prefix, n)
    units = per_tile(blocks, each)
    tile = (at - begin) // units
    unit = at - begin - tile * units
    first = gl.where(each > 0, unit * each, unit)
    last = gl.minimum(blocks, gl.where(each > 0, first + each, first + stop - at))
    go_on = gl.where(each > 0, 1, last - first)
    return (b, prefix, n, tile * 64, first, last, go_on, at - unit, units, last - first == blocks)


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def look_up(table, i, pages, n_pages, PAGE: gl.constexpr):
    """Rows of the pool where the pages of block `i` begin."""
    rows = ()
    for part in gl.static_range(64 // PAGE):
        at = i * (64 // PAGE) + part
        page = gl.load(table + at, mask=at < pages, other=0)
        rows += (gl.minimum(gl.maximum(page, 0), n_pages - 1) * PAGE,)  # type: ignore[assignment]
    return rows
