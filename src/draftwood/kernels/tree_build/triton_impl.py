"""tree_build in Triton: one warp per row. Every slot holds one offer; the best of them becomes the next slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.compile_case import CompileCase
from draftwood.tree import DraftTree, Status, n_words

_SOUND = tl.constexpr(int(Status.SOUND))
_BAD_SCORE = tl.constexpr(int(Status.BAD_SCORE))
_BAD_TOKEN = tl.constexpr(int(Status.BAD_TOKEN))
_NEVER = tl.constexpr(float("-inf"))
_LAST = tl.constexpr(0x7FFFFFFF)

# an offer is one number, slot | rank | depth, so that one reduction finds the smallest slot and what it offers
_TO_RANK = tl.constexpr(10)
_TO_SLOT = tl.constexpr(21)
_RANKS = tl.constexpr((1 << 11) - 1)
_DEPTHS = tl.constexpr((1 << 10) - 1)
_MOST = {"slots": 1024, "K": _RANKS.value, "D": _DEPTHS.value}
_TILE = 512  # candidates checked at a time


def tree_build(
    root: Tensor,
    lp: Tensor,
    ids: Tensor,
    budget: Tensor | None = None,
    min_score: Tensor | None = None,
    *,
    slots: int,
) -> DraftTree:
    """See `draftwood.kernels.tree_build.tree_build`. Raises `ValueError` for sizes past `_MOST`."""
    B, D, K = lp.shape
    for name, size in (("slots", slots), ("D", D), ("K", K)):
        if size > _MOST[name]:
            raise ValueError(f"tree_build: {name} must be at most {_MOST[name]}, got {size}")
    tree = DraftTree(
        tokens=ids.new_empty(B, slots),
        parents=ids.new_empty(B, slots),
        depths=ids.new_empty(B, slots),
        scores=lp.new_empty(B, slots),
        ancestors=ids.new_empty((B, slots, n_words(slots)), dtype=torch.int64),
        n_slots=ids.new_empty(B),
        status=ids.new_empty(B),
    )
    if B > 0:
        _build[(B,)](
            *(root.contiguous(), lp.contiguous(), ids.contiguous()),
            *(limit if limit is None else limit.contiguous() for limit in (budget, min_score)),
            *(tree.tokens, tree.parents, tree.depths, tree.scores, tree.ancestors, tree.n_slots, tree.status),
            *(D, K, slots),
            **_blocks(D, K, slots),
            num_warps=1,
        )
    return tree


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`."""
    cases = []
    for T in (32, 128):
        constexprs = _blocks(7, 32, T)
        arguments: dict[str, str | int] = {n: "*i32" for n in _build.arg_names if n not in constexprs}
        arguments |= {"lp": "*fp32", "min_score": "*fp32", "scores": "*fp32", "ancestors": "*i64"}
        arguments |= {"D": 7, "K": 32, "T": T}
        cases.append(CompileCase(f"T={T}", _build, arguments, constexprs, num_warps=1))
    return cases


