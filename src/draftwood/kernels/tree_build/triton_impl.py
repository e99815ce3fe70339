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
    root: Tensor, lp: Tensor, ids: Tensor, budget: Tensor, min_score: Tensor, *, slots: int
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
            *(
                root.contiguous(),
                lp.contiguous(),
                ids.contiguous(),
                budget.contiguous(),
                min_score.contiguous(),
            ),
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
        "BLOCK": triton.next_power_of_2(T),
        "WORDS": triton.next_power_of_2(n_words(T)),
    }


@triton.jit
def _build(
    root,
    lp,  # [B, D, K]
    ids,
    budget,
    min_score,
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
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    lp += b * D * K
    ids += b * D * K
    fault = _fault(lp, ids, D, K, COLUMNS, ROWS)
    floor = tl.load(min_score + b) + 0.0  # no -0.0
    limit = tl.minimum(tl.maximum(tl.load(budget + b), 1), T)
    limit = tl.where((fault == _SOUND) & (floor <= 0.0), limit, 1)
    last = tl.where(floor > _NEVER, _bits(floor), _bits(_NEVER) - 1)

    slot = tl.arange(0, BLOCK)
    score = tl.where(slot == 0, 0.0, _NEVER)
    parent = tl.full([BLOCK], -1, tl.int32)
    candidate = tl.zeros([BLOCK], tl.int32)  # depth - 1, rank of what the slot is, as an index into ids
    offer = (slot << _TO_SLOT).to(tl.int32)  # slot | rank of its next child | its depth
    # Nothing between two offers waits for a load: the log-probs of every depth's first two candidates stay in
    # registers, and each slot holds that of the rank after the one it offers.
    row = tl.arange(0, DEPTHS) + 1  # of lp: what the children of a slot of depth `row - 1` will offer
    heads = tl.load(lp + row * K, mask=(row < D) & (K > 0), other=_NEVER)
    seconds = tl.load(lp + row * K + 1, mask=(row < D) & (K > 1), other=_NEVER)
    first = tl.load(lp, mask=(D > 0) & (K > 0), other=_NEVER)
    loaded = tl.load(lp + 1, mask=(D > 0) & (K > 1), other=_NEVER)
    worth = tl.where(slot == 0, first + 0.0, _NEVER)  # of the offer
    sibling = tl.full([BLOCK], _NEVER, tl.float32)

    n, chosen = 1, 0
    best = tl.min(_bits(worth))
    while (n < limit) & (best <= last):
        taken = tl.min(tl.where(_bits(worth) == best, offer, _LAST))
        sibling = tl.where(slot == chosen, loaded, sibling)  # of the turn before, whose load has arrived
        chosen = taken >> _TO_SLOT
        rank = (taken >> _TO_RANK) & _RANKS
        depth = taken & _DEPTHS  # of the chosen slot
        is_new, is_chosen = slot == n, slot == chosen
        at_depth = tl.zeros([1], tl.int32) + depth
        taken_score = best.to(tl.float32, bitcast=True)
        head = taken_score + tl.gather(heads, at_depth, 0)
        worth = tl.where(is_new, head, tl.where(is_chosen, score + sibling, worth))
        best = tl.min(_bits(worth))
        sibling = tl.where(is_new, tl.gather(seconds, at_depth, 0), sibling)
        loaded = tl.load(lp + depth * K + rank + 2, mask=rank + 2 < K, other=_NEVER)
        score = tl.where(is_new, taken_score, score)
        parent = tl.where(is_new, chosen, parent)
        candidate = tl.where(is_new, depth * K + rank, candidate)
        offer += tl.where(is_new, depth + 1, is_chosen.to(tl.int32) << _TO_RANK)
        n += 1

    live = slot < n
    in_row = slot < T
    token = tl.load(ids + candidate, mask=live & (slot > 0), other=0)
    token = tl.where(slot == 0, tl.load(root + b), token)
    depth = offer & _DEPTHS
    tl.store(tokens + b * T + slot, token, mask=in_row)
    tl.store(parents + b * T + slot, parent, mask=in_row)
    tl.store(depths + b * T + slot, depth, mask=in_row)
    tl.store(scores + b * T + slot, score, mask=in_row)
    tl.store(n_slots + b, n)
    tl.store(status + b, fault)
    words = (T + 63) // 64
    word = tl.arange(0, WORDS)[None, :]
    place = ancestors + (b * T + slot[:, None]) * words + word
    tl.store(place, _ancestors(parent, live, tl.max(depth), WORDS), mask=in_row[:, None] & (word < words))


@triton.jit
def _bits(x):
    """The u32 of an f32 <= 0 that is not -0.0: smaller for a larger x."""
    return tl.cast(x, tl.float32).to(tl.uint32, bitcast=True)


@triton.jit
def _fault(lp, ids, D, K, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """What is wrong with one request's candidates [D, K]."""
    rank = tl.arange(0, COLUMNS)[None, :]
    bad_score = tl.zeros([ROWS, COLUMNS], tl.int1)
    bad_token = tl.zeros([ROWS, COLUMNS], tl.int1)
    for start in range(0, D, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < D) & (rank < K)
        score = tl.load(lp + row * K + rank, mask=inside, other=_NEVER)
        before = tl.load(lp + row * K + rank - 1, mask=inside & (rank > 0), other=0.0)
        bad_score = bad_score | ~(score <= 0.0) | (score > before)  # NaN is not <= 0
        live = inside & (score > _NEVER)
        token = tl.load(ids + row * K + rank, mask=live, other=0)
        bad_token = bad_token | (token < 0)
        n_live = tl.sum(live.to(tl.int32), 1)[:, None]  # the first of the row, if its scores descend
        equal = tl.zeros([ROWS, COLUMNS], tl.int32)
        for start_column in range(0, K, 8):
            for column in tl.static_range(8):
                here = start_column + column
                other = tl.load(ids + row * K + here, mask=here < n_live, other=-1)
                equal += (other == token).to(tl.int32)
        bad_token = bad_token | (live & (equal > 1))
    worst = tl.where(bad_score, 2, bad_token.to(tl.int32))
    worst = tl.max(tl.max(worst, 1), 0)
    return tl.where(worst == 2, _BAD_SCORE, tl.where(worst == 1, _BAD_TOKEN, _SOUND))


@triton.jit
def _ancestors(parent, live, deepest, WORDS: tl.constexpr):
    """[BLOCK, WORDS] i64: each live slot's bits, its own included; each turn doubles the steps up that are seen."""
    slot = tl.arange(0, parent.shape[0])[:, None]
    word = tl.arange(0, WORDS)[None, :]
    one = tl.full([parent.shape[0], WORDS], 1, tl.int64)
    bits = tl.where(live[:, None] & (slot // 64 == word), one << (slot % 64).to(tl.int64), 0)
    above = parent[:, None] + tl.zeros([1, WORDS], tl.int32)  # slots whose bits are still to be added
    steps = 1
    while steps <= deepest:
        at = tl.maximum(above, 0)
        bits = bits | tl.where(above >= 0, tl.gather(bits, at, 0), 0)
        above = tl.where(above >= 0, tl.gather(above, at, 0), -1)
        steps *= 2
    return bits
