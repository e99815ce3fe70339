"""Reference of `tree_build`: every slot in the tree offers one child, and the best offer becomes the next slot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from draftwood.tree import DraftTree, Status, from_parents


def tree_build(
    root: np.ndarray,
    lp: np.ndarray,
    ids: np.ndarray,
    budget: np.ndarray | None = None,
    min_score: np.ndarray | None = None,
    *,
    slots: int,
) -> DraftTree:
    B = lp.shape[0]
    budget = np.full(B, slots) if budget is None else budget
    min_score = np.full(B, -np.inf) if min_score is None else min_score
    tokens, parents = np.zeros((B, slots), np.int32), np.full((B, slots), -1, np.int32)
    scores = np.zeros((B, slots), np.float32)
    n_slots, status = np.ones(B, np.int32), np.zeros(B, np.int32)
    for b in range(B):
        status[b] = fault(lp[b], ids[b])
        limit = int(np.clip(budget[b], 1, slots)) if status[b] == Status.SOUND else 1
        grown = _grow(lp[b], limit, min_score[b])
        n_slots[b] = len(grown)
        tokens[b, 0] = root[b]
        for i, (parent, depth, rank, score) in enumerate(grown[1:], start=1):
            tokens[b, i], parents[b, i], scores[b, i] = ids[b, depth - 1, rank], parent, score
    return replace(from_parents(tokens, parents, n_slots, scores), status=status)


def fault(lp: np.ndarray, ids: np.ndarray) -> Status:
    """What is wrong with one request's candidates [D, K]."""
    if not (lp <= 0).all() or (lp[:, 1:] > lp[:, :-1]).any():  # NaN is not <= 0
        return Status.BAD_SCORE
    for row, score in zip(ids, lp, strict=True):
        live = row[score > -np.inf]
        if (live < 0).any() or len(np.unique(live)) < len(live):
            return Status.BAD_TOKEN
    return Status.SOUND


def _grow(lp: np.ndarray, limit: int, min_score: np.float32) -> list[tuple[int, int, int, np.float32]]:
    """(parent, depth, rank, score) of each slot, in the order taken; at most `limit`."""
    D, K = lp.shape
    grown = [(-1, 0, 0, np.float32(0.0))]
    taken = [0]  # per slot: children already in the tree, hence the rank of the one it offers
    while len(grown) < limit:
        offers = [
            (_add(score, lp[depth, taken[slot]]), slot, depth + 1, taken[slot])
            for slot, (_, depth, _, score) in enumerate(grown)
            if depth < D and taken[slot] < K
        ]
        if not offers:
            break
        score, parent, depth, rank = max(
            offers, key=lambda offer: offer[0]
        )  # the first of equals: smaller slot
        if not (score >= min_score and score > -np.inf):
            break
        grown.append((parent, depth, rank, score))
        taken[parent] += 1
        taken.append(0)
    return grown


def _add(a: np.float32, b: np.float32) -> np.float32:
    with np.errstate(over="ignore"):  # a sum too low for fp32 is -inf and never taken
        return np.float32(a + b)
