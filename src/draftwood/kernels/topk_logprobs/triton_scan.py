"""`topk_logprobs` of one row without lists, for f64 logits, for lists that overflow, and for slices; and what `select` shares with it."""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.kernels.noise.triton_impl import gumbel, random_bits

SCAN_TILE = 1024

_NEVER = tl.constexpr(float("-inf"))
_LAST = tl.constexpr(0x7FFFFFFF)
_STEP = tl.constexpr(32)  # stored entries weighted at a time


@triton.jit
def scan(
    logits,
    temperature,
    seed,
    position,
    position_b,
    origin,
    scale,
    scale_b,
    weight,
    weight_b,
    value,  # [B * D, k]
    ids,
    lp,
    maximum,  # [B * D]
    total,
    offset,
    D,
    v,
    k,
    logits_b,
    logits_d,
    COUPLED: tl.constexpr,
    TILE: tl.constexpr,
):
    """`stream` and `select` for f64 logits."""
    row = tl.program_id(0).to(tl.int64)
    b, d = row // D, row % D
    logits += b * logits_b + d * logits_d
    t, s, p = 0.0, tl.full([], 0, tl.int64), 0
    if COUPLED:
        t, s, p = tl.load(temperature + b), tl.load(seed + b), place_of(position, position_b, origin, b, d)
    a, w = factor_of(scale, scale_b, b, d), factor_of(weight, weight_b, b, d)
    scan_row(logits, a, t, s, p, value, ids, lp, maximum, total, row, offset, v, k, COUPLED, TILE)
    if weight is not None:  # noqa: SIM102
        if t > 0:
            weigh_stored(lp + row * k, w, k)


@triton.jit
def scan_row(
    logits,
    a,
    t,
    seed,
    position,
    value,
    ids,
    lp,
    maximum,
    total,
    row,
    offset,
    v,
    k,
    COUPLED: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row, unhurried: find the next best k times. Values are f64 or f32, as `value` is."""
    wide: tl.constexpr = value.dtype.element_ty
    last, last_column = tl.full([], float("inf"), wide), -1
    top, sums = tl.full([], _NEVER, wide), tl.full([], 0.0, wide)
    for rank in range(k):
        best, best_column = tl.full([], _NEVER, wide), _LAST
        for start in range(0, v, TILE):
            column = start + tl.arange(0, TILE)
            x = value_of(logits, a, t, seed, position, column, offset, v, wide, COUPLED)
            left = (column < v) & ((x < last) | ((x == last) & (column > last_column)))
            peak = tl.max(tl.where(left, x, _NEVER))
            at = tl.min(tl.where(left & (x == peak), column, _LAST))
            better = (peak > best) | (best_column == _LAST)
            best, best_column = tl.where(better, peak, best), tl.where(better, at, best_column)
        if rank == 0:
            top = best
            for start in range(0, v, TILE):
                column = start + tl.arange(0, TILE)
                x = value_of(logits, a, t, seed, position, column, offset, v, wide, COUPLED)
                sums += tl.sum(tl.exp(x - shift_of(top)))
        tl.store(value + row * k + rank, best)
        tl.store(ids + row * k + rank, offset + best_column)
        tl.store(lp + row * k + rank, log_softmax(best, top, sums))
        last, last_column = best, best_column
    tl.store(maximum + row, top)
    tl.store(total + row, sums)


@triton.jit
def combine(
    value,  # [rows, n], of all slices in order
    ids,
    maximum,  # [slices, rows]
    total,
    lp,  # [rows, k]
    out_ids,
    n,
    k,
    slices,
    TILE: tl.constexpr,
):
    """Merge the slices' candidates by finding the next best k times."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    wide = value.dtype.element_ty
    top, s = tl.full([], _NEVER, wide), tl.full([], 0.0, wide)
    for i in range(slices):
        top = tl.maximum(top, tl.load(maximum + i * rows + row))
    for i in range(slices):
        s += tl.load(total + i * rows + row) * tl.exp(tl.load(maximum + i * rows + row) - shift_of(top))
    last, last_place = tl.full([], float("inf"), wide), -1
    for rank in range(k):
        best, best_place = tl.full([], _NEVER, wide), _LAST
        for start in range(0, n, TILE):
            place = start + tl.arange(0, TILE)
            x = tl.load(value + row * n + place, mask=place < n, other=_NEVER)
            left = (place < n) & ((x < last) | ((x == last) & (place > last_place)))
            peak = tl.max(tl.where(left, x, _NEVER))
            at = tl.min(tl.where(left & (x == peak), place, _LAST))
            better = (peak > best) | (best_place == _LAST)
            best, best_place = tl.where(better, peak, best), tl.where(better, at, best_place)
        tl.store(lp + row * k + rank, log_softmax(best, top, s))
        tl.store(out_ids + row * k + rank, tl.load(ids + row * n + best_place))
        last, last_place = best, best_place


@triton.jit
def factor_of(x, x_b, b, d):
    """x[b, d], or 1 where there is none."""
    factor = 1.0
    if x is not None:
        factor = tl.load(x + b * x_b + d)
    return factor


@triton.jit
def place_of(position, position_b, origin, b, d):
    """The position that row d of request b is about."""
    place = tl.load(position + b * position_b + d)
    if origin is not None:
        place += tl.load(origin + b)
    return place


@triton.jit
def weighted(lp, kept, weight):
    """log softmax of weight * lp over the kept entries that are finite; others stay -inf. At most 0, in the order of lp."""
    x = tl.where(kept, lp * weight, _NEVER)
    top = shift_of(tl.max(x))
    return (x - top) - tl.log(tl.maximum(tl.sum(tl.exp(x - top)), 1.0))


@triton.jit
def weigh_stored(lp, weight, k):
    """The same for k entries in memory, the largest first."""
    tl.debug_barrier()
    nth = tl.arange(0, _STEP)
    top = shift_of(tl.load(lp) * weight)
    total = tl.zeros([_STEP], tl.float32)
    for start in range(0, k, _STEP):
        total += tl.exp(tl.load(lp + start + nth, mask=start + nth < k, other=_NEVER) * weight - top)
    shift = top + tl.log(tl.maximum(tl.sum(total), 1.0))
    tl.debug_barrier()
    for start in range(0, k, _STEP):
        inside = start + nth < k
        x = tl.load(lp + start + nth, mask=inside, other=_NEVER) * weight
        tl.store(lp + start + nth, tl.minimum(x - shift, 0.0), mask=inside)


@triton.jit
def finite(x):
    return tl.where(tl.abs(x) < float("inf"), x, _NEVER)  # NaN compares false


@triton.jit
def shift_of(maximum):
    """The maximum, or 0 where no entry is finite."""
    return tl.where(maximum > _NEVER, maximum, 0.0)


@triton.jit
def log_softmax(x, maximum, total):
    """f32. The largest adds 1 to the total, so that the result is at most 0 however the sum is rounded."""
    return ((x - shift_of(maximum)) - tl.log(tl.maximum(total, 1.0))).to(tl.float32)


@triton.jit
def value_of(logits, a, t, seed, position, column, offset, v, wide: tl.constexpr, COUPLED: tl.constexpr):
    x = tl.load(logits + column, mask=(column >= 0) & (column < v), other=_NEVER).to(wide) * a
    if COUPLED:  # noqa: SIM102 - t is known at run time only
        if t > 0:
            noise = gumbel(random_bits(seed, position, offset + column))
            x = (tl.div_rn(x.to(tl.float32), t) + noise).to(wide)
    return finite(x)
