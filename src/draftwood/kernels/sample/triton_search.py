"""Which tokens of a row have the largest x + noise: blocks are looked into in the order of their upper bounds.

`leaders` ranks the tokens of a few blocks and `in_doubt` tells whether that was enough; `search` looks on until it is.

So the fp64 noise is computed for a few tokens of each row. It does not know why a token may be excluded.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from draftwood.kernels.noise.triton_impl import (
    RATE_ERROR,
    approximate_log,
    approximate_rate,
    block_bits,
    gumbel,
    least_log2,
    random_bits,
    upper_bound,
)
from draftwood.kernels.sample.triton_scores import (
    BLOCK,
    first_of_block,
    place_in_block,
    processed,
    quads_of_blocks,
    scaled,
    scores,
    tokens_of_block,
    tokens_of_blocks,
)
from draftwood.kernels.triton_ops import ordered, packed, packed_index, packed_value

HELD = 4

_HELD = tl.constexpr(HELD)
_BLOCK = tl.constexpr(BLOCK)
_NEVER = tl.constexpr(float("-inf"))
_NO_KEY = tl.constexpr(-(2**63))
_NONE = tl.constexpr(-(2**31))
_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2))
_FULL = tl.constexpr(2**63 - 1)
_LAST = tl.constexpr(0x7FFFFFFF)


class Limits(NamedTuple):
    """Tokens stay whose x is above `cut`, or equal to it with an id up to `last_id`, and within a gap of the largest x."""

    cut: Any
    last_id: Any
    peak: Any
    least_gap: Any


@triton.jit
def of_blocks(values, blocks, BLOCKS: tl.constexpr):
    """[BLOCKS]: a row's value of each of its blocks, -inf after them."""
    place = tl.arange(0, BLOCKS)
    return tl.load(values + place, mask=place < blocks, other=_NEVER)


@triton.jit
def leaders(slot, tops, bounds, blocks, peak, least_gap, BLOCKS: tl.constexpr, N: tl.constexpr):
    """[N] keys of the tokens that come first by bounds of their x + noise, their logits before step 4, and what no other token exceeds, as an integer.

    The values of the keys are within `_slack`, and in the right order. Of the N blocks with the largest bounds, every token's bound is made; noise only for N
    tokens. Bounds are rounded up to make room for an index, so that one integer reduction finds the largest and where it is.
    """
    rank, place, at = tl.arange(0, N), tl.arange(0, BLOCKS), tl.arange(0, N * _BLOCK)
    bound = of_blocks(bounds, blocks, BLOCKS)
    if least_gap > _NEVER:
        bound = tl.where(of_blocks(tops, blocks, BLOCKS) - peak >= least_gap, bound, _NEVER)
    by_block, group = _indexed(bound, place, BLOCKS), tl.zeros([N], tl.int32)
    for i in tl.static_range(N):
        best = tl.max(by_block)
        group = tl.where(rank == i, tl.where(best > _NONE, _index(best, BLOCKS), 1 << 20), group)
        by_block = tl.where(by_block < best, by_block, _NONE)
    elsewhere = _ceiling(tl.max(by_block), BLOCKS)
    x = processed(slot, tokens_of_blocks(slot, group, N))
    if least_gap > _NEVER:
        x = tl.where(scaled(slot, x) - peak >= least_gap, x, _NEVER)
    if slot.scale > 0:
        bits = block_bits(slot.seed, slot.position, quads_of_blocks(slot, group, N), N * _BLOCK)
        x = (32.0 - tl.fma(x, -_LOG2_E / slot.scale, least_log2(bits))) * _LN_2
    by_token, token = _indexed(x, at, N * _BLOCK), tl.zeros([N], tl.int32)
    for i in tl.static_range(N):
        best = tl.max(by_token)
        index = _index(best, N * _BLOCK)
        block = tl.sum(tl.where(rank == index // _BLOCK, group, 0))
        this = first_of_block(slot, block) + place_in_block(index % _BLOCK)
        token = tl.where(rank == i, tl.where(best > _NONE, this, slot.end), token)
        by_token = tl.where(by_token < best, by_token, _NONE)
    raw = processed(slot, token)
    y = scaled(slot, raw)
    if slot.scale > 0:
        bits = random_bits(slot.seed, slot.position, token)
        near = y - approximate_log(approximate_rate(bits))
        slack = 2 * _slack(near)
        close = tl.abs(near[:, None] - near[None, :]) <= slack[:, None]
        some = y > _NEVER
        close = close & some[:, None] & (rank[:, None] != rank[None, :])
        if tl.max(tl.max(close.to(tl.int32), 1)) > 0:
            y += gumbel(bits)
        else:
            y = near
    keys = tl.where(y > _NEVER, packed(y, token), _NO_KEY)
    return keys, raw, tl.maximum(elsewhere, _ceiling(tl.max(by_token), N * _BLOCK))


@triton.jit
def _indexed(bound, index, SIZE: tl.constexpr):
    """i32 in the order of the bounds rounded up, then of smaller indices; SIZE, a power of two, is above all indices."""
    return tl.where(bound > _NEVER, (ordered(bound) | (SIZE - 1)) - index, _NONE)


@triton.jit
def _index(key, SIZE: tl.constexpr):
    return SIZE - 1 - (key & (SIZE - 1))


@triton.jit
def _ceiling(key, SIZE: tl.constexpr):
    return tl.where(key > _NONE, key | (SIZE - 1), _NONE)


@triton.jit
def in_doubt(slot, keys, rest, wanted):
    """Whether another token may be among the `wanted` best of the keys of `leaders`."""
    value = packed_value(keys)  # NaN of no key
    slack = tl.where(slot.scale > 0, 2 * _slack(value), 0.0)
    better = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), 1)
    last = tl.max(tl.where((keys > _NO_KEY) & (better == wanted - 1), ordered(value - slack), _NONE))
    return (rest > _NONE) & (rest >= last)


