"""Steps 5 and 6 of `sample`: the x at which top-k and top-p cut a row, by exact integer sums and no sort.

A bracket (low, high] holds the cut: the smallest x with less than a target above it, which is a number of tokens for
top-k and a sum of weights for top-p. Sums above 16 thresholds at a time narrow it until few tokens are inside; those are
gathered and the cut is found among them. Where values are compared as integers these are in the order of the floats.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from draftwood.kernels.sample.triton_scores import scores
from draftwood.kernels.triton_ops import from_ordered, ordered

THRESHOLDS = 16

_THRESHOLDS = tl.constexpr(THRESHOLDS)
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


@triton.jit
def open_bracket(peak, limits, number, weight, k, p):
    """Of the first pass: the bracket, the target, whether that is a number of tokens, and whether there is a cut at all."""
    by_number = (k > 0) & (tl.max(number) > k)
    target = tl.where(by_number, k, mass(p, tl.max(weight)))
    zero = tl.full([], 0, tl.int64)
    bracket = Bracket(tl.full([], _NEVER, tl.float32), peak, tl.full([], _ALL, tl.int64), zero, zero)
    return narrow(bracket, limits, number, weight, by_number, target), target, by_number, by_number | (p < 1)


@triton.jit
def narrow(bracket, limits, number, weight, by_number, target):
    under = tl.where(by_number, number, weight) < target
    return Bracket(
        tl.maximum(bracket.low, tl.max(tl.where(under, _NEVER, limits))),
        tl.minimum(bracket.high, tl.min(tl.where(under, limits, float("inf")))),
        tl.minimum(bracket.n_low, tl.min(tl.where(under, _ALL, number))),
        tl.maximum(bracket.n_high, tl.max(tl.where(under, number, 0))),
        tl.maximum(bracket.w_high, tl.max(tl.where(under, weight, 0))),
    )


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
def first_thresholds(peak):
    """Dense near the peak, the last below all."""
    j = tl.arange(0, _THRESHOLDS)
    step = (j + 1).to(tl.float32) * 0.0625
    return tl.where(j == _THRESHOLDS - 1, _NEVER, peak - 32.0 * (step * step))


@triton.jit
def thresholds_between(low, high):
    """Spread evenly; the first halves the number of floats between, so that narrowing ends."""
    j = tl.arange(0, _THRESHOLDS)
    f = (j + 1).to(tl.float32) * 0.0588235294
    return tl.where(j == 0, _middle(low, high), tl.maximum(low, _LOWEST) * (1.0 - f) + high * f)


@triton.jit
def _middle(low, high):
    """With as many floats below as above; not strictly between the two if nothing is."""
    return from_ordered(((ordered(low).to(tl.int64) + ordered(high).to(tl.int64)) >> 1).to(tl.int32))


@triton.jit
def sums_above(slot, limits, peak, start, end, STEP: tl.constexpr):
    """[16] i64 each: number and weight of the tokens in start..end - 1 whose x is above each limit."""
    number = tl.zeros([_THRESHOLDS, STEP], tl.int32)
    weight = tl.zeros([_THRESHOLDS, STEP], tl.int64)
    for first in range(start, end, STEP):
        x = scores(slot, first + tl.arange(0, STEP))
        above = x[None, :] > limits[:, None]
        number += above.to(tl.int32)
        weight += tl.where(above, weight_of(x, peak)[None, :], 0)
    return tl.sum(number.to(tl.int64), 1), tl.sum(weight, 1)


@triton.jit
def read_sums(thresholds, sums, row, PASS: tl.constexpr, PARTS: tl.constexpr):
    """Thresholds of a pass, and number and weight of the tokens above each."""
    j = tl.arange(0, _THRESHOLDS)
    limits = tl.load(thresholds + (row * 2 + PASS) * _THRESHOLDS + j)
    place = ((row * 2 + PASS) * PARTS + tl.arange(0, PARTS)[:, None]) * (2 * _THRESHOLDS) + j[None, :]
    return limits, tl.sum(tl.load(sums + place), 0), tl.sum(tl.load(sums + place + _THRESHOLDS), 0)


@triton.jit
def find_cut(
    slot, thresholds, sums, gathered, row, k, p, peak,
    PARTS: tl.constexpr, STEP: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The smallest x that top-k and top-p keep, and the largest id kept among the tokens that have it."""
    limits, number, weight = read_sums(thresholds, sums, row, 0, PARTS)
    all_weight = tl.max(weight)
    bracket, target, k_binds, any_cut = open_bracket(peak, limits, number, weight, k, p)
    cut, kept, ties = _NEVER, tl.full([], _ALL, tl.int64), tl.full([], _ALL, tl.int64)
    if any_cut:
        limits, number, weight = read_sums(thresholds, sums, row, 1, PARTS)
        bracket = narrow(bracket, limits, number, weight, k_binds, target)
        for by_weight in range(2):  # top-k, then top-p over what that leaves
            by_number = by_weight == 0
            if tl.where(by_number, k_binds, p < 1):
                target = tl.where(by_number, k, mass(p, all_weight))
                bracket, ties = _close(slot, bracket, gathered, peak, by_number, target, STEP, CAPACITY)
                at_cut = weight_of(bracket.high, peak)
                unit = tl.where(by_number, 1, at_cut)
                stay = (target - tl.where(by_number, bracket.n_high, bracket.w_high) + unit - 1) // unit
                kept = tl.where(bracket.high > cut, stay, tl.minimum(kept, stay))
                cut = bracket.high
                all_weight = bracket.w_high + stay * at_cut
                below = from_ordered(tl.where(cut == 0, -2, ordered(cut) - 1))
                zero = tl.full([], 0, tl.int64)
                bracket = Bracket(below, peak, bracket.n_high + ties, zero, zero)
    last_id = _LAST
    if kept < ties:
        last_id = _nth_at(slot, cut, kept, STEP)
    return cut, last_id


