"""`tree_accept` in torch, on any device: no loop over slots, no transfer."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.tree_accept import Accepted, Done, Limits
from draftwood.tree import WORD, DraftTree, Status


def tree_accept(tree: DraftTree, choice: Tensor, limits: Limits, *, max_depth: int) -> Accepted:
    B, T = choice.shape
    columns = max_depth + 1
    accepted = _accepted(tree, choice)  # [B, T] bool
    rank = accepted.cumsum(1) - 1  # of an accepted slot: its place in the path
    place = torch.where(accepted, rank, columns).clamp(max=columns)  # the last column takes what is not in it
    slots = torch.arange(T, device=choice.device).expand(B, T)
    path = torch.full((B, columns + 1), -1, device=choice.device).scatter(1, place, slots)[:, :columns]

    n_path = (path >= 0).sum(1)
    end = path.gather(1, n_path[:, None] - 1)
    emitted = torch.cat([tree.tokens.gather(1, path[:, 1:].clamp(min=0)), path.new_zeros(B, 1).int()], 1)
    emitted = emitted.scatter(1, n_path[:, None] - 1, choice.gather(1, end))  # [B, columns], n_path of them

    n_path, done = _cut(emitted, n_path, limits)
    column = torch.arange(columns, device=choice.device)
    path = path.masked_fill(column >= n_path[:, None], -1)
    bonus = emitted.gather(1, n_path[:, None] - 1).squeeze(1)
    return Accepted(path.int(), n_path.int(), bonus, done)


def _accepted(tree: DraftTree, choice: Tensor) -> Tensor:
    T, W = choice.shape[1], tree.ancestors.shape[2]
    slot = torch.arange(T, device=choice.device)
    n = torch.where(tree.status == Status.SOUND, tree.n_slots, 1)
    live = slot < n[:, None]
    chosen = choice.gather(1, tree.parents.long().clamp(0, T - 1))
    match = live & (tree.parents >= 0) & (tree.parents < T) & (tree.tokens == chosen)
    match[:, 0] = True
    bits = torch.zeros(*match.shape[:1], W * WORD, dtype=torch.int64, device=choice.device)
    bits[:, :T] = match
    words = (bits.view(-1, W, WORD) << torch.arange(WORD, device=choice.device)).sum(2)  # disjoint bits
    missed = (tree.ancestors & ~words[:, None]).ne(0).any(2)
    own = (
        tree.ancestors.gather(2, (slot // WORD).expand(match.shape)[..., None]).squeeze(2) >> slot % WORD & 1
    )
    accepted: Tensor = live & ~missed & (own == 1)
    accepted[:, 0] = True
    return accepted


def _cut(emitted: Tensor, n: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """How many of the n emitted tokens [B, columns] are kept, and `Done`."""
    max_new, context_left = limits.max_new.clamp(min=1), limits.context_left.clamp(min=1)
    limit = torch.minimum(max_new, context_left)
    column = torch.arange(emitted.shape[1], device=emitted.device)
    stop_ids = limits.stop_ids[:, None, :]
    is_stop = ((emitted[:, :, None] == stop_ids) & (stop_ids >= 0)).any(2)
    inside = column < torch.minimum(n, limit)[:, None]
    first_stop = torch.where(is_stop & inside, column, emitted.shape[1]).amin(1)
    stopped, full = first_stop < emitted.shape[1], n >= limit
    ended = torch.where(max_new <= context_left, int(Done.LENGTH), int(Done.CONTEXT))
    done = torch.where(stopped, int(Done.STOP), torch.where(full, ended, int(Done.RUNNING)))
    kept = torch.where(stopped, first_stop + 1, torch.minimum(n, limit))
    return kept, done.int()
