"""How the programs of the Gluon verify_attn finish the tiles that they share, in the same launch.

A program that has a part of a tile writes its result to memory and adds itself to the tile's arrivals. Those whose run ends in
the tile then wait for the others and merge some of its rows each; the last of them to leave sets the count back to zero. All
programs run at once (a grid no larger than the chip), so those waited for have started. Each warpgroup keeps to its half of the columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from draftwood.kernels.triton_line import LOWEST
from draftwood.kernels.verify_attn.gluon_line import LN_2, lengths_of, owner, run_start

LEFT = gl.constexpr(1 << 16)
"""In a count of arrivals, one program that has left."""


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


@gluon.jit
def merge_share(outputs, arrivals, tile, span, sizes, W: gl.constexpr):
    """Wait until a tile's parts are written and merge this program's share of its rows."""
    first, _, parts, mergers = span
    count = arrivals + first * 2 + W
    while (_acquire(count) & (LEFT - 1)) != parts:
        pass
    if parts == 2:
        _merge_rows(outputs, tile, span, sizes, W, 32, 2)
    elif parts <= 4:
        _merge_rows(outputs, tile, span, sizes, W, 16, 4)
    else:
        _merge_rows(outputs, tile, span, sizes, W, 4, 16)
    gl.thread_barrier()
    if gl.atomic_add(count, LEFT, sem="relaxed", scope="gpu") == parts + (mergers - 1) * LEFT:
        gl.store(count, 0)


@gluon.jit
def _acquire(count):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [count], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _merge_rows(outputs, tile, span, sizes, W: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr):
    """Every so many of a tile's groups of ROWS rows; PARTS parts of them are read together."""
    o, lse, part_o, part_lse = outputs
    _, T, H, _ = sizes
    b, n, tile_row = tile
    first, first_part, parts, mergers = span
    BY_ROW: gl.constexpr = gl.SliceLayout(1, _layout())
    inner = gl.arange(0, ROWS, layout=BY_ROW)
    col = W * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, _layout()))
    for group in range(gl.program_id(0) - first, 64 // ROWS, mergers):
        row = group * ROWS + inner
        top = gl.full([ROWS], LOWEST, gl.float32, BY_ROW)
        weight = gl.zeros([ROWS], gl.float32, BY_ROW)
        acc = gl.zeros([ROWS, 256], gl.float32, _layout())
        for start in range(0, parts, PARTS):
            values = ()
            logs = ()
            for j in gl.static_range(PARTS):
                i = start + j
                part = gl.where(i == 0, first_part, (first + i) * 2).to(gl.int64)
                there = (i < parts) & (row >= 0)
                logs += (gl.load(part_lse + part * 128 + W * 64 + row, mask=there, other=-float("inf")),)  # type: ignore[assignment]
                at = part_o + part * 64 * 512 + (row * 512)[:, None] + col[None, :]
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
        alive = tile_row + row < n * H
        to = b.to(gl.int64) * T * H + tile_row + row
        out = (acc * (1.0 / some)[:, None]).to(o.dtype.element_ty)
        gl.store(o + (to * 512)[:, None] + col[None, :], out, mask=alive[:, None])
        if W == 0:
            log2_sum = gl.where(weight == 0, -float("inf"), top + gl.log2(some))
            gl.store(lse + to, log2_sum * LN_2, mask=alive)