@triton.jit
def _slack(value):
    """How far an approximate x + noise of about this value, or a bound of it, may be off: the noise is below 23; x and sums round."""
    return 2 * RATE_ERROR + (tl.abs(value) + 23.0) * 1e-6


@triton.jit
def search(slot, tops, bounds, blocks, limits, wanted, BLOCKS: tl.constexpr):
    """[4] i64 keys of the `wanted` <= 4 best tokens in no order, no key for want of tokens; what is not wanted is full.

    tops and bounds, pointers to [blocks]: the largest x of each block, and what its x + noise do not exceed but for `_slack`.
    """
    place = tl.arange(0, BLOCKS)
    top, bound = of_blocks(tops, blocks, BLOCKS), of_blocks(bounds, blocks, BLOCKS)
    bound = tl.where((top >= limits.cut) & (top - limits.peak >= limits.least_gap), bound, _NEVER)
    held = tl.where(tl.arange(0, _HELD) < wanted, tl.full([_HELD], _NO_KEY, tl.int64), _FULL)
    reach = tl.max(bound)
    block = tl.min(tl.where(bound == reach, place, _LAST))
    while _can_enter(slot, reach, first_of_block(slot, block), held):
        held = _look(slot, block, limits, held)
        bound = tl.where(place == block, _NEVER, bound)
        reach = tl.max(bound)
        block = tl.min(tl.where(bound == reach, place, _LAST))
    return tl.where(held == _FULL, _NO_KEY, held)


@triton.jit
def _look(slot, block, limits, held):
    token = tokens_of_block(slot, block)
    x = scores(slot, token)
    stays = (x > limits.cut) | ((x == limits.cut) & (token <= limits.last_id))
    stays = stays & (x > _NEVER) & (x - limits.peak >= limits.least_gap)
    bound = x
    if slot.scale > 0:
        bound = x + upper_bound(random_bits(slot.seed, slot.position, token))
    bound = tl.where(stays, bound, _NEVER)
    reach = tl.max(bound)
    best = tl.min(tl.where(bound == reach, token, _LAST))
    while _can_enter(slot, reach, best, held):
        y = tl.max(tl.where(token == best, x, _NEVER))
        if slot.scale > 0:
            y += gumbel(random_bits(slot.seed, slot.position, best))
        held = _insert(held, packed(y, best))
        bound = tl.where(token == best, _NEVER, bound)
        reach = tl.max(bound)
        best = tl.min(tl.where(bound == reach, token, _LAST))
    return held


@triton.jit
def _can_enter(slot, reach, first, held):
    """Whether a token from `first` on whose bound is `reach` can be better than the worst held."""
    worst = tl.min(held)
    slack = 0.0
    if slot.scale > 0:
        slack = _slack(reach)
    value = packed_value(worst)  # NaN of no key
    behind = (reach + slack < value) | ((reach + slack == value) & (first > packed_index(worst)))
    return (reach > _NEVER) & ((worst == _NO_KEY) | (behind == 0))


@triton.jit
def _insert(held, key):
    """In place of the worst, unless that is better."""
    rank = tl.arange(0, _HELD)
    worst = tl.min(held)
    at = tl.min(tl.where(held == worst, rank, _HELD))
    return tl.where((rank == at) & (key > worst), key, held)


@triton.jit
def list_blocks(listed, top, least, BLOCKS: tl.constexpr):
    """Write the blocks whose largest x is at least `least`, in order; returns how many."""
    place = tl.arange(0, BLOCKS)
    chosen = ((top >= least) & (top > _NEVER)).to(tl.int32)
    tl.debug_barrier()  # a list that is still read may be there
    tl.store(listed + tl.cumsum(chosen, 0) - 1, place, mask=chosen != 0)
    tl.debug_barrier()
    return tl.sum(chosen)


@triton.jit
def listed_tokens(slot, listed, n, first, N: tl.constexpr):
    """[N * 512] of blocks first..first + N - 1 of a list of n; beyond the list, tokens that have no logits."""
    place = first + tl.arange(0, N)
    return tokens_of_blocks(slot, tl.load(listed + place, mask=place < n, other=1 << 20), N)
