"""Which of a few tokens top-p keeps, from fp32 sums of the weights before each: right, or in doubt.

The sums err by less than `_ERROR` of all weight (2^-17.5 in exp, 2^-24 per addition of a chain, 2^-41 per token that the
contract rounds away), and by `_ROUNDING` of the largest |x| that has weight: so x rounds. Thus a token whose sum is farther from the target than that is decided as the exact sums would.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.kernels.sample.triton_scores import BLOCK, processed, scores
from draftwood.kernels.sample.triton_search import HELD, listed_tokens, of_blocks
from draftwood.kernels.triton_ops import packed_index

_BLOCK = tl.constexpr(BLOCK)
_HELD = tl.constexpr(HELD)
_ERROR = tl.constexpr(2.0**-14)
_ROUNDING = tl.constexpr(2.0**-22)
_LOG2_E = tl.constexpr(1.4426950408889634)
_NEVER = tl.constexpr(float("-inf"))
_NO_KEY = tl.constexpr(-(2**63))
_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def candidates(slot, held):
    """Tokens and x [4] of keys; x is inf where there is none."""
    some = held > _NO_KEY
    token = tl.where(some, packed_index(held), slot.first)
    return token, tl.where(some, scores(slot, token), float("inf"))


@triton.jit
def weights_before(slot, listed, start, end, held, peak, CHUNK: tl.constexpr):
    """[4] f32 twice: sums of exp(x' - peak) over those tokens of blocks start..end - 1 of a list that surely come before each
    candidate, and over those that may, itself included. CHUNK blocks at a time.

    Nothing is divided: logits that differ by more than rounding hides are in the order of their x.
    """
    y = candidate_logits(slot, held)
    apart = tl.abs(y) * 4.8e-7 + slot.scale * 1e-37
    above, below = y + apart, y - apart
    surely, maybe = (
        tl.zeros([_HELD, CHUNK * _BLOCK], tl.float32),
        tl.zeros([_HELD, CHUNK * _BLOCK], tl.float32),
    )
    for first in range(start, end, CHUNK):
        other = processed(slot, listed_tokens(slot, listed, end, first, CHUNK))
        weight = weight_beside(slot, other, peak)[None, :]
        surely = tl.fma(weight, (other[None, :] > above[:, None]).to(tl.float32), surely)
        maybe = tl.fma(weight, (other[None, :] >= below[:, None]).to(tl.float32), maybe)
    return tl.sum(surely, 1), tl.sum(maybe, 1)


@triton.jit
def candidate_logits(slot, held):
    """[4] of keys, before step 4; inf where there is none."""
    some = held > _NO_KEY
    token = tl.where(some, packed_index(held), slot.first)
    return tl.where(some, processed(slot, token), float("inf"))


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
    first = maybe == own  # of all: kept whatever the target
    kept = first | surely_kept(maybe, own, all_weight, p, peak)
    lost = surely > p * all_weight + _error(all_weight, peak)
    best = tl.max(tl.where(kept, held, _NO_KEY))
    return best, tl.max(tl.where(kept | lost, _NO_KEY, held)) > best


@triton.jit
def foremost(token, x):
    """The candidate that comes first of all: its x and id."""
    top = tl.max(tl.where(x < float("inf"), x, _NEVER))
    return top, tl.min(tl.where(x == top, token, _LAST))
