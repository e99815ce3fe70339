"""Steps 5 and 6 of `sample`: the x at which top-k and top-p cut a row, by exact integer sums and no sort.

The tokens above a lower limit of the cut are gathered if they are few, and the cut is found among them by bisection. Else a
bracket (low, high] holds it: the smallest x with less than a target above it, which is a number of tokens for top-k and a
sum of weights for top-p. Sums above 16 thresholds at a time narrow it until few tokens are inside. Where values are
compared as integers these are in the order of the floats.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from draftwood.kernels.sample.triton_scores import scores
from draftwood.kernels.sample.triton_search import list_blocks, listed_tokens, of_blocks
from draftwood.kernels.triton_ops import from_ordered, ordered

_THRESHOLDS = tl.constexpr(16)
_STEP = tl.constexpr(64)  # tokens compared with all thresholds at a time
_CHUNK = tl.constexpr(2)  # blocks gathered at a time
_NEVER = tl.constexpr(float("-inf"))
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_LAST = tl.constexpr(0x7FFFFFFF)
_ALL = tl.constexpr(2**62)  # more tokens than there are


class Bracket(NamedTuple):
    low: Any
    high: Any
    n_low: Any  # i64, tokens above low
    n_high: Any  # i64, tokens above high
    w_high: Any  # i64, their weight


class Gathered(NamedTuple):
    """A row's blocks, and room for CAPACITY of its tokens and for a list of blocks."""

    tops: Any  # the largest x of each block
    n_blocks: Any
    listed: Any
    x: Any
    token: Any


@triton.jit
def find_cut(slot, gathered, k, p, peak, BLOCKS: tl.constexpr, CAPACITY: tl.constexpr):
    """The smallest x that top-k and top-p keep, and the largest id kept among the tokens that have it."""
    low = _below_top_k(of_blocks(gathered.tops, gathered.n_blocks, BLOCKS), k, peak)
    n = _gather(slot, gathered, low, peak, BLOCKS, CAPACITY)
    few = n <= CAPACITY
    zero = tl.full([], 0, tl.int64)
    bracket = Bracket(low, peak, n, zero, zero)
    by_number, all_weight = (k > 0) & (n > k), zero
    if few:
        all_weight = tl.sum(weight_of(_gathered_x(gathered, n, CAPACITY), peak))
    else:
        limits = _first_thresholds(peak)
        number, weight = _sums_above(slot, limits, peak)
        by_number, all_weight = (k > 0) & (tl.max(number) > k), tl.max(weight)
        target = tl.where(by_number, k, mass(p, all_weight))
        wide = Bracket(tl.full([], _NEVER, tl.float32), peak, tl.full([], _ALL, tl.int64), zero, zero)
        bracket = _narrow(wide, limits, number, weight, by_number, target)
    cut = tl.where(low > _NEVER, from_ordered(ordered(low) + 1), _NEVER)
    kept, ties = tl.full([], _ALL, tl.int64), tl.full([], _ALL, tl.int64)
    for by_weight in range(2):  # top-k, then top-p over what that leaves
        counts = by_weight == 0
        if tl.where(counts, by_number, p < 1):
            target = tl.where(counts, k, mass(p, all_weight))
            bracket, ties = _close(slot, bracket, gathered, few, n, peak, counts, target, BLOCKS, CAPACITY)
            at_cut = weight_of(bracket.high, peak)
            unit = tl.where(counts, 1, at_cut)
            stay = (target - tl.where(counts, bracket.n_high, bracket.w_high) + unit - 1) // unit
            kept = tl.where(bracket.high > cut, stay, tl.minimum(kept, stay))
            cut = bracket.high
            all_weight = bracket.w_high + stay * at_cut
            below = from_ordered(tl.where(cut == 0, -2, ordered(cut) - 1))
            bracket = Bracket(below, peak, bracket.n_high + ties, zero, zero)
    last_id = _LAST
    if kept < ties:
        if few:
            x, token = _gathered_x(gathered, n, CAPACITY), tl.load(gathered.token + tl.arange(0, CAPACITY))
            last_id = _nth_id(slot, x == cut, token, kept.to(tl.int32))
        else:
            last_id = _nth_at(slot, cut, kept)
    return cut, last_id


