"""The device code of `sample`: four launches, of which rows without top-k and top-p need the first and the last.

`survey` reads every logit once and leaves, per block of 128 tokens, the largest x and an upper bound of x + noise.
`weigh`, twice, narrows where the top-k or top-p cut of a row lies. `choose` finds the cut, then looks into blocks in the
order of their bounds until no other block can hold a better token. So fp64 noise is computed for a few blocks of each row.

x is the logit after step 4 of the contract.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.kernels.noise.triton_impl import RATE_ERROR, gumbel, random_bits, tile_bits, upper_bound
from draftwood.kernels.sample.triton_cut import (
    THRESHOLDS,
    find_cut,
    first_thresholds,
    open_bracket,
    read_sums,
    sums_above,
    thresholds_between,
)
from draftwood.kernels.sample.triton_scores import Slot, live_slots, scores
from draftwood.kernels.triton_ops import packed, packed_index, packed_value

BLOCK = 128

_BLOCK = tl.constexpr(BLOCK)
_THRESHOLDS = tl.constexpr(THRESHOLDS)
_NEVER = tl.constexpr(float("-inf"))
_NO_KEY = tl.constexpr(-(2**63))
_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def survey(
    logits, temperature, repetition, presence, frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits,
    tokens, ancestors, n_slots, tree_status, seed, position,
    tops,  # [B * T, tiles * TILE / 128] f32
    bounds,
    status,  # [B], set to 0
    T, V, M,
    TILE: tl.constexpr,
):  # fmt: skip
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b = row // T
    slot = Slot(
        logits + row * V, tl.load(temperature + b), b, row % T, live_slots(b, n_slots, tree_status, T), T, V, M,
        repetition, presence, frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits, tokens, ancestors,
    )  # fmt: skip
    if (slot.t == 0) & (tile == 0):
        tl.store(status + b, 0)
    if slot.t < slot.live:
        x = scores(slot, tile * TILE + tl.arange(0, TILE))
        block = (row * tiles + tile) * (TILE // _BLOCK) + tl.arange(0, TILE // _BLOCK)
        tl.store(tops + block, tl.max(tl.reshape(x, [TILE // _BLOCK, _BLOCK]), 1))
        if slot.scale > 0:
            x += upper_bound(tile_bits(tl.load(seed + b), tl.load(position + row), tile * TILE, TILE))
        tl.store(bounds + block, tl.max(tl.reshape(x, [TILE // _BLOCK, _BLOCK]), 1))


@triton.jit
def weigh(
    logits, temperature, repetition, presence, frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits,
    tokens, ancestors, n_slots, tree_status, top_k, top_p,
    tops,  # [B * T, blocks]
    thresholds,  # [B * T, 2, 16] f32, of both passes
    sums,  # [B * T, 2, PARTS, 2, 16] i64, numbers and weights of each part
    T, V, M, blocks,
    span,  # tokens per part, a multiple of STEP
    PASS: tl.constexpr, BLOCKS: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b = row // T
    slot = Slot(
        logits + row * V, tl.load(temperature + b), b, row % T, live_slots(b, n_slots, tree_status, T), T, V, M,
        repetition, presence, frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits, tokens, ancestors,
    )  # fmt: skip
    k, p = tl.load(top_k + b), tl.load(top_p + b)
    peak = _NEVER
    if (slot.t < slot.live) & (slot.scale > 0) & ((k > 0) | (p < 1)):
        place = tl.arange(0, BLOCKS)
        peak = tl.max(tl.load(tops + row * blocks + place, mask=place < blocks, other=_NEVER))
    if peak > _NEVER:
        limits = first_thresholds(peak)
        if PASS == 1:
            limits, number, weight = read_sums(thresholds, sums, row, 0, PARTS)
            bracket, _, _, _ = open_bracket(peak, limits, number, weight, k, p)
            limits = thresholds_between(bracket.low, bracket.high)
        end = tl.minimum((part + 1) * span, V)
        number, weight = sums_above(slot, limits, peak, part * span, end, STEP)
        j = tl.arange(0, _THRESHOLDS)
        if part == 0:
            tl.store(thresholds + (row * 2 + PASS) * _THRESHOLDS + j, limits)
        place = ((row * 2 + PASS) * PARTS + part) * (2 * _THRESHOLDS) + j
        tl.store(sums + place, number)
        tl.store(sums + place + _THRESHOLDS, weight)


@triton.jit
def choose(
    logits, temperature, repetition, presence, frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits,
    tokens, ancestors, n_slots, tree_status, seed, position, top_k, top_p, log_min_p,
    tops,  # [B * T, blocks]
    bounds,
    thresholds,
    sums,
    gathered,  # [B * T, CAPACITY] f32, written and read here
    choice,  # [B, T]
    status,  # [B]
    T, V, M, blocks,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = row // T
    slot = Slot(
        logits + row * V, tl.load(temperature + b), b, row % T, live_slots(b, n_slots, tree_status, T), T, V, M,
        repetition, presence, frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits, tokens, ancestors,
    )  # fmt: skip
    best = tl.full([], _NO_KEY, tl.int64)
    if slot.t < slot.live:
        k, p, least_gap = tl.load(top_k + b), tl.load(top_p + b), tl.load(log_min_p + b)
        place = tl.arange(0, BLOCKS)
        top = tl.load(tops + row * blocks + place, mask=place < blocks, other=_NEVER)
        bound = tl.load(bounds + row * blocks + place, mask=place < blocks, other=_NEVER)
        peak = tl.max(top)
        cut, last_id = _NEVER, _LAST  # tokens at the cut stay up to this id
        if (slot.scale > 0) & (peak > _NEVER):
            if (k > 0) | (p < 1):
                own = gathered + row * CAPACITY
                cut, last_id = find_cut(slot, thresholds, sums, own, row, k, p, peak, PARTS, STEP, CAPACITY)
            bound = tl.where((top >= cut) & (top - peak >= least_gap), bound, _NEVER)
        limit = tl.max(bound)
        while limit > _NEVER:
            block = tl.min(tl.where(bound == limit, place, _LAST))
            token = block * _BLOCK + tl.arange(0, _BLOCK)
            x = scores(slot, token)
            stays = x > _NEVER
            slack = 0.0
            if slot.scale > 0:
                stays = stays & ((x > cut) | ((x == cut) & (token <= last_id))) & (x - peak >= least_gap)
                x += gumbel(random_bits(tl.load(seed + b), tl.load(position + row), token))
                slack = 2 * RATE_ERROR + tl.abs(limit) * 4.8e-7  # of the bound and of both roundings
            best = tl.maximum(best, tl.max(tl.where(stays, packed(x, token), _NO_KEY)))
            bound = tl.where(place == block, _NEVER, bound)
            limit = tl.max(bound)
            if (best > _NO_KEY) & (limit + slack <= packed_value(best)):
                limit = _NEVER
        if best == _NO_KEY:
            tl.atomic_max(status + b, 1)
    tl.store(choice + row, tl.where(best > _NO_KEY, packed_index(best), -1))
