"""The work of the Gluon verify_attn on a line (see `triton_line`), in 32-bit arithmetic that starts a short launch quickly.

A tile is 64 rows (slot, head) of one request. Its blocks are 64 keys each, the pages of the prefix, then the tree; a unit of
the line is a pair of them, so that a run takes whole pairs, and only a tile's last one can lack its second block.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LN_2 = tl.constexpr(math.log(2))

SIZES = ["B", "T", "H", "M", "programs", "n_pages", "words"]
"""Arguments of the kernels that no code is specialised for."""


@triton.jit
def blocks_of(prefix, n):
    """Blocks of a tile."""
    return (prefix + 63) // 64 + (n + 63) // 64


@triton.jit
def units_of(prefix, n, H):
    """Units of a tile, and of all tiles of a request."""
    pairs = (blocks_of(prefix, n) + 1) // 2
    return pairs, pairs * ((n * H + 63) // 64)


@triton.jit
def lengths_of(lengths, b, mask, T, M):
    """Prefix and live slots of requests, clamped."""
    prefix_len, n_slots = lengths
    prefix = tl.load(prefix_len + b, mask=mask, other=0)
    n = tl.load(n_slots + b, mask=mask, other=0)
    return tl.minimum(tl.maximum(prefix, 0), M * 64), tl.minimum(tl.maximum(n, 0), T)


@triton.jit
def run_start(program, total, programs):
    """Where a program's run starts; the first ones are longer by one unit where the line does not divide evenly."""
    active = tl.minimum(tl.maximum(total, 1), programs)
    length = total // active
    return tl.minimum(program, active) * length + tl.minimum(program, total - length * active)


@triton.jit
def owner(at, total, programs):
    """The program whose run holds a unit: the inverse of `run_start`."""
    active = tl.minimum(tl.maximum(total, 1), programs)
    length = total // active
    longer = total - length * active
    inside = longer * (length + 1)
    return tl.where(at < inside, at // (length + 1), longer + (at - inside) // tl.maximum(length, 1))


@triton.jit
def part_slot(program, tile_start, total, programs):
    """Index of a program's partial result of the tile that starts at a unit."""
    return (program * 2 + (run_start(program, total, programs) < tile_start)).to(tl.int64)


@gluon.jit
def run(lengths, sizes, B_PAD: gl.constexpr):
    """The run of this program, and the line's length."""
    _, T, H, M, programs = sizes
    if B_PAD == 1:
        prefix, n = lengths_of(lengths, 0, True, T, M)
        _, total = units_of(prefix, n, H)
    else:
        total = gl.sum(_units(lengths, sizes, B_PAD), 0)
    program = gl.program_id(0)
    return run_start(program, total, programs), run_start(program + 1, total, programs), total


@gluon.jit
def segment(at, stop, lengths, sizes, B_PAD: gl.constexpr):
    """What a run that has reached unit `at` does in that unit's tile.

    Request, its prefix and live slots, first row of the tile, blocks [first, last), units to go on by, where the tile
    begins on the line, and whether these are all its blocks.
    """
    _, T, H, M, _ = sizes
    b = 0
    begin = 0
    if B_PAD > 1:
        units = _units(lengths, sizes, B_PAD)
        before = gl.associative_scan(units, 0, _plus) <= at
        b = gl.sum(before.to(gl.int32), 0)
        begin = gl.sum(gl.where(before, units, 0), 0)
    prefix, n = lengths_of(lengths, b, True, T, M)
    pairs, _ = units_of(prefix, n, H)
    tile = (at - begin) // pairs
    start = at - begin - tile * pairs
    end = gl.minimum(pairs, start + stop - at)
    last = gl.minimum(blocks_of(prefix, n), end * 2)
    return b, prefix, n, tile * 64, start * 2, last, end - start, at - start, end - start == pairs


@gluon.jit
def _units(lengths, sizes, B_PAD: gl.constexpr):
    """Units of every request, spread over the lanes of each warp."""
    B, T, H, M, _ = sizes
    row = gl.arange(0, B_PAD, layout=gl.BlockedLayout([B_PAD // 32], [32], [gl.num_warps()], [0]))
    prefix, n = lengths_of(lengths, row, row < B, T, M)
    _, units = units_of(prefix, n, H)
    return units


@gluon.jit
def _plus(a, b):
    return a + b
