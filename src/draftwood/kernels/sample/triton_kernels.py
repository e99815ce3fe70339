"""The device code of `sample`: four launches, and two for a batch without filters.

`survey` reads every logit once and leaves, per block of 512 tokens, the largest x, an upper bound of x + noise, and the sum
of exp(x). `pick` looks into the blocks with the largest bounds, two of a row without a filter and four of others;
approximate noise tells the best tokens but for one row in hundreds. Top-p cuts too far down to find its cut for every row,
but the winner is the best token that it keeps, and the best of all is kept with probability top_p. Often the sums of
the blocks that hold something before the best token prove that it is kept. Else `weigh`, many programs to a row, sums
the weights before the three best, and `settle` tells whether one is kept. Where there is room for all programs at once, those of
`weigh` have read the row and computed its weights by the time that `pick` ends. If none of the three is kept, the search goes on
among the tokens before them; where fp32 sums can't tell, integer sums do; where noise can't, `settle` searches with exact noise. It
also finds a top-k cut, among the few tokens above the k-th largest block, and searches below it.

x is the logit after step 4 of the contract.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.kernels.noise.triton_impl import gumbel, least_log2, random_bits, tile_bits
from draftwood.kernels.sample.triton_cut import Gathered, find_cut
from draftwood.kernels.sample.triton_nucleus import (
    TILES_OF_CHUNK,
    exact_verdict,
    foremost,
    logits_of,
    surely_kept,
    tokens_of,
    verdict,
    weight_beside,
    weights_before,
    weights_exactly_before,
    weights_of_blocks,
    weights_of_chunk,
)
from draftwood.kernels.sample.triton_scores import (
    STRIPES,
    TILE,
    Slot,
    by_block,
    candidates,
    first_of_tile,
    largest_of_blocks,
    live_slots,
    scaled,
    scores,
    smallest_of_blocks,
    sums_of_blocks,
)
from draftwood.kernels.sample.triton_search import (
    HELD,
    Limits,
    in_doubt,
    leaders,
    list_blocks,
    of_blocks,
    search,
)
from draftwood.kernels.triton_ops import packed, packed_index
from draftwood.kernels.triton_overlap import await_previous, begin_next

_TILE = tl.constexpr(TILE)
_STRIPES = tl.constexpr(STRIPES)
_CHUNK = tl.constexpr(TILES_OF_CHUNK * TILE)
_BLOCKS_OF_CHUNK = tl.constexpr(TILES_OF_CHUNK * STRIPES)
_HELD = tl.constexpr(HELD)
_WANTED = tl.constexpr(HELD - 1)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_NEVER = tl.constexpr(float("-inf"))
_NO_KEY = tl.constexpr(-(2**63))
_LAST = tl.constexpr(0x7FFFFFFF)
_DONE = tl.constexpr(0)
_TO_WEIGH = tl.constexpr(1)
_UNDONE = tl.constexpr(2)
_LOWEST_POWER = tl.constexpr(-200.0)  # of two: 0 in f32


@triton.jit
def survey(
    logits, temperature, repetition, presence, frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits,
    tokens, ancestors, n_slots, tree_status, seed, position, top_k, top_p, log_min_p,
    tops,  # [B * T, blocks] f32
    bounds,
    weights,  # sums relative to the largest x of the block
    status,  # [B], set to 0
    x_out,  # [B * T, v] f32 or None: x of rows with a filter
    T, V, M, offset, v, blocks,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    begin_next(OVERLAP)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b = row // T
    slot = Slot(
        logits + row * v - offset, offset, offset + v, tl.load(temperature + b), tl.load(seed + b),
        tl.load(position + row), b, row % T, live_slots(b, n_slots, tree_status, T), T, V, M, repetition, presence,
        frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits, tokens, ancestors,
    )  # fmt: skip
    if (slot.t == 0) & (tile == 0):
        tl.store(status + slot.b, 0)
    if slot.t < slot.live:
        rate, p = _LOG2_E / slot.scale, tl.load(top_p + slot.b)
        filtered = (p < 1) | (tl.load(top_k + slot.b) > 0) | (tl.load(log_min_p + slot.b) > _NEVER)
        token = first_of_tile(slot, tile) + tl.arange(0, _TILE)
        x = candidates(slot, token)
        values = by_block(x)
        top = tl.maximum(largest_of_blocks(values), _NEVER)
        place = row * blocks + tile * _STRIPES + tl.arange(0, _STRIPES)
        tl.store(tops + place, scaled(slot, top))
        bound = top
        if slot.scale > 0:
            if p < 1:
                above = tl.where(top > _NEVER, top, 0.0) * -rate
                below = tl.maximum(tl.fma(values, rate, above[None, :, None]), _LOWEST_POWER)
                tl.store(weights + place, sums_of_blocks(tl.exp2(below)))
            noise = least_log2(tile_bits(slot.seed, slot.position, first_of_tile(slot, tile), _TILE))
            under = smallest_of_blocks(
                by_block(tl.fma(x, -rate, noise))
            )  # a negated tensor takes an instruction
            bound = (32.0 - tl.minimum(under, -_NEVER)) * _LN_2  # may be off by some roundings
        tl.store(bounds + place, bound)
        if x_out is not None:  # noqa: SIM102 - the filters are known at run time only
            if filtered & (slot.scale > 0):
                inside = (token >= slot.first) & (token < slot.end)
                tl.store(x_out + row * v + token - offset, scaled(slot, tl.maximum(x, _NEVER)), mask=inside)


@triton.jit
def pick(
    logits, temperature, repetition, presence, frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits,
    tokens, ancestors, n_slots, tree_status, seed, position, top_k, top_p, log_min_p,
    tops,
    bounds,
    weights,
    held,  # [B * T, 4] i64: the three best of rows to weigh
    told,  # [B * T, 4] f32: their logits before step 4, inf where there is none
    of_all,  # [B * T, 2] f32: the largest x and all weight, relative to it
    tasks,  # [B * T] i32: what is left to do for the row
    choice,  # [B, T] i32
    status,  # [B]
    winners,  # None, or [B * T] i64 for the keys of a slice: written instead, of rows without a filter
    T, V, M, offset, v, blocks,
    FILTERS: tl.constexpr,  # whether a row may have one
    BLOCKS: tl.constexpr, OVERLAP: tl.constexpr,
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
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    own_tops, own_bounds = tops + row * blocks, bounds + row * blocks
    best, task = tl.full([], _NO_KEY, tl.int64), _DONE
    if (slot.t < slot.live) & ((winners is None) | (filtered == 0)):
        doubt = filtered
        if filtered == 0:
            keys, _, rest = leaders(slot, own_tops, own_bounds, blocks, 0.0, _NEVER, BLOCKS, 2)
            best, doubt = tl.max(keys), in_doubt(slot, keys, rest, 1)
            if (winners is not None) & (best > _NO_KEY) & (slot.scale > 0):
                token = packed_index(best)
                noise = gumbel(random_bits(slot.seed, slot.position, token))
                best = packed(scores(slot, token) + noise, token)
        elif FILTERS & (winners is None):  # noqa: SIM102 - k is known at run time only
            if k <= 0:
                top = of_blocks(own_tops, blocks, BLOCKS)
                peak = tl.max(top)
                weight = weights_of_blocks(own_tops, weights + row * blocks, blocks, peak, BLOCKS)
                keys, y, rest = leaders(slot, own_tops, own_bounds, blocks, peak, least_gap, BLOCKS, _HELD)
                best, doubt = tl.max(keys), in_doubt(slot, keys, rest, tl.where(p < 1, _WANTED, 1))
                if (p < 1) & (best > _NO_KEY) & (doubt == 0):
                    mine = tl.max(tl.where(keys == best, scaled(slot, y), _NEVER))
                    sums = tl.sum(tl.join(tl.where(top >= mine, weight, 0.0), weight), 0)
                    maybe, all_weight = tl.split(sums)
                    if surely_kept(maybe, tl.exp(mine - peak), all_weight, p, peak) == 0:
                        rank = tl.arange(0, _HELD)
                        worst = tl.max(tl.where(keys == tl.min(keys), rank, -1))
                        place = row * _HELD + tl.where(
                            rank == worst, _WANTED, rank - (rank > worst).to(tl.int32)
                        )
                        tl.store(held + place, tl.where(rank == worst, _NO_KEY, keys))
                        tl.store(told + place, tl.where((rank == worst) | (keys == _NO_KEY), float("inf"), y))
                        tl.store(of_all + row * 2, peak)
                        tl.store(of_all + row * 2 + 1, all_weight)
                        task = _TO_WEIGH
        if doubt:
            if FILTERS & (winners is None):
                task = _UNDONE
            else:
                limits = Limits(_NEVER, _LAST, 0.0, _NEVER)
                best = tl.max(search(slot, own_tops, own_bounds, blocks, limits, 1, BLOCKS))
        if (best == _NO_KEY) & (task == _DONE) & (winners is None):
            tl.atomic_max(status + slot.b, 1)
    if winners is not None:
        tl.store(winners + row, best)
    else:
        tl.store(tasks + row, task)
        tl.store(choice + row, tl.where(best > _NO_KEY, packed_index(best), -1))


@triton.jit
def weigh(
    logits, temperature, repetition, presence, frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits,
    tokens, ancestors, n_slots, tree_status, seed, position, top_k, top_p,
    tops,
    told,
    of_all,
    tasks,
    before,  # [B * T, parts, 2, 4] f32, of rows to weigh
    T, V, M, offset, v, blocks, parts,
    EARLY: tl.constexpr,  # a program has one chunk of tokens, and computes their weights before it is told what to do with them
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b = row // T
    slot = Slot(
        logits + row * v - offset, offset, offset + v, tl.load(temperature + b), tl.load(seed + b),
        tl.load(position + row), b, row % T, live_slots(b, n_slots, tree_status, T), T, V, M, repetition, presence,
        frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits, tokens, ancestors,
    )  # fmt: skip
    weight, top = tl.zeros([_CHUNK], tl.float32), 0.0
    if EARLY:  # noqa: SIM102 - the row is known at run time only
        if (slot.t < slot.live) & (slot.scale > 0) & (tl.load(top_p + b) < 1) & (tl.load(top_k + b) <= 0):
            weight, top = weights_of_chunk(slot, part)
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    if tl.load(tasks + row) == _TO_WEIGH:
        peak, own_told = tl.load(of_all + row * 2), told + row * _HELD
        if EARLY:
            sums = weights_before(slot, weight, top, own_told, peak)
        else:
            sums = tl.zeros([2 * _HELD], tl.float32)
            least = tl.min(scaled(slot, tl.load(own_told + tl.arange(0, _HELD))))
            chunks = (blocks + _BLOCKS_OF_CHUNK - 1) // _BLOCKS_OF_CHUNK
            run = (chunks + parts - 1) // parts
            for chunk in range(part * run, tl.minimum((part + 1) * run, chunks)):
                place = chunk * _BLOCKS_OF_CHUNK + tl.arange(0, _BLOCKS_OF_CHUNK)
                if tl.max(tl.load(tops + row * blocks + place, mask=place < blocks, other=_NEVER)) >= least:
                    weight, top = weights_of_chunk(slot, chunk)
                    sums += weights_before(slot, weight, top, own_told, peak)
        tl.store(before + (row * parts + part) * 2 * _HELD + tl.arange(0, 2 * _HELD), sums)


@triton.jit
def settle(
    logits, temperature, repetition, presence, frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits,
    tokens, ancestors, n_slots, tree_status, seed, position, top_k, top_p, log_min_p,
    tops,
    bounds,
    weights,
    held,
    told,
    of_all,
    tasks,
    before,
    listed,  # [B * T, blocks] i32, written and read here
    gathered_x,  # [B * T, CAPACITY] f32, and so is this
    gathered_ids,
    choice,
    status,
    T, V, M, offset, v, blocks, parts,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr, CAPACITY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = row // T
    slot = Slot(
        logits + row * v - offset, offset, offset + v, tl.load(temperature + b), tl.load(seed + b),
        tl.load(position + row), b, row % T, live_slots(b, n_slots, tree_status, T), T, V, M, repetition, presence,
        frequency, prompt_seen, counts, bias_ids, bias_values, mask_bits, tokens, ancestors,
    )  # fmt: skip
    k, p, least_gap = tl.load(top_k + b), tl.load(top_p + b), tl.load(log_min_p + b)
    await_previous(OVERLAP)
    task, rank = tl.load(tasks + row), tl.arange(0, _HELD)
    keys, y = tl.load(held + row * _HELD + rank), tl.load(told + row * _HELD + rank)
    peak, all_weight = tl.load(of_all + row * 2), tl.load(of_all + row * 2 + 1)
    part = tl.arange(0, PARTS)[:, None]
    place = before + (row * parts + part) * 2 * _HELD + rank[None, :]
    surely, maybe = (
        tl.sum(tl.load(place, mask=part < parts, other=0.0), 0),
        tl.sum(tl.load(place + _HELD, mask=part < parts, other=0.0), 0),
    )
    if task != _DONE:
        own_tops, own_bounds, own_list = tops + row * blocks, bounds + row * blocks, listed + row * blocks
        least_gap = tl.where(slot.scale > 0, least_gap, _NEVER)
        best = tl.full([], _NO_KEY, tl.int64)
        weighed = task == _TO_WEIGH
        if task == _UNDONE:
            peak = tl.max(of_blocks(own_tops, blocks, BLOCKS))
            all_weight = tl.sum(weights_of_blocks(own_tops, weights + row * blocks, blocks, peak, BLOCKS))
        if (slot.scale > 0) & (k <= 0) & (p < 1):
            cut, last_id, more = _NEVER, _LAST, peak > _NEVER
            while more:
                if weighed == 0:
                    limits = Limits(cut, last_id, peak, least_gap)
                    keys = search(slot, own_tops, own_bounds, blocks, limits, _WANTED, BLOCKS)
                    y = logits_of(slot, keys)
                    least = tl.min(scaled(slot, y))
                    count = list_blocks(own_list, of_blocks(own_tops, blocks, BLOCKS), least, BLOCKS)
                    surely, maybe = weights_exactly_before(
                        slot, own_list, 0, count, tokens_of(slot, keys), scaled(slot, y), peak
                    )
                own = weight_beside(slot, y, peak)
                best, doubt = verdict(keys, surely, maybe, own, all_weight, p, peak)
                if doubt:
                    best = exact_verdict(slot, keys, y, p, peak, 512)
                cut, last_id = foremost(tokens_of(slot, keys), scaled(slot, y))
                last_id -= 1
                weighed = tl.full([], 0, tl.int1)
                more = (best == _NO_KEY) & (tl.max(keys) > _NO_KEY)
        elif peak > _NEVER:
            cut, last_id = _NEVER, _LAST
            if (slot.scale > 0) & (k > 0):
                room = Gathered(
                    own_tops, blocks, own_list, gathered_x + row * CAPACITY, gathered_ids + row * CAPACITY
                )
                cut, last_id = find_cut(slot, room, k, p, peak, BLOCKS, CAPACITY)
            limits = Limits(cut, last_id, peak, least_gap)
            best = tl.max(search(slot, own_tops, own_bounds, blocks, limits, 1, BLOCKS))
        tl.store(choice + row, tl.where(best > _NO_KEY, packed_index(best), -1))
        if best == _NO_KEY:
            tl.atomic_max(status + slot.b, 1)
