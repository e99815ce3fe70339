"""Which tokens of a row have the largest x + noise: blocks are looked into in the order of their upper bounds.

`leader` and `leaders` rank tokens by approximate noise and tell whether that was enough; `search` does without.

So the fp64 noise is computed for a few tokens of each row. It does not know why a token may be excluded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from draftwood.kernels.noise.triton_impl import (
    RATE_ERROR,
    approximate_log,
    approximate_rate,
    block_bits,
    gumbel,
    random_bits,
    upper_bound,
)
from draftwood.kernels.sample.triton_scores import (
    BLOCK,
    first_of_block,
    quads_of_blocks,
    scores,
    tokens_of_block,
    tokens_of_blocks,
)
from draftwood.kernels.triton_ops import packed, packed_index, packed_value

HELD = 4

_HELD = tl.constexpr(HELD)
_BLOCK = tl.constexpr(BLOCK)
_NEVER = tl.constexpr(float("-inf"))
_NO_KEY = tl.constexpr(-(2**63))
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
def leader(slot, bounds, blocks, BLOCKS: tl.constexpr):
    """A key of the token with the largest x + noise (its value within `_slack`) or no key, and whether it may be another.

    The noise is approximate, and only the two blocks with the largest bounds are looked into.
    """
    place = tl.arange(0, BLOCKS)
    bound = of_blocks(bounds, blocks, BLOCKS)
    by_block = tl.where(place < blocks, packed(bound, place), _NO_KEY)
    first = tl.max(by_block)
    second = tl.max(tl.where(by_block < first, by_block, _NO_KEY))
    pair = packed_index(tl.where((tl.arange(0, 2) == 0) | (second == _NO_KEY), first, second))
    token = tokens_of_blocks(slot, pair, 2)
    x = scores(slot, token)
    if slot.scale > 0:
        x += approximate_noise(slot, pair, 2)
    keys = tl.where(x > _NEVER, packed(x, token), _NO_KEY)
    best = tl.max(keys)
    least = packed_value(best)  # NaN of no key
    rivals = (keys < best) & False
    if slot.scale > 0:
        least -= 2 * _slack(least)
        rivals = (keys < best) & (x >= least)
    elsewhere = (by_block < second) & (bound >= least)
    return best, tl.maximum(tl.max(rivals.to(tl.int32)), tl.max(elsewhere.to(tl.int32))) > 0


@triton.jit
def leaders(slot, bounds, blocks, peak, least_gap, BLOCKS: tl.constexpr):
    """[4] keys of the three best tokens within a gap of the largest x, values within `_slack`, and whether they may be others.

    Four blocks at a time, until the next one can't have one of the four best.
    """
    place, rank = tl.arange(0, BLOCKS), tl.arange(0, _HELD)
    by_block = of_blocks(bounds, blocks, BLOCKS)
    by_block = tl.where(by_block > _NEVER, packed(by_block, place), _NO_KEY)
    held = tl.full([_HELD], _NO_KEY, tl.int64)
    following = tl.max(by_block)
    while _may_enter(following, tl.min(held)):
        group = tl.zeros([_HELD], tl.int32)
        for i in tl.static_range(_HELD):
            group = tl.where(
                rank == i, tl.where(following > _NO_KEY, packed_index(following), 1 << 20), group
            )
            by_block = tl.where(by_block < following, by_block, _NO_KEY)
            following = tl.max(by_block)
        token = tokens_of_blocks(slot, group, _HELD)
        x = scores(slot, token)
        stays = (x > _NEVER) & (x - peak >= least_gap)
        keys = tl.where(stays, packed(x + approximate_noise(slot, group, _HELD), token), _NO_KEY)
        for _ in tl.static_range(_HELD):
            best = tl.max(keys)
            held = _insert(held, best)
            keys = tl.where(keys < best, keys, _NO_KEY)
    value, worst = packed_value(held), tl.min(held)
    least = 2 * _slack(value)
    apart = tl.abs(value[:, None] - value[None, :]) > least[:, None]
    clear = apart | (rank[:, None] == rank[None, :]) | (held == _NO_KEY)[:, None] | (held == _NO_KEY)[None, :]
    return tl.where(held > worst, held, _NO_KEY), tl.min(clear.to(tl.int32)) == 0


@triton.jit
def _may_enter(key, worst):
    """Whether a block of this key can have a token better than the worst held, whose value is approximate."""
    value = packed_value(worst)  # NaN of no key
    return (key > _NO_KEY) & ((worst == _NO_KEY) | (packed_value(key) >= value - 2 * _slack(value)))


@triton.jit
def approximate_noise(slot, block, N: tl.constexpr):
    """[N * 512], of block [N]."""
    quad = quads_of_blocks(slot, block, N)
    bits = block_bits(slot.seed, slot.position, quad, N * _BLOCK)
    return -approximate_log(approximate_rate(bits))


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
