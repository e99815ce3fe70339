"""`tree_build` on the host, for tensors of any device: a heap holds the frontier, one transfer each way per field."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float, c_int64
from heapq import heappop, heappush
from operator import ge

import torch
from torch import Tensor

from draftwood.tree import WORD, DraftTree, Status

_WORD_MASK = (1 << WORD) - 1
_NEVER = float("-inf")


def tree_build(
    root: Tensor,
    lp: Tensor,
    ids: Tensor,
    budget: Tensor | None = None,
    min_score: Tensor | None = None,
    *,
    slots: int,
) -> DraftTree:
    budgets = [slots] * len(lp) if budget is None else budget.tolist()
    floors = [_NEVER] * len(lp) if min_score is None else min_score.tolist()
    rows = [
        _build_row(*row, slots)
        for row in zip(root.tolist(), lp.tolist(), ids.tolist(), budgets, floors, strict=True)
    ]
    words = [[_words(bits, slots) for bits in row.ancestors] for row in rows]
    nodes = [[row.tokens for row in rows], [row.parents for row in rows], [row.depths for row in rows]]
    per_row = [[row.n_slots for row in rows], [row.status for row in rows]]
    tokens, parents, depths = torch.tensor(nodes, dtype=torch.int32, device=lp.device).unbind()
    n_slots, status = torch.tensor(per_row, dtype=torch.int32, device=lp.device).unbind()
    scores = torch.tensor([row.scores for row in rows], dtype=torch.float32, device=lp.device)
    ancestors = torch.tensor(words, dtype=torch.int64, device=lp.device)
    return DraftTree(tokens, parents, depths, scores, ancestors, n_slots, status)


def _words(bits: int, slots: int) -> list[int]:
    """The 64-bit words of a bit set, as signed numbers."""
    return [c_int64(bits >> at & _WORD_MASK).value for at in range(0, slots, WORD)]


class _Row:
    """One tree while it grows, inert slots included."""

    def __init__(self, root: int, slots: int, status: Status) -> None:
        self.tokens = [root] + [0] * (slots - 1)
        self.parents = [-1] * slots
        self.depths = [0] * slots
        self.scores = [0.0] + [_NEVER] * (slots - 1)
        self.ancestors = [1] + [0] * (slots - 1)
        self.n_slots = 1
        self.status = status


def _build_row(
    root: int,
    lp: list[list[float]],
    ids: list[list[int]],
    budget: int,
    min_score: float,
    slots: int,
) -> _Row:
    row = _Row(root, slots, _fault(lp, ids))
    if row.status is not Status.SOUND or not lp:
        return row
    D, K = len(lp), len(lp[0])
    frontier = [(-lp[0][0], 0, 0)]  # (-score, parent slot, rank), one offer per slot
    for slot in range(1, min(budget, slots)):
        if not frontier:
            break
        negated, parent, rank = heappop(frontier)
        score, depth = -negated, row.depths[parent] + 1
        if not (score >= min_score and score > _NEVER):
            break
        row.tokens[slot], row.parents[slot] = ids[depth - 1][rank], parent
        row.depths[slot], row.scores[slot] = depth, score
        row.ancestors[slot] = row.ancestors[parent] | 1 << slot
        row.n_slots = slot + 1
        # the fp64 sum of two fp32 numbers, rounded to fp32, is their fp32 sum
        if rank + 1 < K:
            sibling = c_float(row.scores[parent] + lp[depth - 1][rank + 1]).value
            heappush(frontier, (-sibling, parent, rank + 1))
        if depth < D:
            heappush(frontier, (-c_float(score + lp[depth][0]).value, slot, 0))
    return row


def _fault(lp: Sequence[list[float]], ids: Sequence[list[int]]) -> Status:
    for scores in lp:
        if not (scores[0] <= 0 and all(map(ge, scores, scores[1:]))):  # NaN compares false
            return Status.BAD_SCORE
    for scores, tokens in zip(lp, ids, strict=True):
        live = tokens[: len(scores) - scores.count(_NEVER)]
        if live and (min(live) < 0 or len(set(live)) < len(live)):
            return Status.BAD_TOKEN
    return Status.SOUND