@triton.jit
def _close(slot, bracket, gathered, peak, by_number, target, STEP: tl.constexpr, CAPACITY: tl.constexpr):
    """The bracket whose high is the cut, and how many tokens have that x."""
    low, high, n_low, n_high, w_high = (
        bracket.low,
        bracket.high,
        bracket.n_low,
        bracket.n_high,
        bracket.w_high,
    )
    while (n_low - n_high > CAPACITY) & (_middle(low, high) > low) & (_middle(low, high) < high):
        limits = thresholds_between(low, high)
        number, weight = sums_above(slot, limits, peak, 0, slot.V, STEP)
        closer = narrow(Bracket(low, high, n_low, n_high, w_high), limits, number, weight, by_number, target)
        low, high, n_low, n_high, w_high = closer.low, closer.high, closer.n_low, closer.n_high, closer.w_high
    ties = n_low - n_high
    if ties <= CAPACITY:
        _gather(slot, gathered, low, high, STEP)
        high, ties, n_high, w_high = _bisect(
            gathered, ties, peak, by_number, target, low, high, n_high, w_high, CAPACITY
        )
    return Bracket(low, high, n_low, n_high, w_high), ties


@triton.jit
def _gather(slot, gathered, low, high, STEP: tl.constexpr):
    """Write the x in (low, high] of a row, which are few enough, one after the other."""
    n = 0
    for first in range(0, slot.V, 4 * STEP):
        x = scores(slot, first + tl.arange(0, 4 * STEP))
        inside = ((x > low) & (x <= high)).to(tl.int32)
        tl.store(gathered + n + tl.cumsum(inside, 0) - 1, x, mask=inside != 0)
        n += tl.sum(inside)
    tl.debug_barrier()


@triton.jit
def _bisect(gathered, n, peak, by_number, target, low, high, n_high, w_high, CAPACITY: tl.constexpr):
    """The cut, the number of tokens that have this x, and number and weight of those above."""
    place = tl.arange(0, CAPACITY)
    x = tl.load(gathered + place, mask=place < n, other=_NEVER)
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
def _nth_at(slot, cut, n, STEP: tl.constexpr):
    """The id of the n-th token whose x is `cut`, n counted from 1."""
    found, first, seen = _LAST, 0, tl.full([], 0, tl.int64)
    while (found == _LAST) & (first < slot.V):
        token = first + tl.arange(0, 4 * STEP)
        x = scores(slot, token)
        nth = seen + tl.cumsum((x == cut).to(tl.int32), 0)
        found = tl.min(tl.where((x == cut) & (nth == n), token, _LAST))
        seen = tl.max(nth)
        first += 4 * STEP
    return found
