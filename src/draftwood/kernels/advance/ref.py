"""Reference of `advance`."""

from __future__ import annotations

import numpy as np

from draftwood.kernels.tree_accept import Accepted, Done
from draftwood.tree import DraftTree


def advance(
    root: np.ndarray,
    prefix_len: np.ndarray,
    max_new: np.ndarray,
    context_left: np.ndarray,
    live: np.ndarray,
    tree: DraftTree,
    accepted: Accepted,
) -> np.ndarray:
    """See `draftwood.kernels.advance.advance`."""
    for b in range(len(root)):
        live[b] = live[b] and accepted.done[b] == Done.RUNNING
        if live[b]:
            root[b] = accepted.bonus[b]
            prefix_len[b] += accepted.n_path[b]
            max_new[b] -= accepted.n_path[b]
            context_left[b] -= accepted.n_path[b]
    columns = (accepted.done[:, None], tree.n_slots[:, None], accepted.emitted, accepted.path)
    slots = (tree.tokens, tree.parents, tree.depths, tree.scores.view(np.int32))
    return np.concatenate((*columns, *slots), 1)
