"""The device code of `topk_logprobs`.

`stream` reads the logits once and leaves the maxima of groups of consecutive tokens, and the softmax sum of each tile. If k
maxima reach some x, so do k tokens or more. `select` takes such an x from the maxima of twice as many classes of groups,
which it compares each with each; then it lists the groups, their subgroups and the tokens that reach it, about 1.4 k, and ranks
those. A list costs a running sum, a rank a few comparisons: nothing is sorted, and no code is long. Where too
many tokens reach x, the best group hands over its best token k times.

Noise-coupled rows are streamed with fp32 stand-ins x~ of x = logit / temperature + noise, listed with allowance for
their error and ranked by the exact x. If too many are listed, every token is scanned.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.kernels.noise.triton_impl import (
    RATE_ERROR,
    approximate_log,
    approximate_rate,
    block_bits,
    tile_bits,
)
from draftwood.kernels.topk_logprobs.triton_scan import (
    SCAN_TILE,
    factor_of,
    finite,
    log_softmax,
    place_of,
    scan_row,
    shift_of,
    value_of,
    weigh_stored,
    weighted,
)
from draftwood.kernels.triton_ops import packed, packed_index, packed_value
from draftwood.kernels.triton_overlap import await_previous, begin_next

TILE = 4096

_SCAN_TILE = tl.constexpr(SCAN_TILE)
_LOG2_E = tl.constexpr(1.4426950408889634)
_NEVER = tl.constexpr(float("-inf"))
_NO_KEY = tl.constexpr(-(2**63))
_FULL = tl.constexpr(2**63 - 1)
_STEP = tl.constexpr(32)  # keys that all others are compared with at a time


@triton.jit
def stream(
    logits,  # [B, D, v]
    temperature,  # [B], or None
    seed,
    position,  # [B, D], or None
    position_b,
    origin,  # [B], or None
    scale,  # [B, D], or None
    scale_b,
    coarse,  # [B * D, tiles * TILE / COARSE], maxima of groups of COARSE tokens
    fine,  # [B * D, tiles * TILE / FINE], likewise, if these are smaller
    maximum,  # [B * D, tiles]
    total,
    offset,  # token of column 0
    D,
    v,
    logits_b,
    logits_d,
    COUPLED: tl.constexpr,
    TILE: tl.constexpr,
    COARSE: tl.constexpr,
    FINE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin_next(OVERLAP)
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b, d = row // D, row % D
    first = offset // 4 * 4 + tile * TILE
    column = first - offset + tl.arange(0, TILE)
    inside = (column >= 0) & (column < v)
    x = tl.load(logits + b * logits_b + d * logits_d + column, mask=inside, other=_NEVER).to(tl.float32)
    x *= factor_of(scale, scale_b, b, d)
    if COUPLED:
        t = tl.load(temperature + b)
        if t > 0:
            bits = tile_bits(tl.load(seed + b), place_of(position, position_b, origin, b, d), first, TILE)
            x = x / t - approximate_log(approximate_rate(bits))
    of_fine, of_coarse, top, sums = _summary(x, TILE, COARSE, FINE)
    if (sums < float("inf")) == 0:  # NaN or an infinity among them
        of_fine, of_coarse, top, sums = _summary(finite(x), TILE, COARSE, FINE)
    if FINE < COARSE:
        tl.store(fine + (row * tiles + tile) * (TILE // FINE) + tl.arange(0, TILE // FINE), of_fine)
    tl.store(coarse + (row * tiles + tile) * (TILE // COARSE) + tl.arange(0, TILE // COARSE), of_coarse)
    tl.store(maximum + row * tiles + tile, top)
    tl.store(total + row * tiles + tile, sums)


@triton.jit
def _summary(x, TILE: tl.constexpr, COARSE: tl.constexpr, FINE: tl.constexpr):
    """Maxima of groups and of all tokens of a tile, and its softmax sum, which is neither NaN nor inf if x is sound."""
    of_fine = tl.max(tl.reshape(x, [TILE // FINE, FINE]), 1)
    of_coarse = of_fine
    if FINE < COARSE:
        of_coarse = tl.max(tl.reshape(of_fine, [TILE // COARSE, COARSE // FINE]), 1)
    top = tl.max(of_coarse)
    return of_fine, of_coarse, top, tl.sum(tl.exp2((x - shift_of(top)) * _LOG2_E))


@triton.jit
def select(
    logits,
    temperature,
    seed,
    position,
    position_b,
    origin,
    scale,
    scale_b,
    weight,  # [B, D], or None
    weight_b,
    coarse,
    fine,
    tile_maximum,
    tile_total,
    listed,  # [B * D, 2, ROOM] i32, groups; written and read here
    found,  # [B * D, ROOM] i64, keys of tokens; likewise
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
    COARSE: tl.constexpr,
    FINE: tl.constexpr,
    GROUPS: tl.constexpr,
    CLASSES: tl.constexpr,
    ROOM: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    b, d = row // D, row % D
    logits += b * logits_b + d * logits_d
    listed += row * 2 * ROOM
    found += row * ROOM
    base = offset // 4 * 4  # where the first group starts
    groups = tiles * (TILE // COARSE)
    group = tl.max_contiguous(tl.arange(0, GROUPS), 1)  # so that loads and lists have one layout
    peak = tl.load(coarse + row * groups + group, mask=group < groups, other=_NEVER)
    tile = tl.arange(0, TILES)
    tops = tl.load(tile_maximum + row * tiles + tile, mask=tile < tiles, other=_NEVER)
    sums = tl.load(tile_total + row * tiles + tile, mask=tile < tiles, other=0.0)
    t, s, p = 0.0, tl.full([], 0, tl.int64), 0
    if COUPLED:
        t, s, p = tl.load(temperature + b), tl.load(seed + b), place_of(position, position_b, origin, b, d)

    a, w = factor_of(scale, scale_b, b, d), factor_of(weight, weight_b, b, d)
    low = _reached(tl.max(tl.reshape(peak, [GROUPS // CLASSES, CLASSES]), 0), k)
    if t > 0:  # the k-th best and a token that should be listed may both be off
        low -= 4 * RATE_ERROR + tl.abs(low) * 1e-6
    n = tl.full([], 0, tl.int32)
    if (low > _NEVER) | (v <= ROOM):
        n = _append(listed, 0, group, peak >= low, ROOM)
        tl.debug_barrier()
        if FINE < COARSE:
            FAN: tl.constexpr = COARSE // FINE
            n_coarse, n = n, tl.full([], 0, tl.int32)
            fine += row * (tiles * (TILE // FINE))
            for start in range(0, tl.minimum(n_coarse, ROOM), CHUNK):
                member, real = _members(listed, start, n_coarse, CHUNK, FAN)
                x = tl.load(fine + member, mask=real, other=_NEVER)
                n = _append(listed + ROOM, n, member, x >= low, ROOM)
            n = tl.where(n_coarse > ROOM, n_coarse, n)
            listed += ROOM
            tl.debug_barrier()
        n_fine, n = n, tl.full([], 0, tl.int32)
        for start in range(0, tl.minimum(n_fine, ROOM), CHUNK):
            place, real = _members(listed, start, n_fine, CHUNK, FINE)
            column = base + place - offset
            real = real & (column >= 0) & (column < v)
            x = tl.load(logits + column, mask=real, other=_NEVER).to(tl.float32) * a
            if COUPLED:  # noqa: SIM102 - t is known at run time only
                if t > 0:
                    quad, _ = _members(listed, start, n_fine, CHUNK, FINE // 4)
                    bits = block_bits(s, p, base // 4 + quad, CHUNK * FINE)
                    x = x / t - approximate_log(approximate_rate(bits))
            x = finite(x)
            n = _append(found, n, packed(x, place), real & (x >= low), ROOM)
        n = tl.where(n_fine > ROOM, n_fine, n)
        tl.debug_barrier()

    top = tl.max(tops)
    if (n > 0) & (n <= ROOM):
        nth = tl.arange(0, ROOM)
        if COUPLED:  # noqa: SIM102
            if t > 0:
                place = packed_index(tl.load(found + nth, mask=nth < n, other=_NO_KEY))
                x = value_of(logits, a, t, s, p, base + place - offset, offset, v, tl.float32, True)
                tl.debug_barrier()
                tl.store(found + nth, packed(x, place), mask=nth < n)
                tl.debug_barrier()
        keys = tl.load(found + nth, mask=nth < n, other=_NO_KEY)
        rank = _ranks(found, keys, n)
        kept = (rank < k) & (nth < n)
        x = packed_value(keys)
        if t > 0:
            top = packed_value(tl.max(keys))
        all_sums = _softmax_sum(tops, sums, top)
        tl.store(value + row * k + rank, x, mask=kept)
        tl.store(ids + row * k + rank, base + packed_index(keys), mask=kept)
        score = log_softmax(x, top, all_sums)
        if weight is not None:  # noqa: SIM102
            if t > 0:
                score = weighted(score, kept, w)
        tl.store(lp + row * k + rank, score, mask=kept)
        tl.store(maximum + row, top)
        tl.store(total + row, all_sums)
    elif t > 0:
        scan_row(logits, a, t, s, p, value, ids, lp, maximum, total, row, offset, v, k, COUPLED, _SCAN_TILE)
        if weight is not None:
            weigh_stored(lp + row * k, w, k)
    else:
        all_sums = _softmax_sum(tops, sums, top)
        _one_by_one(logits, a, peak, value, ids, lp, row, top, all_sums, base, offset, v, k, COARSE)
        tl.store(maximum + row, top)
        tl.store(total + row, all_sums)


@triton.jit
def _reached(x, k):
    """The largest of x [N] that at least k of them reach; -inf if N < k. No entry is NaN."""
    by = tl.sum((x[:, None] >= x[None, :]).to(tl.int32), 0)
    return tl.max(tl.where(by >= k, x, _NEVER))


@triton.jit
def _append(listed, n, entry, chosen, ROOM: tl.constexpr):
    """Write the chosen entries behind the first n of a list while there is room; returns how many there are then."""
    chosen = chosen.to(tl.int32)
    at = n + tl.cumsum(chosen, 0) - 1
    tl.store(listed + at, entry, mask=(chosen != 0) & (at < ROOM))
    return n + tl.sum(chosen)


@triton.jit
def _members(listed, start, n, CHUNK: tl.constexpr, FAN: tl.constexpr):
    """[CHUNK * FAN] members of groups start..start + CHUNK - 1 of a list of n, and whether there is such a group."""
    i = tl.max_contiguous(tl.arange(0, CHUNK * FAN), 1)
    group = tl.load(listed + start + i // FAN, mask=start + i // FAN < n, other=0)
    return group * FAN + i % FAN, start + i // FAN < n


@triton.jit
def _ranks(found, keys, n):
    """How many of the n keys at `found` are larger than each of keys [ROOM]."""
    larger = tl.zeros([_STEP, keys.shape[0]], tl.int32)
    for start in range(0, n, _STEP):
        nth = start + tl.arange(0, _STEP)
        other = tl.load(found + nth, mask=nth < n, other=_NO_KEY)
        larger += (other[:, None] > keys[None, :]).to(tl.int32)
    return tl.sum(larger, 0)


@triton.jit
def _softmax_sum(tops, sums, top):
    """Of all tiles, relative to the largest of all."""
    return tl.sum(tl.where(sums > 0, sums * tl.exp(tops - shift_of(top)), 0.0))


@triton.jit
def _one_by_one(
    logits, a, peak, value, ids, lp, row, top, total, base, offset, v, k, COARSE: tl.constexpr
):  # fmt: skip
    """The next best of the group with the best maximum, k times."""
    group = tl.arange(0, peak.shape[0])
    start = base - offset + group * COARSE
    keys = tl.where((start + COARSE > 0) & (start < v), packed(peak, group), _NO_KEY)
    last = tl.full([], _FULL, tl.int64)
    for rank in range(k):
        at = packed_index(tl.max(keys))
        place = at * COARSE + tl.arange(0, COARSE)
        column = base + place - offset
        real = (column >= 0) & (column < v)
        own = packed(finite(tl.load(logits + column, mask=real, other=_NEVER).to(tl.float32) * a), place)
        last = tl.max(tl.where(real & (own < last), own, _NO_KEY))
        after = tl.max(tl.where(real & (own < last), own, _NO_KEY))
        rest = packed(packed_value(after), at)
        keys = tl.where(group == at, tl.where(after > _NO_KEY, rest, _NO_KEY), keys)
        x = packed_value(last)
        tl.store(value + row * k + rank, x)
        tl.store(ids + row * k + rank, base + packed_index(last))
        tl.store(lp + row * k + rank, log_softmax(x, top, total))
