"""Steps 1 to 4 of `sample` for any tokens of one slot, in registers: every kernel computes x anew where it needs it.

It also says how a slice's tokens are laid out in blocks: a tile is 2048 tokens in a row, and its block s is the union of
stripe s, 128 tokens, of each of its quarters. So a warp reads whole stripes, and a thread reduces most of a block alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

TILE = 2048
STRIPE = 128
STRIPES = 4  # in a quarter of a tile, and blocks in a tile
BLOCK = TILE // STRIPES

_TILE = tl.constexpr(TILE)
_STRIPE = tl.constexpr(STRIPE)
_STRIPES = tl.constexpr(STRIPES)
_QUARTER = tl.constexpr(STRIPE * STRIPES)
_BLOCK = tl.constexpr(BLOCK)
_NEVER = tl.constexpr(float("-inf"))


class Slot(NamedTuple):
    """What x depends on besides the token; pointers of what no row uses are None."""

    logits: Any  # of this slot: + token is that token's
    first: Any  # tokens first..end - 1 have logits
    end: Any
    scale: Any  # the temperature
    seed: Any
    position: Any
    b: Any
    t: Any
    live: Any  # slots of this row that choose a token
    T: Any
    V: Any
    M: Any
    repetition: Any
    presence: Any
    frequency: Any
    prompt_seen: Any
    counts: Any
    bias_ids: Any
    bias_values: Any
    mask_bits: Any
    tokens: Any
    ancestors: Any


@triton.jit
def live_slots(b, n_slots, tree_status, T):
    """How many slots choose a token. The root always does, also in an unsound tree."""
    live = T
    if n_slots is not None:
        live = tl.where(tl.load(tree_status + b) == 0, tl.load(n_slots + b), 1)
        live = tl.minimum(tl.maximum(live, 1), T)
    return live


@triton.jit
def first_of_tile(slot, tile):
    """Its first token: a multiple of 4, as the noise is made for four at a time."""
    return slot.first // 4 * 4 + tile * _TILE


@triton.jit
def first_of_block(slot, block):
    return first_of_tile(slot, block // _STRIPES) + block % _STRIPES * _STRIPE


@triton.jit
def place_in_block(i):
    """Of a block's i-th token: how far it is from the first one."""
    return i // _STRIPE * _QUARTER + i % _STRIPE


@triton.jit
def tokens_of_block(slot, block):
    """[512], of a scalar."""
    return first_of_block(slot, block) + place_in_block(tl.arange(0, _BLOCK))


@triton.jit
def tokens_of_blocks(slot, block, N: tl.constexpr):
    """[N * 512], of block [N]."""
    token = first_of_block(slot, block)[:, None] + place_in_block(tl.arange(0, _BLOCK))[None, :]
    return tl.reshape(token, [N * _BLOCK])


@triton.jit
def quads_of_blocks(slot, block, N: tl.constexpr):
    """[N * 128]: a quarter of every fourth of these tokens, which are multiples of 4 and have three more after them."""
    token = first_of_block(slot, block)[:, None] + place_in_block(tl.arange(0, _BLOCK // 4) * 4)[None, :]
    return tl.reshape(token // 4, [N * _BLOCK // 4])


@triton.jit
def by_block(x):
    """[4, 4, 128] of the values of a tile: the second axis tells blocks, the others what is in a block."""
    return tl.reshape(x, [_TILE // _QUARTER, _STRIPES, _STRIPE])


@triton.jit
def largest_of_blocks(x):
    """[4] of what `by_block` returns."""
    return tl.max(tl.max(x, 0), 1)


@triton.jit
def smallest_of_blocks(x):
    return tl.min(tl.min(x, 0), 1)


@triton.jit
def sums_of_blocks(x):
    return tl.sum(tl.sum(x, 0), 1)


@triton.jit
def scores(slot, token):
    """f32 x of the tokens after step 4, -inf where one is no candidate. Compiled without fused multiply-add."""
    return scaled(slot, processed(slot, token))


@triton.jit
def scaled(slot, x):
    """Step 4, which keeps the order."""
    if slot.scale > 0:
        x = tl.div_rn(x, slot.scale)
    return x + 0.0  # no -0.0


@triton.jit
def candidates(slot, token):
    """`processed`, but NaN or -inf where a token is no candidate: for maxima, which pass over both."""
    if (slot.counts is None) & (slot.bias_ids is None) & (slot.mask_bits is None):
        x = _loaded(slot, token)
        return tl.fma(x, 0.0, x)  # infinities become NaN, in half the time that comparing takes
    else:
        return processed(slot, token)


@triton.jit
def _loaded(slot, token):
    inside = (token >= slot.first) & (token < slot.end)
    return tl.load(slot.logits + token, mask=inside, other=_NEVER)


@triton.jit
def processed(slot, token):
    """Steps 1 to 3."""
    inside = (token >= slot.first) & (token < slot.end)
    x = _finite(_loaded(slot, token))
    if slot.counts is not None:
        x = _penalised(x, slot, token, inside)
    if slot.bias_ids is not None:
        for m in range(slot.M):
            place = slot.b * slot.M + m
            x = tl.where(token == tl.load(slot.bias_ids + place), x + tl.load(slot.bias_values + place), x)
    if slot.mask_bits is not None:
        row = slot.b * slot.T + slot.t
        word = tl.load(slot.mask_bits + row * ((slot.V + 31) // 32) + token // 32, mask=inside, other=0)
        x = tl.where((word >> (token % 32)) & 1 != 0, x, _NEVER)
    if (slot.counts is not None) | (slot.bias_ids is not None):
        x = _finite(x)
    return x


@triton.jit
def _penalised(x, slot, token, inside):
    n = tl.load(slot.counts + slot.b * slot.V + token, mask=inside, other=0)
    if slot.tokens is not None:
        row, words = slot.b * slot.T, (slot.T + 63) // 64
        for other in range(1, slot.live):
            word = tl.load(slot.ancestors + (row + slot.t) * words + other // 64)
            if (word >> (other % 64)) & 1 != 0:
                n += (token == tl.load(slot.tokens + row + other)).to(tl.int32)
    seen = (n > 0) | (tl.load(slot.prompt_seen + slot.b * slot.V + token, mask=inside, other=0) != 0)
    repetition = tl.load(slot.repetition + slot.b)
    x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    x = x - tl.load(slot.frequency + slot.b) * n.to(tl.float32)
    return tl.where(n > 0, x - tl.load(slot.presence + slot.b), x)


@triton.jit
def _finite(x):
    return tl.where(tl.abs(x) < float("inf"), x, _NEVER)  # NaN compares false
