"""Reference of `tree_accept`."""

from __future__ import annotations

import numpy as np

from draftwood.kernels.tree_accept import Accepted, Done, Limits
from draftwood.tree import WORD, DraftTree, Status


def tree_accept(tree: DraftTree, choice: np.ndarray, limits: Limits, *, max_depth: int) -> Accepted:
    B = tree.B
    out = Accepted(
        path=np.full((B, max_depth + 1), -1, np.int32),
        emitted=np.full((B, max_depth + 1), -1, np.int32),
        n_path=np.zeros(B, np.int32),
        bonus=np.zeros(B, np.int32),
        done=np.zeros(B, np.int32),
    )
    for b in range(B):
        path = _accepted_slots(tree, choice, b)[: max_depth + 1]
        emitted = [int(tree.tokens[b, slot]) for slot in path[1:]] + [int(choice[b, path[-1]])]
        n, done = _cut(emitted, limits, b)
        out.path[b, :n], out.emitted[b, :n] = path[:n], emitted[:n]
        out.n_path[b], out.bonus[b], out.done[b] = n, emitted[n - 1], done
    return out


def _accepted_slots(tree: DraftTree, choice: np.ndarray, b: int) -> list[int]:
    n = int(tree.n_slots[b]) if tree.status[b] == Status.SOUND else 1
    match = 1  # bit i: slot i's token is what its parent chose
    for i in range(1, min(n, tree.T)):
        parent = int(tree.parents[b, i])
        if 0 <= parent < tree.T and tree.tokens[b, i] == choice[b, parent]:
            match |= 1 << i
    path = [0]
    for i in range(1, min(n, tree.T)):
        ancestors = sum(
            int(word) << (WORD * w) for w, word in enumerate(tree.ancestors[b, i].view(np.uint64))
        )
        if ancestors >> i & 1 and match & ancestors == ancestors:
            path.append(i)
    return path


def _cut(emitted: list[int], limits: Limits, b: int) -> tuple[int, Done]:
    """How many of the emitted tokens are kept, and whether the request ends with them."""
    max_new, context_left = max(1, int(limits.max_new[b])), max(1, int(limits.context_left[b]))
    limit = min(max_new, context_left)
    stop_ids = {int(s) for s in limits.stop_ids[b] if s >= 0}
    for n, token in enumerate(emitted[:limit], start=1):
        if token in stop_ids:
            return n, Done.STOP
    if len(emitted) <= limit and emitted[-1] < 0:
        return len(emitted), Done.FAILED
    if len(emitted) >= limit:
        return limit, Done.LENGTH if max_new <= context_left else Done.CONTEXT
    return len(emitted), Done.RUNNING
