"""Split-KV work laid out on a line, in Triton: equal runs for all programs, and partial results merged exactly.

A unit is one block of keys for one tile of rows. A request has (its blocks) x (its tiles) units, all requests' lie end to
end, and `programs` programs take equal runs of the line. A tile that lies in one run is finished there. One that several
runs share leaves a partial result in each: in slot 0 of the program's two if its run starts in the tile, else in slot 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234e38)
"""Where a running maximum starts: finite, so that no difference of two is NaN."""


@triton.jit
def run_start(program, total, programs):
    """floor(program total / programs), where a program's run of a line of `total` units starts; it ends where the next one's starts.

    Up to 1024 programs. In 32 bits, with one division of integers: products would not fit, and a division of 64 bits is a
    hundred instructions in a row.
    """
    active = tl.minimum(tl.maximum(total, 1), programs)
    program = tl.minimum(program, active)
    share = total // active
    return program * share + _quotient(program * (total - share * active), active)


@triton.jit
def _quotient(a, b):
    """a // b for 0 <= a < 2^20 and b <= 1024: a half keeps off integers by more than the division may err."""
    return ((a.to(tl.float32) + 0.5) / b.to(tl.float32)).to(tl.int32)


@triton.jit
def owner(at, total, programs):
    """The program whose run holds a unit: the inverse of `run_start`."""
    active = tl.minimum(tl.maximum(total, 1), programs)
    near = (at.to(tl.float32) * active.to(tl.float32) / tl.maximum(total, 1).to(tl.float32)).to(tl.int32)
    before = run_start(near, total, programs) <= at  # it is this one or a neighbour
    return near - 1 + before.to(tl.int32) + (run_start(near + 1, total, programs) <= at).to(tl.int32)


@triton.jit
def part_slot(program, tile_start, total, programs):
    """Index of a program's partial result of the tile that starts at a unit."""
    return (program * 2 + (run_start(program, total, programs) < tile_start)).to(tl.int64)


@triton.jit
def finish(acc, top, weight):
    """Normalised accumulator [width, rows], and log2 of the sum of exp2 of the scores: 0 and -inf of nothing."""
    some = tl.where(weight == 0, 1.0, weight)
    return acc / some[None, :], tl.where(weight == 0, -float("inf"), top + tl.log2(some))


@triton.jit
def fold(acc, top, weight, value, log2_sum):
    """Partial results value [parts, rows, width] and log2_sum [parts, rows] into acc [rows, width], top and weight [rows]."""
    new_top = tl.maximum(top, tl.max(log2_sum, 0))
    decay = tl.exp2(top - new_top)
    p = tl.exp2(log2_sum - new_top[None, :])
    weight = weight * decay + tl.sum(p, 0)
    acc = acc * decay[:, None] + tl.sum(value * p[:, :, None], 0)
    return acc, new_top, weight


@triton.jit
def merge(
    part_o,  # [programs, 2, BLOCK_M, WIDTH]
    part_lse,  # [programs, 2, BLOCK_M], base 2
    first,
    last,
    tile_start,
    total,
    programs,
    row,  # of the tile, [ROWS]
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,  # that are loaded together
):
    """What programs first..last left of a tile's rows: output [WIDTH, ROWS] and log2-sum [ROWS]."""
    col = tl.arange(0, WIDTH)
    top = tl.full([ROWS], LOWEST, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    first_part = part_slot(first, tile_start, total, programs)  # the others' runs start in the tile
    for start in range(first, last + 1, PARTS):
        program = start + tl.arange(0, PARTS)
        part = (
            tl.where(program == first, first_part, program.to(tl.int64) * 2)[:, None] * BLOCK_M + row[None, :]
        )
        some = (program <= last)[:, None] & (row >= 0)[None, :]
        log2_sum = tl.load(part_lse + part, mask=some, other=-float("inf"))
        value = part_o + part[:, :, None] * WIDTH + col[None, None, :]
        value = tl.load(value, mask=some[:, :, None], other=0.0)
        acc, top, weight = fold(acc, top, weight, value, log2_sum)
    return finish(tl.trans(acc), top, weight)