@triton.jit
def weight_of(x, peak):
    """i64 rint(exp(fp64(x - peak)) 2^40)."""
    w = tl.exp((x - peak).to(tl.float64)) * 1099511627776.0
    return ((w + 4503599627370496.0) - 4503599627370496.0).to(tl.int64)  # 2^52: to the nearest, ties to even


@triton.jit
def mass(p, weight):
    """What the weights before a token must stay below for top-p to keep it."""
    return tl.maximum((p.to(tl.float64) * weight.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _below_top_k(top, k, peak):
    """A float with at least k tokens above it, few more if all is well; -inf without top-k.

    k blocks whose largest x is above are enough.
    """
    least = tl.min(tl.where(top > _NEVER, top, peak))
    low, high = tl.full([], _NEVER, tl.float32), peak
    blocks = tl.sum((top > least).to(tl.int32))
    if (k > 0) & (blocks >= k):
        low = least
    middle = 0.5 * low + 0.5 * high
    while (low > _NEVER) & (blocks > k + k // 4 + 8) & (middle > low) & (middle < high):
        above = tl.sum((top > middle).to(tl.int32))
        high = tl.where(above >= k, high, middle)
        low, blocks = tl.where(above >= k, middle, low), tl.where(above >= k, above, blocks)
        middle = 0.5 * low + 0.5 * high
    return low


@triton.jit
def _gather(slot, gathered, low, high, BLOCKS: tl.constexpr, CAPACITY: tl.constexpr):
    """Write the tokens in (low, high] while there is room; returns how many there are, i64."""
    blocks = list_blocks(gathered.listed, of_blocks(gathered.tops, gathered.n_blocks, BLOCKS), low, BLOCKS)
    n = tl.full([], 0, tl.int32)
    for first in range(0, blocks, _CHUNK):
        token = listed_tokens(slot, gathered.listed, blocks, first, _CHUNK)
        x = scores(slot, token)
        inside = ((x > low) & (x <= high)).to(tl.int32)
        place = n + tl.cumsum(inside, 0) - 1
        room = (inside != 0) & (place < CAPACITY)
        tl.store(gathered.x + place, x, mask=room)
        tl.store(gathered.token + place, token, mask=room)
        n += tl.sum(inside)
    tl.debug_barrier()
    return n.to(tl.int64)


@triton.jit
def _gathered_x(gathered, n, CAPACITY: tl.constexpr):
    place = tl.arange(0, CAPACITY)
    return tl.load(gathered.x + place, mask=place < n, other=_NEVER)


@triton.jit
def _close(
    slot, bracket, gathered, few, n, peak, by_number, target, BLOCKS: tl.constexpr, CAPACITY: tl.constexpr
):  # fmt: skip
    """The bracket whose high is the cut, and how many tokens have that x. If `few`, its n tokens are gathered already."""
    low, high, n_low = bracket.low, bracket.high, bracket.n_low
    n_high, w_high = bracket.n_high, bracket.w_high
    ties = n
    if few == 0:
        while (n_low - n_high > CAPACITY) & (_middle(low, high) > low) & (_middle(low, high) < high):
            limits = _thresholds_between(low, high)
            number, weight = _sums_above(slot, limits, peak)
            closer = _narrow(
                Bracket(low, high, n_low, n_high, w_high), limits, number, weight, by_number, target
            )
            low, high, n_low = closer.low, closer.high, closer.n_low
            n_high, w_high = closer.n_high, closer.w_high
        ties = n_low - n_high
        if ties <= CAPACITY:
            _gather(slot, gathered, low, high, BLOCKS, CAPACITY)
    if ties <= CAPACITY:
        x = _gathered_x(gathered, ties, CAPACITY)
        high, ties, n_high, w_high = _bisect(x, peak, by_number, target, low, high, n_high, w_high)
    return Bracket(low, high, n_low, n_high, w_high), ties


@triton.jit
def _bisect(x, peak, by_number, target, low, high, n_high, w_high):
    """The cut, the number of tokens that have this x, and number and weight of those above; x may go below the bracket."""
    weight = weight_of(x, peak)
    measure = tl.where(by_number, 1, weight)
    above_high = tl.where(by_number, n_high, w_high)
    first, last = ordered(low).to(tl.int64), ordered(high).to(tl.int64)
    while last - first > 1:
        middle = (first + last) >> 1
        above = x > from_ordered(middle.to(tl.int32))
        under = above_high + tl.sum(tl.where(above, measure, 0)) < target
        first, last = tl.where(under, first, middle), tl.where(under, middle, last)
    cut = from_ordered(last.to(tl.int32))
    n_high += tl.sum((x > cut).to(tl.int64))
    w_high += tl.sum(tl.where(x > cut, weight, 0))
    return cut, tl.sum((x == cut).to(tl.int64)), n_high, w_high


@triton.jit
def _narrow(bracket, limits, number, weight, by_number, target):
    under = tl.where(by_number, number, weight) < target
    return Bracket(
        tl.maximum(bracket.low, tl.max(tl.where(under, _NEVER, limits))),
        tl.minimum(bracket.high, tl.min(tl.where(under, limits, float("inf")))),
        tl.minimum(bracket.n_low, tl.min(tl.where(under, _ALL, number))),
        tl.maximum(bracket.n_high, tl.max(tl.where(under, number, 0))),
        tl.maximum(bracket.w_high, tl.max(tl.where(under, weight, 0))),
    )


@triton.jit
def _first_thresholds(peak):
    """Dense near the peak, the last below all."""
    j = tl.arange(0, _THRESHOLDS)
    step = (j + 1).to(tl.float32) * 0.0625
    return tl.where(j == _THRESHOLDS - 1, _NEVER, peak - 32.0 * (step * step))


@triton.jit
def _thresholds_between(low, high):
    """Spread evenly; the first halves the number of floats between, so that narrowing ends."""
    j = tl.arange(0, _THRESHOLDS)
    f = (j + 1).to(tl.float32) * 0.0588235294
    return tl.where(j == 0, _middle(low, high), tl.maximum(low, _LOWEST) * (1.0 - f) + high * f)


@triton.jit
def _middle(low, high):
    """With as many floats below as above; not strictly between the two if nothing is."""
    return from_ordered(((ordered(low).to(tl.int64) + ordered(high).to(tl.int64)) >> 1).to(tl.int32))


@triton.jit
def _sums_above(slot, limits, peak):
    """[16] i64 each: number and weight of the tokens whose x is above each limit."""
    number = tl.zeros([_THRESHOLDS, _STEP], tl.int32)
    weight = tl.zeros([_THRESHOLDS, _STEP], tl.int64)
    for first in range(slot.first, slot.end, _STEP):
        x = scores(slot, first + tl.arange(0, _STEP))
        above = x[None, :] > limits[:, None]
        number += above.to(tl.int32)
        weight += tl.where(above, weight_of(x, peak)[None, :], 0)
    return tl.sum(number.to(tl.int64), 1), tl.sum(weight, 1)


@triton.jit
def _nth_id(slot, chosen, token, n):
    """The n-th smallest of the chosen tokens, n counted from 1."""
    before, last = slot.first - 1, slot.end - 1
    while last - before > 1:
        middle = (before + last) // 2
        enough = tl.sum((chosen & (token <= middle)).to(tl.int32)) >= n
        before, last = tl.where(enough, before, middle), tl.where(enough, middle, last)
    return last


@triton.jit
def _nth_at(slot, cut, n):
    """The id of the n-th token whose x is `cut`, n counted from 1."""
    found, first, seen = _LAST, slot.first, tl.full([], 0, tl.int64)
    while (found == _LAST) & (first < slot.end):
        token = first + tl.arange(0, 512)
        x = scores(slot, token)
        nth = seen + tl.cumsum((x == cut).to(tl.int32), 0)
        found = tl.min(tl.where((x == cut) & (nth == n), token, _LAST))
        seen = tl.max(nth)
        first += 512
    return found
