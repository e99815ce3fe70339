"""The device code of `sample`: four launches, of which rows without top-p need the first two, and a batch without filters has no more.

`survey` reads every logit once and leaves, per block of 512 tokens, the largest x and an upper bound of x + noise, and per
tile the sum of exp(x). `pick` looks into blocks in the order of their bounds until no other can hold a better token. Without a filter two
blocks and approximate noise nearly always tell the winner. A
top-k cut it finds exactly first, among the few tokens above the k-th largest block. Top-p alone cuts too far down for
that, but the winner is the best token that it keeps, and the best of all is kept with probability top_p. So `pick` takes
the three best, `weigh`, many programs to a row, sums the weights before each, and `settle` tells whether one is
kept. If none is, the search goes on among the tokens before them; if the fp32 sums can't tell, the cut is found exactly.

x is the logit after step 4 of the contract.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.kernels.noise.triton_impl import gumbel, random_bits, tile_bits, upper_bound
from draftwood.kernels.sample.triton_cut import Gathered, find_cut
from draftwood.kernels.sample.triton_nucleus import (
    candidate_logits,
    candidates,
    foremost,
    verdict,
    weight_beside,
    weights_before,
)
from draftwood.kernels.sample.triton_scores import (
    STRIPES,
    TILE,
    Slot,
    first_of_tile,
    largest_of_blocks,
    live_slots,
    processed,
    scaled,
    scores,
)
from draftwood.kernels.sample.triton_search import (
    HELD,
    Limits,
    leader,
    leaders,
    list_blocks,
    of_blocks,
    search,
)
from draftwood.kernels.triton_ops import packed, packed_index

_TILE = tl.constexpr(TILE)
_STRIPES = tl.constexpr(STRIPES)
_HELD = tl.constexpr(HELD)
_WANTED = tl.constexpr(3)
_LOG2_E = tl.constexpr(1.4426950408889634)
_NEVER = tl.constexpr(float("-inf"))
_NO_KEY = tl.constexpr(-(2**63))
_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def survey(
    logits, temperature, repetition, presence, frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits,
    tokens, ancestors, n_slots, tree_status, seed, position, top_k, top_p, log_min_p,
    tops,  # [B * T, 4 tiles] f32
    bounds,
    weights,  # [B * T, tiles] f32, sums relative to the largest x of the tile
    status,  # [B], set to 0
    x_out,  # [B * T, v] f32 or None: x of rows with a filter
    T, V, M, offset, v,
):  # fmt: skip
    row, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b = row // T
    slot = Slot(
        logits + row * v - offset, offset, offset + v, tl.load(temperature + b), tl.load(seed + b),
        tl.load(position + row), b, row % T, live_slots(b, n_slots, tree_status, T), T, V, M, repetition, presence,
        frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits, tokens, ancestors,
    )  # fmt: skip
    if (slot.t == 0) & (tile == 0):
        tl.store(status + slot.b, 0)
    if slot.t < slot.live:
        token = first_of_tile(slot, tile) + tl.arange(0, _TILE)
        x = processed(slot, token)
        block = (row * tiles + tile) * _STRIPES + tl.arange(0, _STRIPES)
        tl.store(tops + block, scaled(slot, largest_of_blocks(x)))
        if slot.scale > 0:
            inverse = 1.0 / slot.scale
            p = tl.load(top_p + slot.b)
            if p < 1:
                top = tl.max(x)
                below = (x - tl.where(top > _NEVER, top, 0.0)) * (inverse * _LOG2_E)
                tl.store(weights + row * tiles + tile, tl.sum(tl.exp2(below)))
            if x_out is not None:  # noqa: SIM102 - the filters are known at run time only
                if (p < 1) | (tl.load(top_k + slot.b) > 0) | (tl.load(log_min_p + slot.b) > _NEVER):
                    inside = (token >= slot.first) & (token < slot.end)
                    tl.store(x_out + row * v + token - offset, scaled(slot, x), mask=inside)
            noise = upper_bound(tile_bits(slot.seed, slot.position, first_of_tile(slot, tile), _TILE))
            x = tl.fma(x, inverse, noise)  # a bound may be off by two roundings
        tl.store(bounds + block, largest_of_blocks(x))


@triton.jit
def pick(
    logits, temperature, repetition, presence, frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits,
    tokens, ancestors, n_slots, tree_status, seed, position, top_k, top_p, log_min_p,
    tops,
    bounds,
    held,  # [B * T, 4] i64, for `settle`
    listed,  # [B * T, blocks] i32, blocks that it looks into
    n_listed,  # [B * T] i32, -1 where there is nothing to settle
    gathered_x,  # [B * T, CAPACITY] f32, written and read here
    gathered_ids,
    choice,  # [B, T] i32
    status,  # [B]
    winners,  # None, or [B * T] i64 for the keys of a slice: written instead, of rows without a filter
    T, V, M, offset, v, blocks,
    FILTERS: tl.constexpr,  # whether a row may have one
    BLOCKS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = row // T
    slot = Slot(
        logits + row * v - offset, offset, offset + v, tl.load(temperature + b), tl.load(seed + b),
        tl.load(position + row), b, row % T, live_slots(b, n_slots, tree_status, T), T, V, M, repetition, presence,
        frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits, tokens, ancestors,
    )  # fmt: skip
    filtered, k, p, least_gap = tl.full([], 0, tl.int1), 0, 1.0, _NEVER
    if FILTERS:
        k, p, least_gap = tl.load(top_k + slot.b), tl.load(top_p + slot.b), tl.load(log_min_p + slot.b)
        filtered = (slot.scale > 0) & ((k > 0) | (p < 1) | (least_gap > _NEVER))
    own_tops, own_bounds, own = tops + row * blocks, bounds + row * blocks, listed + row * blocks
    best, count = tl.full([], _NO_KEY, tl.int64), -1
    if (slot.t < slot.live) & ((winners is None) | (filtered == 0)):
        pending = filtered & (k <= 0) & (p < 1)
        found, doubt = tl.full([_HELD], _NO_KEY, tl.int64), filtered
        if filtered == 0:
            best, doubt = leader(slot, own_bounds, blocks, BLOCKS)
            if (winners is not None) & (best > _NO_KEY) & (slot.scale > 0):
                token = packed_index(best)
                noise = gumbel(random_bits(slot.seed, slot.position, token))
                best = packed(scores(slot, token) + noise, token)
        if FILTERS:  # noqa: SIM102 - the filters are known at run time only
            if pending:
                peak = tl.max(of_blocks(own_tops, blocks, BLOCKS))
                found, doubt = leaders(slot, own_bounds, blocks, peak, least_gap, BLOCKS)
                best = tl.max(found)
        if doubt:
            peak, cut, last_id = tl.max(of_blocks(own_tops, blocks, BLOCKS)), _NEVER, _LAST
            if FILTERS:  # noqa: SIM102
                if filtered & (k > 0) & (peak > _NEVER):
                    room = Gathered(
                        own_tops, blocks, own, gathered_x + row * CAPACITY, gathered_ids + row * CAPACITY
                    )
                    cut, last_id = find_cut(slot, room, k, p, peak, BLOCKS, CAPACITY)
            limits = Limits(cut, last_id, peak, tl.where(filtered, least_gap, _NEVER))
            wanted = tl.where(pending, _WANTED, 1)
            found = search(slot, own_tops, own_bounds, blocks, limits, wanted, BLOCKS)
            best = tl.max(found)
        if FILTERS:  # noqa: SIM102
            if pending & (best > _NO_KEY):
                _, x = candidates(slot, found)
                tl.store(held + row * _HELD + tl.arange(0, _HELD), found)
                count = list_blocks(own, of_blocks(own_tops, blocks, BLOCKS), tl.min(x), BLOCKS)
        if (best == _NO_KEY) & (winners is None):
            tl.atomic_max(status + slot.b, 1)
    if winners is not None:
        tl.store(winners + row, best)
    else:
        tl.store(n_listed + row, count)
        tl.store(choice + row, tl.where(best > _NO_KEY, packed_index(best), -1))


@triton.jit
def weigh(
    logits, temperature, repetition, presence, frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits,
    tokens, ancestors, n_slots, tree_status, seed, position,
    tops,
    held,
    listed,
    n_listed,
    before,  # [B * T, PARTS, 2, 4] f32, of rows to settle
    T, V, M, offset, v, blocks,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(n_listed + row)
    if count >= 0:
        b = row // T
        slot = Slot(
            logits + row * v - offset, offset, offset + v, tl.load(temperature + b), tl.load(seed + b),
            tl.load(position + row), b, row % T, live_slots(b, n_slots, tree_status, T), T, V, M, repetition, presence,
            frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits, tokens, ancestors,
        )  # fmt: skip
        peak = tl.max(of_blocks(tops + row * blocks, blocks, BLOCKS))
        keys = tl.load(held + row * _HELD + tl.arange(0, _HELD))
        run = (count + PARTS - 1) // PARTS
        end = tl.minimum((part + 1) * run, count)
        surely, maybe = weights_before(slot, listed + row * blocks, part * run, end, keys, peak, 2)
        place = before + (row * PARTS + part) * 2 * _HELD + tl.arange(0, _HELD)
        tl.store(place, surely)
        tl.store(place + _HELD, maybe)


@triton.jit
def settle(
    logits, temperature, repetition, presence, frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits,
    tokens, ancestors, n_slots, tree_status, seed, position, top_p, log_min_p,
    tops,
    bounds,
    weights,
    held,
    listed,
    n_listed,
    before,
    gathered_x,
    gathered_ids,
    choice,
    status,
    T, V, M, offset, v, blocks,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(n_listed + row) >= 0:
        b = row // T
        slot = Slot(
            logits + row * v - offset, offset, offset + v, tl.load(temperature + b), tl.load(seed + b),
            tl.load(position + row), b, row % T, live_slots(b, n_slots, tree_status, T), T, V, M, repetition, presence,
            frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits, tokens, ancestors,
        )  # fmt: skip
        p, least_gap, rank = tl.load(top_p + slot.b), tl.load(log_min_p + slot.b), tl.arange(0, _HELD)
        own_tops, own_bounds, own_list = tops + row * blocks, bounds + row * blocks, listed + row * blocks
        peak = tl.max(of_blocks(own_tops, blocks, BLOCKS))
        keys = tl.load(held + row * _HELD + rank)
        parts = before + (row * PARTS + tl.arange(0, PARTS)[:, None]) * 2 * _HELD + rank[None, :]
        tile = tl.arange(0, BLOCKS // _STRIPES)
        tile_top = tl.max(tl.reshape(of_blocks(own_tops, blocks, BLOCKS), [BLOCKS // _STRIPES, _STRIPES]), 1)
        weight = tl.load(
            weights + row * (blocks // _STRIPES) + tile, mask=tile * _STRIPES < blocks, other=0.0
        )
        all_weight = tl.sum(tl.where(tile_top > _NEVER, weight * tl.exp(tile_top - peak), 0.0))
        surely, maybe = tl.sum(tl.load(parts), 0), tl.sum(tl.load(parts + _HELD), 0)
        own = weight_beside(slot, candidate_logits(slot, keys), peak)
        best, doubt = verdict(keys, surely, maybe, own, all_weight, p, peak)
        while (best == _NO_KEY) & (doubt == 0) & (tl.max(keys) > _NO_KEY):
            cut, after = foremost(*candidates(slot, keys))
            limits = Limits(cut, after - 1, peak, least_gap)
            keys = search(slot, own_tops, own_bounds, blocks, limits, _WANTED, BLOCKS)
            _, x = candidates(slot, keys)
            count = list_blocks(own_list, of_blocks(own_tops, blocks, BLOCKS), tl.min(x), BLOCKS)
            surely, maybe = weights_before(slot, own_list, 0, count, keys, peak, 1)
            own = weight_beside(slot, candidate_logits(slot, keys), peak)
            best, doubt = verdict(keys, surely, maybe, own, all_weight, p, peak)
        if doubt:
            room = Gathered(
                own_tops, blocks, own_list, gathered_x + row * CAPACITY, gathered_ids + row * CAPACITY
            )
            cut, last_id = find_cut(slot, room, 0, p, peak, BLOCKS, CAPACITY)
            limits = Limits(cut, last_id, peak, least_gap)
            best = tl.max(search(slot, own_tops, own_bounds, blocks, limits, 1, BLOCKS))
        tl.store(choice + row, tl.where(best > _NO_KEY, packed_index(best), -1))
        if best == _NO_KEY:
            tl.atomic_max(status + slot.b, 1)
