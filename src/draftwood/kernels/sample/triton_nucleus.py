"""Which of a few tokens top-p keeps, from fp32 sums of the weights before each: right, or in doubt.

The sums err by less than `_ERROR` of all weight (2^-17.5 in exp, 2^-24 per addition of a chain, 2^-41 per token that the
contract rounds away), and by `_ROUNDING` of the largest |x| that has weight: that is how x is rounded. So a token whose sum is farther from the target than that is decided as the exact sums would.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.kernels.sample.triton_scores import BLOCK, scores
from draftwood.kernels.sample.triton_search import HELD, listed_scores
from draftwood.kernels.triton_ops import packed_index

_BLOCK = tl.constexpr(BLOCK)
_HELD = tl.constexpr(HELD)
_ERROR = tl.constexpr(2.0**-14)
_ROUNDING = tl.constexpr(2.0**-22)
_NEVER = tl.constexpr(float("-inf"))
_NO_KEY = tl.constexpr(-(2**63))
_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def candidates(slot, held):
    """Tokens and x [4] of keys; x is inf where there is none, so that nothing comes before it."""
    some = held > _NO_KEY
    token = tl.where(some, packed_index(held), slot.first)
    return token, tl.where(some, scores(slot, token), float("inf"))


@triton.jit
def weight_before(slot, listed, start, end, token, x, peak, CHUNK: tl.constexpr):
    """[4] f32: sum of exp(x' - peak) over those tokens of blocks start..end - 1 of a list that come before each candidate.

    CHUNK blocks at a time.
    """
    total = tl.zeros([_HELD, CHUNK * _BLOCK], tl.float32)
    for first in range(start, end, CHUNK):
        other, x_other = listed_scores(slot, listed, end, first, CHUNK)
        weight = tl.exp(x_other - peak)
        before = x_other[None, :] > x[:, None]
        before = before | ((x_other[None, :] == x[:, None]) & (other[None, :] < token[:, None]))
        total += tl.where(before, weight[None, :], 0.0)
    return tl.sum(total, 1)


@triton.jit
def verdict(held, before, all_weight, p, peak):
    """The best key that is surely kept or no key, and whether a better one is in doubt."""
    target, error = p * all_weight, all_weight * (_ERROR + tl.abs(peak) * _ROUNDING)
    kept = (before == 0.0) | (before < target - error)  # the first of all is kept whatever the target
    lost = (before > 0.0) & (before > target + error)
    best = tl.max(tl.where(kept, held, _NO_KEY))
    return best, tl.max(tl.where(kept | lost, _NO_KEY, held)) > best


@triton.jit
def foremost(token, x):
    """The candidate that comes first of all: its x and id."""
    top = tl.max(tl.where(x < float("inf"), x, _NEVER))
    return top, tl.min(tl.where(x == top, token, _LAST))
