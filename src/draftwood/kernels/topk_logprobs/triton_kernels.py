"""The device code of `topk_logprobs`.

The k best of a row lie in the k groups of 16 consecutive tokens with the largest maxima (equal ones: the first), and so
on for groups of groups. So `stream` reads the logits once, leaves these maxima and the softmax sum of each tile, and
`select` walks down: a sort of few keys per level instead of one of the vocabulary.

Noise-coupled rows are streamed with fp32 stand-ins x~ of x = logit / temperature + noise. `select` takes twice as many as asked
for and ranks those by their exact x; if what it left behind could come within the k best after all, it scans every token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.kernels.noise.triton_impl import (
    RATE_ERROR,
    approximate_log,
    approximate_rate,
    gumbel,
    random_bits,
    tile_bits,
)
from draftwood.kernels.triton_ops import largest, packed, packed_index, packed_value

FAN = 16
TILE = 4096
SCAN_TILE = 1024

_FAN = tl.constexpr(FAN)
_SCAN_TILE = tl.constexpr(SCAN_TILE)
_LOG2_E = tl.constexpr(1.4426950408889634)
_NEVER = tl.constexpr(float("-inf"))
_NO_KEY = tl.constexpr(-(2**63))
_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def stream(
    logits,  # [B, D, v]
    temperature,  # [B]
    seed,
    position,  # [B, D]
    fine,  # [B * D, tiles * TILE / 16], maxima of 16 tokens
    coarse,  # [B * D, tiles * TILE / 256]
    maximum,  # [B * D, tiles]
    total,
    offset,  # token of column 0
    D,
    v,
    logits_b,
    logits_d,
    COUPLED: tl.constexpr,
    TILE: tl.constexpr,
):
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b, d = row // D, row % D
    first = offset // 4 * 4 + tile * TILE
    column = first - offset + tl.arange(0, TILE)
    inside = (column >= 0) & (column < v)
    x = tl.load(logits + b * logits_b + d * logits_d + column, mask=inside, other=_NEVER).to(tl.float32)
    if COUPLED:
        t = tl.load(temperature + b)
        if t > 0:
            bits = tile_bits(tl.load(seed + b), tl.load(position + row), first, TILE)
            x = x / t - approximate_log(approximate_rate(bits))
    of_16, of_256, top, sums = _summary(x, TILE)
    if (sums < float("inf")) == 0:  # NaN or an infinity among them
        of_16, of_256, top, sums = _summary(finite(x), TILE)
    tl.store(fine + (row * tiles + tile) * (TILE // _FAN) + tl.arange(0, TILE // _FAN), of_16)
    group = tl.arange(0, TILE // (_FAN * _FAN))
    tl.store(coarse + (row * tiles + tile) * (TILE // (_FAN * _FAN)) + group, of_256)
    tl.store(maximum + row * tiles + tile, top)
    tl.store(total + row * tiles + tile, sums)


@triton.jit
def _summary(x, TILE: tl.constexpr):
    """Maxima of 16, of 256 and of all tokens of a tile, and its softmax sum, which is neither NaN nor inf if x is sound."""
    of_16 = tl.max(tl.reshape(x, [TILE // _FAN, _FAN]), 1)
    of_256 = tl.max(tl.reshape(of_16, [TILE // (_FAN * _FAN), _FAN]), 1)
    top = tl.max(of_256)
    return of_16, of_256, top, tl.sum(tl.exp2((x - shift_of(top)) * _LOG2_E))


@triton.jit
def select(
    logits,
    temperature,
    seed,
    position,
    fine,
    coarse,
    tile_maximum,
    tile_total,
    value,  # [B * D, k]
    ids,
    lp,
    maximum,  # [B * D]
    total,
    offset,
    D,
    v,
    k,
    tiles,
    logits_b,
    logits_d,
    COUPLED: tl.constexpr,
    TILE: tl.constexpr,
    LOG_K: tl.constexpr,
    LOG_COARSE: tl.constexpr,
    LOG_TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b, d = row // D, row % D
    logits += b * logits_b + d * logits_d
    base = offset // 4 * 4  # where the first group starts
    n_coarse, n_fine = tiles * (TILE // (_FAN * _FAN)), tiles * (TILE // _FAN)

    group = tl.arange(0, 1 << LOG_COARSE)
    keys = _keys(
        tl.load(coarse + row * n_coarse + group, mask=group < n_coarse, other=_NEVER), group, group < n_coarse
    )
    group, valid = _members(largest(keys, LOG_COARSE, LOG_K), LOG_K)
    keys = _keys(tl.load(fine + row * n_fine + group, mask=valid, other=_NEVER), group, valid)
    place, valid = _members(largest(keys, LOG_K + 4, LOG_K), LOG_K)
    column = base + place - offset
    valid = valid & (column >= 0) & (column < v)
    x = tl.load(logits + column, mask=valid, other=_NEVER).to(tl.float32)
    rank = tl.arange(0, 1 << LOG_K)
    t, s, p, crowded = 0.0, tl.full([], 0, tl.int64), 0, tl.full([], 0, tl.int1)
    if COUPLED:
        t, s, p = tl.load(temperature + b), tl.load(seed + b), tl.load(position + row)
        if t > 0:
            x = x / t - approximate_log(approximate_rate(random_bits(s, p, base + place)))
        keys = largest(_keys(finite(x), place, valid), LOG_K + 4, LOG_K)
        if t > 0:
            keys, crowded = _by_exact_values(logits, t, s, p, keys, base, offset, v, k, LOG_K)
    else:
        keys = largest(_keys(finite(x), place, valid), LOG_K + 4, LOG_K)

    x = packed_value(keys)
    top = tl.max(tl.where(rank == 0, x, _NEVER))
    tile = tl.arange(0, 1 << LOG_TILES)
    m = tl.load(tile_maximum + row * tiles + tile, mask=tile < tiles, other=_NEVER)
    sums = tl.load(tile_total + row * tiles + tile, mask=tile < tiles, other=0.0)
    sums = tl.where(sums > 0, sums * tl.exp(m - shift_of(top)), 0.0)
    if crowded:
        scan_row(logits, t, s, p, value, ids, lp, maximum, total, row, offset, v, k, COUPLED, _SCAN_TILE)
    else:
        tl.store(maximum + row, top)
        tl.store(total + row, tl.sum(sums))
        kept = rank < k
        tl.store(value + row * k + rank, x, mask=kept)
        tl.store(ids + row * k + rank, base + packed_index(keys), mask=kept)
        tl.store(lp + row * k + rank, log_softmax(x, top, tl.sum(sums)), mask=kept)


@triton.jit
def scan(
    logits,
    temperature,
    seed,
    position,
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
    """The same for f64 logits or large k."""
    row = tl.program_id(0).to(tl.int64)
    b, d = row // D, row % D
    logits += b * logits_b + d * logits_d
    t, s, p = 0.0, tl.full([], 0, tl.int64), 0
    if COUPLED:
        t, s, p = tl.load(temperature + b), tl.load(seed + b), tl.load(position + row)
    scan_row(logits, t, s, p, value, ids, lp, maximum, total, row, offset, v, k, COUPLED, TILE)


@triton.jit
def scan_row(
    logits,
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
            x = _value(logits, t, seed, position, column, offset, v, wide, COUPLED)
            left = (column < v) & ((x < last) | ((x == last) & (column > last_column)))
            peak = tl.max(tl.where(left, x, _NEVER))
            at = tl.min(tl.where(left & (x == peak), column, _LAST))
            better = (peak > best) | (best_column == _LAST)
            best, best_column = tl.where(better, peak, best), tl.where(better, at, best_column)
        if rank == 0:
            top = best
            for start in range(0, v, TILE):
                column = start + tl.arange(0, TILE)
                x = _value(logits, t, seed, position, column, offset, v, wide, COUPLED)
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
def finite(x):
    return tl.where(tl.abs(x) < float("inf"), x, _NEVER)  # NaN compares false


@triton.jit
def shift_of(maximum):
    """The maximum, or 0 where no entry is finite."""
    return tl.where(maximum > _NEVER, maximum, 0.0)


@triton.jit
def log_softmax(x, maximum, total):
    """f32. The largest adds 1 to the total, so that the result is at most 0 however the sum is rounded."""
    wide = x.to(tl.float64) - shift_of(maximum).to(tl.float64)
    return (wide - tl.log(tl.maximum(total.to(tl.float64), 1.0))).to(tl.float32)


@triton.jit
def _keys(x, index, valid):
    return tl.where(valid, packed(x, index), _NO_KEY)


@triton.jit
def _members(keys, LOG_K: tl.constexpr):
    """Indices of the members of the groups that the keys name, and whether there is such a group."""
    index = packed_index(keys)[:, None] * _FAN + tl.arange(0, _FAN)[None, :]
    valid = tl.broadcast_to((keys > _NO_KEY)[:, None], index.shape)
    return tl.reshape(index, [_FAN << LOG_K]), tl.reshape(valid, [_FAN << LOG_K])


@triton.jit
def _by_exact_values(logits, t, seed, position, keys, base, offset, v, k, LOG_K: tl.constexpr):
    """Keys of the same tokens by their exact values, and whether a token without a key could be among the k best."""
    left = packed_value(tl.min(keys))  # NaN if there is no such token
    place = packed_index(keys)
    x = _value(logits, t, seed, position, base + place - offset, offset, v, tl.float32, True)
    keys = largest(_keys(x, place, keys > _NO_KEY), LOG_K, LOG_K)
    least = packed_value(tl.max(tl.where(tl.arange(0, 1 << LOG_K) == k - 1, keys, _NO_KEY)))
    slack = 4 * RATE_ERROR + tl.abs(left) * 4.8e-7  # two units in the last place, twice
    return keys, (left > _NEVER) & (least <= left + slack)


@triton.jit
def _value(logits, t, seed, position, column, offset, v, wide: tl.constexpr, COUPLED: tl.constexpr):
    x = tl.load(logits + column, mask=(column >= 0) & (column < v), other=_NEVER).to(wide)
    if COUPLED:  # noqa: SIM102 - t is known at run time only
        if t > 0:
            noise = gumbel(random_bits(seed, position, offset + column))
            x = (tl.div_rn(x.to(tl.float32), t) + noise).to(wide)
    return finite(x)
