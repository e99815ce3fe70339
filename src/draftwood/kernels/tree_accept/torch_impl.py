"""`tree_accept` on the host, for tensors of any device: two passes over the slots of each row, in plain integers."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.tree_accept import Accepted, Done, Limits
from draftwood.tree import WORD, DraftTree, Status

_WORD_MASK = (1 << WORD) - 1


def tree_accept(tree: DraftTree, choice: Tensor, limits: Limits, *, max_depth: int) -> Accepted:
    T, columns = choice.shape[1], max_depth + 1
    trees = (tree.tokens, tree.parents, tree.ancestors, tree.n_slots, tree.status, choice)
    bounds = (limits.stop_ids, limits.max_new, limits.context_left)
    paths, tokens, counts = [], [], []
    for row in zip(*(a.tolist() for a in (*trees, *bounds)), strict=True):
        token, parents, ancestors, n_slots, status, chosen, stop_ids, max_new, context_left = row
        live = min(max(n_slots, 1), T) if status == Status.SOUND else 1
        path, emitted = _walk(token, parents, ancestors, chosen, live, columns)
        n, done = _cut(emitted, stop_ids, max(1, max_new), max(1, context_left))
        padding = [-1] * (columns - n)
        paths.append(path[:n] + padding)
        tokens.append(emitted[:n] + padding)
        counts.append((n, emitted[n - 1], done))
    device = choice.device
    path_and_tokens = torch.tensor([paths, tokens], dtype=torch.int32, device=device)
    per_row = torch.tensor(list(zip(*counts, strict=True)), dtype=torch.int32, device=device)
    return Accepted(*path_and_tokens, *per_row)


def _walk(
    tokens: list[int],
    parents: list[int],
    ancestors: list[list[int]],
    choice: list[int],
    n: int,
    columns: int,
) -> tuple[list[int], list[int]]:
    """The accepted slots, at most `columns`, and the tokens they emit: one each."""
    match = 1
    for i in range(1, n):
        if 0 <= (parent := parents[i]) < len(choice) and tokens[i] == choice[parent]:
            match |= 1 << i
    path = [0]
    for i in range(1, n):
        if match >> i & 1:
            needed = sum((word & _WORD_MASK) << WORD * w for w, word in enumerate(ancestors[i]))
            if needed >> i & 1 and needed & ~match == 0:
                path.append(i)
    path = path[:columns]
    return path, [tokens[i] for i in path[1:]] + [choice[path[-1]]]


def _cut(emitted: list[int], stop_ids: list[int], max_new: int, context_left: int) -> tuple[int, Done]:
    """How many of the emitted tokens are kept, and whether the request ends with them."""
    limit = min(max_new, context_left)
    for n, token in enumerate(emitted[:limit], start=1):
        if token >= 0 and token in stop_ids:  # -1 pads
            return n, Done.STOP
    if len(emitted) <= limit and emitted[-1] < 0:
        return len(emitted), Done.FAILED
    if len(emitted) < limit:
        return len(emitted), Done.RUNNING
    return limit, Done.LENGTH if max_new <= context_left else Done.CONTEXT