def _blocks(D: int, K: int, T: int) -> dict[str, int]:
    columns = triton.next_power_of_2(max(1, K))
    return {
        "COLUMNS": columns,
        "ROWS": max(1, min(triton.next_power_of_2(max(1, D)), _TILE // columns)),
        "DEPTHS": triton.next_power_of_2(max(1, D)),
        "FIRST": min(32, triton.next_power_of_2(T)),
        "SECOND": min(64, triton.next_power_of_2(T)),
        "BLOCK": triton.next_power_of_2(T),
        "WORDS": n_words(T),
    }


@triton.jit
def _build(
    root,
    lp,  # [B, D, K]
    ids,
    budget,  # or None
    min_score,  # or None
    tokens,  # [B, T]
    parents,
    depths,
    scores,
    ancestors,  # [B, T, ceil(T / 64)]
    n_slots,
    status,
    D,
    K,
    T,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTHS: tl.constexpr,
    FIRST: tl.constexpr,  # up to so many slots a loop of their own, and up to so many
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    lp += b * D * K
    ids += b * D * K
    root_token = tl.load(root + b)
    wanted = T
    if budget is not None:
        wanted = tl.load(budget + b)
    floor = _NEVER
    if min_score is not None:
        floor = tl.load(min_score + b) + 0.0  # no -0.0
    # What a new slot needs stays in registers, by the depth of its parent: the log-probs of the new slot's first three
    # children and of the first child of the first.
    row = (tl.arange(0, DEPTHS) + 1) * K
    end = D * K
    firsts = tl.load(lp + row, mask=row < end, other=_NEVER)
    seconds = tl.load(lp + row + 1, mask=(row < end) & (K > 1), other=_NEVER)
    thirds = tl.load(lp + row + 2, mask=(row < end) & (K > 2), other=_NEVER)
    belows = tl.load(lp + row + K, mask=row + K < end, other=_NEVER)
    first = tl.load(lp, mask=end > 0, other=_NEVER) + 0.0
    second = tl.load(lp + 1, mask=(end > 0) & (K > 1), other=_NEVER)
    below_first = tl.load(lp + K, mask=end > K, other=_NEVER)
    fault = _fault(lp, ids, D, K, COLUMNS, ROWS)
    limit = tl.minimum(tl.maximum(wanted, 1), T)
    limit = tl.where((fault == _SOUND) & (floor <= 0.0), limit, 1)
    last = tl.where(floor > _NEVER, _bits(floor), _bits(_NEVER) - 1)

    slot = _slots(FIRST)
    score = tl.where(slot == 0, 0.0, _NEVER)
    origin = tl.full([FIRST], -1, tl.int32)  # the offer that became the slot
    offer = (slot << _TO_SLOT).to(tl.int32)  # slot | rank of its next child | its depth
    worth = tl.where(slot == 0, first, _NEVER)  # of the offer
    sibling = tl.where(slot == 0, second, _NEVER)  # log-prob of the rank after the one offered
    later = tl.full([FIRST], _NEVER, tl.float32)  # and of the rank after that
    below = tl.where(slot == 0, below_first, _NEVER)  # of the first child of the child offered
    n, chosen, next_rank, next_candidate = 1, 0, 2, 2
    n, chosen, next_rank, next_candidate, score, origin, offer, worth, sibling, later, below = _turns(
        lp, K, firsts, seconds, thirds, belows, last, limit, n, chosen, next_rank, next_candidate,
        score, origin, offer, worth, sibling, later, below, FIRST, FIRST,
    )  # fmt: skip
    if SECOND > FIRST:
        n, chosen, next_rank, next_candidate, score, origin, offer, worth, sibling, later, below = _turns(
            lp, K, firsts, seconds, thirds, belows, last, limit, n, chosen, next_rank, next_candidate,
            score, origin, offer, worth, sibling, later, below, FIRST, SECOND,
        )  # fmt: skip
    if BLOCK > SECOND:
        n, chosen, next_rank, next_candidate, score, origin, offer, worth, sibling, later, below = _turns(
            lp, K, firsts, seconds, thirds, belows, last, limit, n, chosen, next_rank, next_candidate,
            score, origin, offer, worth, sibling, later, below, SECOND, BLOCK,
        )  # fmt: skip
    slot = _slots(BLOCK)

    live = slot < n
    in_row = slot < T
    grown = live & (slot > 0)
    parent = tl.where(grown, origin >> _TO_SLOT, -1)
    candidate = (origin & _DEPTHS) * K + ((origin >> _TO_RANK) & _RANKS)
    token = tl.load(ids + candidate, mask=grown, other=0)
    token = tl.where(slot == 0, root_token, token)
    depth = offer & _DEPTHS
    tl.store(tokens + b * T + slot, token, mask=in_row)
    tl.store(parents + b * T + slot, parent, mask=in_row)
    tl.store(depths + b * T + slot, depth, mask=in_row)
    tl.store(scores + b * T + slot, score, mask=in_row)
    tl.store(n_slots + b, n)
    tl.store(status + b, fault)
    deepest = tl.max(depth)
    for word in tl.static_range(WORDS):
        place = ancestors + (b * T + slot) * WORDS + word
        tl.store(place, _ancestors(slot, parent, live, deepest, word), mask=in_row)


@triton.jit
def _slots(SIZE: tl.constexpr):
    return tl.max_contiguous(tl.arange(0, SIZE), 1)  # 32 slots per register


@triton.jit
def _longer(x, other, FROM: tl.constexpr, TO: tl.constexpr):
    """[TO] of x [FROM], `other` behind it."""
    x = tl.where(tl.arange(0, TO // FROM)[:, None] == 0, x[None, :], tl.full([1, 1], other, x.dtype))
    return tl.reshape(x, [TO])


@triton.jit
def _turns(
    lp, K, firsts, seconds, thirds, belows, last, limit, n, chosen, next_rank, next_candidate,
    score, origin, offer, worth, sibling, later, below,  # [ROOM]
    ROOM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Let a tree grow, until `limit` or SIZE slots; returns what changes, with room for SIZE slots. With more room than
    ROOM, these are taken already."""
    slot = _slots(SIZE)
    if SIZE > ROOM:
        score, origin = _longer(score, _NEVER, ROOM, SIZE), _longer(origin, -1, ROOM, SIZE)
        offer = tl.where(slot < ROOM, _longer(offer, 0, ROOM, SIZE), (slot << _TO_SLOT).to(tl.int32))
        worth, sibling = _longer(worth, _NEVER, ROOM, SIZE), _longer(sibling, _NEVER, ROOM, SIZE)
        later, below = _longer(later, _NEVER, ROOM, SIZE), _longer(below, _NEVER, ROOM, SIZE)
    best = tl.min(_bits(worth))
    while (n < tl.minimum(limit, SIZE)) & (best <= last):
        if SIZE > ROOM:
            tl.assume(n >= ROOM)
        is_best = _bits(worth) == best
        # The next best is found beside the offer taken, not after it: unless another slot offers as much, what replaces
        # the offer is known where the offer is.
        following = score + sibling
        instead = tl.minimum(_bits(following), _bits(worth + below))
        next_best = tl.min(tl.where(is_best, instead, _bits(worth)))
        smallest, largest = tl.min(tl.where(is_best, offer, _LAST)), tl.max(tl.where(is_best, offer, -1))
        tied = smallest != largest
        # This is `smallest`, put so that the compiler issues all three reductions before it waits for one.
        taken = tl.minimum(tl.minimum(smallest, largest).to(tl.uint32), next_best | 0x7FFFFFFF).to(tl.int32)
        # For the slot chosen in the turn before; the load takes less time than the reductions.
        loaded = tl.load(lp + next_candidate, mask=next_rank < K, other=_NEVER)
        later = tl.where(slot == chosen, loaded, later)
        chosen = taken >> _TO_SLOT
        rank = (taken >> _TO_RANK) & _RANKS
        depth = taken & _DEPTHS  # of the chosen slot
        is_new, is_chosen = slot == n, slot == chosen
        at_depth = tl.zeros([1], tl.int32) + depth
        taken_score = best.to(tl.float32, bitcast=True)
        head = taken_score + tl.gather(firsts, at_depth, 0)
        worth = tl.where(is_new, head, tl.where(is_chosen, following, worth))
        best = tl.where(tied, best, next_best)
        sibling = tl.where(is_new, tl.gather(seconds, at_depth, 0), tl.where(is_chosen, later, sibling))
        later = tl.where(is_new, tl.gather(thirds, at_depth, 0), later)
        below = tl.where(is_new, tl.gather(belows, at_depth, 0), below)
        next_rank, next_candidate = rank + 3, depth * K + rank + 3
        score = tl.where(is_new, taken_score, score)
        origin = tl.where(is_new, taken, origin)
        offer += tl.where(is_new, depth + 1, is_chosen.to(tl.int32) << _TO_RANK)
        n += 1
    return n, chosen, next_rank, next_candidate, score, origin, offer, worth, sibling, later, below


@triton.jit
def _bits(x):
    """The u32 of an f32 <= 0 that is not -0.0: smaller for a larger x."""
    return tl.cast(x, tl.float32).to(tl.uint32, bitcast=True)


@triton.jit
def _fault(lp, ids, D, K, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """What is wrong with one request's candidates [D, K]."""
    place = tl.max_contiguous(tl.arange(0, ROWS * COLUMNS), 1)  # so that a row of 32 is one register
    rank = place % COLUMNS
    column = tl.arange(0, COLUMNS)[None, :]
    bad_score = tl.zeros([ROWS * COLUMNS], tl.int1)
    bad_token = tl.zeros([ROWS * COLUMNS], tl.int1)
    repeats = tl.zeros([ROWS, COLUMNS], tl.int1)
    for start in range(0, D, ROWS):
        row = start + place // COLUMNS
        inside = (row < D) & (rank < K)
        score = tl.load(lp + row * K + rank, mask=inside, other=_NEVER)
        before = tl.load(lp + row * K + rank - 1, mask=inside & (rank > 0), other=0.0)
        token = tl.load(ids + row * K + rank, mask=inside, other=0)
        bad_score = bad_score | ~(score <= 0.0) | (score > before)  # NaN is not <= 0
        live = inside & (score > _NEVER)
        bad_token = bad_token | (live & (token < 0))
        mine = tl.reshape(tl.where(live, token, -1), [ROWS, COLUMNS])
        others = tl.reshape(tl.where(live, token, -2), [ROWS, COLUMNS])
        for shift in tl.range(1, COLUMNS // 2 + 1, loop_unroll_factor=8):  # each pair of a row once
            partner = tl.broadcast_to((column + shift) % COLUMNS, [ROWS, COLUMNS])
            repeats = repeats | (tl.gather(others, partner, 1) == mine)
    bad_token = bad_token | tl.reshape(repeats, [ROWS * COLUMNS])
    worst = tl.max(tl.where(bad_score, 2, bad_token.to(tl.int32)))
    return tl.where(worst == 2, _BAD_SCORE, tl.where(worst == 1, _BAD_TOKEN, _SOUND))


@triton.jit
def _ancestors(slot, parent, live, deepest, word):
    """[BLOCK] i64: one word of each live slot's bits, its own included; each turn doubles the steps up."""
    bits = _bit(slot, live, word) | _bit(parent, parent >= 0, word)
    above, steps = (
        _at(parent, parent, -1),
        2,
    )  # the slots whose bits are still to be added, and how far up they are
    while steps <= deepest:
        bits |= _at(bits, above, 0)
        above = _at(above, above, -1)
        steps *= 2
    return bits


@triton.jit
def _bit(slot, mask, word):
    one = tl.full(slot.shape, 1, tl.int64)
    return tl.where(mask & (slot // 64 == word), one << tl.maximum(slot % 64, 0).to(tl.int64), 0)


@triton.jit
def _at(x, slot, other):
    """x[slot], or `other` where there is no such slot."""
    return tl.where(slot >= 0, tl.gather(x, tl.maximum(slot, 0), 0), other)
