"""What every program of the Gluon verify_attn does first, worked out once for all layers of a pass.

Later tiles of a run are found by the program itself, with the same functions, while it has no one waiting for it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from draftwood.kernels.verify_attn.gluon_line import SIZES, look_up, run, segment

FIELDS = gl.constexpr(32)
"""Integers of a program: its run and the plan (0 to 3), its first segment (4 to 13), rows of the pool of its first block (16
to 19), and how many launches have used the plan, as either warpgroup counts them (20, 21)."""


@gluon.jit(do_not_specialize=SIZES)
def plan(
    prefix_len,
    n_slots,
    page_table,
    plans,  # [programs, FIELDS]
    B,
    T,
    H,
    M,
    n_pages,
    PAGE: gl.constexpr,
    PROGRAMS: gl.constexpr,
    B_PAD: gl.constexpr,
):
    lengths = (prefix_len, n_slots)
    sizes = (B, T, H, M * PAGE)
    to = plans + gl.program_id(0) * FIELDS
    for field in gl.static_range(FIELDS):
        gl.store(to + field, 0)
    at, stop, each, total, alone = run(lengths, sizes, PROGRAMS, B_PAD)
    gl.store(to, at)
    gl.store(to + 1, stop)
    gl.store(to + 2, each)
    gl.store(to + 3, total)
    if at < stop:
        b, prefix, n, tile_row, first, last, go_on, begin, units, whole = segment(
            at, stop, each, alone, lengths, sizes, B_PAD
        )
        gl.store(to + 4, b)
        gl.store(to + 5, prefix)
        gl.store(to + 6, n)
        gl.store(to + 7, tile_row)
        gl.store(to + 8, first)
        gl.store(to + 9, last)
        gl.store(to + 10, go_on)
        gl.store(to + 11, begin)
        gl.store(to + 12, units)
        gl.store(to + 13, whole.to(gl.int32))
        pages = (prefix + PAGE - 1) // PAGE
        rows = look_up(page_table + gl.to_tensor(b).to(gl.int64) * M, first, pages, n_pages, PAGE)
        for part in gl.static_range(64 // PAGE):
            gl.store(to + 16 + part, rows[part])


@gluon.jit
def planned_run(plans):
    """Run, each and total, as `run` gives them."""
    at = plans + gl.program_id(0) * FIELDS
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)


@gluon.jit
def planned_segment(plans):
    """The first segment, as `segment` gives it."""
    at = plans + gl.program_id(0) * FIELDS + 4
    return (
        gl.load(at),
        gl.load(at + 1),
        gl.load(at + 2),
        gl.load(at + 3),
        gl.load(at + 4),
        gl.load(at + 5),
        gl.load(at + 6),
        gl.load(at + 7),
        gl.load(at + 8),
        gl.load(at + 9) != 0,
    )


@gluon.jit
def planned_rows(plans, PAGE: gl.constexpr):
    """Rows of the pool of the first block, as `look_up` gives them."""
    at = plans + gl.program_id(0) * FIELDS + 16
    rows = ()
    for part in gl.static_range(64 // PAGE):
        rows += (gl.load(at + part),)  # type: ignore[assignment]
    return rows
