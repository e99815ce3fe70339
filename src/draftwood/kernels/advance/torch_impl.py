"""advance in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.tree_accept import Accepted, Done
from draftwood.tree import DraftTree


def advance(
    root: Tensor,
    prefix_len: Tensor,
    max_new: Tensor,
    context_left: Tensor,
    live: Tensor,
    tree: DraftTree,
    accepted: Accepted,
) -> Tensor:
    """See `draftwood.kernels.advance.advance`."""
    live &= accepted.done == Done.RUNNING
    n = accepted.n_path * live
    torch.where(live, accepted.bonus, root, out=root)
    prefix_len += n
    max_new -= n
    context_left -= n
    columns = (accepted.done[:, None], tree.n_slots[:, None], accepted.emitted, accepted.path)
    slots = (tree.tokens, tree.parents, tree.depths, tree.scores.view(torch.int32))
    return torch.cat((*columns, *slots), 1)
