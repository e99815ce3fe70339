"""Which of a few tokens top-p keeps: from fp32 sums of the weights before each, right or in doubt, or from integer sums.

The sums err by less than `_ERROR` of all weight (2^-17.5 in exp, 2^-24 per addition of a chain, 2^-41 per token that the
contract rounds away), and by `_ROUNDING` of the largest |x| that has weight: so x rounds. Thus a token whose sum is farther from the target than that is decided as the exact sums would.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.kernels.sample.triton_cut import mass, weight_of
from draftwood.kernels.sample.triton_scores import BLOCK, TILE, first_of_tile, processed, scaled, scores
from draftwood.kernels.sample.triton_search import HELD, listed_tokens, of_blocks
from draftwood.kernels.triton_ops import packed_index

TILES_OF_CHUNK = 2

_TILES = tl.constexpr(TILES_OF_CHUNK)
_CHUNK = tl.constexpr(TILES_OF_CHUNK * TILE)
_BLOCK = tl.constexpr(BLOCK)
_HELD = tl.constexpr(HELD)
_ERROR = tl.constexpr(2.0**-14)
_ROUNDING = tl.constexpr(2.0**-21)
_LOG2_E = tl.constexpr(1.4426950408889634)
_NEVER = tl.constexpr(float("-inf"))
_NO_KEY = tl.constexpr(-(2**63))
_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def tokens_of(slot, held):
    """[4] of keys, a token that has logits where there is no key."""
    return tl.where(held > _NO_KEY, packed_index(held), slot.first)


@triton.jit
def logits_of(slot, held):
    """[4] of keys, before step 4; inf where there is none."""
    return tl.where(held > _NO_KEY, processed(slot, tokens_of(slot, held)), float("inf"))


@triton.jit
def weights_of_chunk(slot, chunk):
    """[4096] f32 weights of the tokens of a chunk, `TILES_OF_CHUNK` tiles, relative to the weight of an x, and that x: the largest."""
    y = processed(slot, first_of_tile(slot, chunk * _TILES) + tl.arange(0, _CHUNK))
    top = tl.max(y)
    top = scaled(slot, tl.where(top > _NEVER, top, 0.0))
    return weight_beside(slot, y, top), top


@triton.jit
def weights_before(slot, weight, top, held_y, peak):
    """[8] f32: sums of exp(x' - peak) over those tokens of a chunk that surely come before each of four candidates, and over
    those that may, itself included. weight, top: of `weights_of_chunk`; held_y: pointer to the candidates' logits.

    Weights closer to each other than rounding can tell are those of tokens that may come before. The fourth candidate is none.
    """
    even, odd = tl.split(tl.reshape(weight, [_CHUNK // 4, 2, 2]))
    w0, w1 = tl.split(even)
    w2, w3 = tl.split(odd)
    first = _surely_and_maybe(slot, w0, w1, w2, w3, tl.load(held_y), top)
    second = _surely_and_maybe(slot, w0, w1, w2, w3, tl.load(held_y + 1), top)
    third = _surely_and_maybe(slot, w0, w1, w2, w3, tl.load(held_y + 2), top)
    sums = tl.join(tl.join(first, third), tl.join(second, tl.zeros_like(second)))
    more = tl.minimum(top - peak, 0.0)  # above 0 only where the chunk has no candidate, and so no weight
    return tl.sum(tl.reshape(sums, [_CHUNK // 32, 2 * _HELD]), 0) * tl.exp2(more * _LOG2_E)


@triton.jit
def _surely_and_maybe(slot, w0, w1, w2, w3, y, top):
    own, error = weight_beside(slot, y, top), 2.0**-20 * (1.0 + tl.abs(scaled(slot, y)) + tl.abs(top))
    return tl.join(_above(w0, w1, w2, w3, own * (1.0 + error)), _above(w0, w1, w2, w3, own * (1.0 - error)))


@triton.jit
def _above(w0, w1, w2, w3, bound):
    """[128], a part of the sum per thread: of the weights above a bound. Four numbers that a thread has loaded at once are in four tensors."""
    total = w0 * (w0 > bound).to(tl.float32)
    total = tl.fma(w1, (w1 > bound).to(tl.float32), total)
    total = tl.fma(w2, (w2 > bound).to(tl.float32), total)
    total = tl.fma(w3, (w3 > bound).to(tl.float32), total)
    return tl.sum(tl.reshape(total, [8, _CHUNK // 32]), 0)


@triton.jit
def weights_exactly_before(slot, listed, start, end, token, x, peak):
    """[4] f32 twice: `weights_before` by x and ids, of the blocks start..end - 1 of a list."""
    before, own = tl.zeros([_HELD, _BLOCK], tl.float32), tl.zeros([_HELD, _BLOCK], tl.float32)
    token, x = token[:, None], x[:, None]
    for first in range(start, end):
        others = listed_tokens(slot, listed, end, first, 1)
        y = processed(slot, others)
        weight = weight_beside(slot, y, peak)[None, :]
        others, other = others[None, :], scaled(slot, y)[None, :]
        before += tl.where((other > x) | ((other == x) & (others < token)), weight, 0.0)
        own += tl.where(others == token, weight, 0.0)
    surely = tl.sum(before, 1)
    return surely, surely + tl.sum(own, 1)


@triton.jit
def weight_beside(slot, y, peak):
    """exp(x - peak) of logits before step 4, within the error that `verdict` allows for."""
    return tl.exp2(tl.fma(y, _LOG2_E / slot.scale, -peak * _LOG2_E))


@triton.jit
def weights_of_blocks(tops, weights, blocks, peak, BLOCKS: tl.constexpr):
    """[BLOCKS] f32: sums of exp(x - peak) over each block, from sums relative to the block's largest x."""
    top = of_blocks(tops, blocks, BLOCKS)
    place = tl.arange(0, BLOCKS)
    weight = tl.load(weights + place, mask=(place < blocks) & (top > _NEVER), other=0.0)
    return weight * tl.exp(top - peak)


@triton.jit
def surely_kept(maybe, own, all_weight, p, peak):
    """Whether top-p keeps a token. maybe: at least the weight of itself and of what comes before it; own: its weight."""
    return maybe - own < p * all_weight - _error(all_weight, peak)


@triton.jit
def _error(all_weight, peak):
    return all_weight * (_ERROR + tl.abs(peak) * _ROUNDING)


@triton.jit
def verdict(held, surely, maybe, own, all_weight, p, peak):
    """The best key that is surely kept or no key, and whether a better one is in doubt. own: the candidates' weights."""
    # The first of all is kept whatever the target. `maybe` counts the token itself, and any before it has as much weight or more.
    first = maybe < 1.5 * own
    kept = first | surely_kept(maybe, own, all_weight, p, peak)
    lost = surely > p * all_weight + _error(all_weight, peak)
    best = tl.max(tl.where(kept, held, _NO_KEY))
    return best, tl.max(tl.where(kept | lost, _NO_KEY, held)) > best


@triton.jit
def exact_verdict(slot, held, y, p, peak, STEP: tl.constexpr):
    """The best key that top-p keeps or no key, by integer sums over the whole row, STEP tokens at a time."""
    x, token = scaled(slot, y)[:, None], tokens_of(slot, held)[:, None]
    before, all_weight = tl.zeros([_HELD, STEP], tl.int64), tl.zeros([STEP], tl.int64)
    for first in range(slot.first, slot.end, STEP):
        others = first + tl.arange(0, STEP)
        other = scores(slot, others)
        weight = weight_of(other, peak)
        all_weight += weight
        earlier = (other[None, :] > x) | ((other[None, :] == x) & (others[None, :] < token))
        before += tl.where(earlier, weight[None, :], 0)
    kept = tl.sum(before, 1) < mass(p, tl.sum(all_weight, 0))
    return tl.max(tl.where(kept, held, _NO_KEY))


@triton.jit
def foremost(token, x):
    """The candidate that comes first of all: its x and id."""
    top = tl.max(tl.where(x < float("inf"), x, _NEVER))
    return top, tl.min(tl.where(x == top, token, _LAST))
