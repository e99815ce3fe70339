"""advance: the end of a round. Each row moves on, and what the host wants to know of the round is gathered in one table."""

from __future__ import annotations

from draftwood.kernels.registry import for_array
from draftwood.kernels.tree_accept import Accepted
from draftwood.tree import Array, DraftTree


def advance(
    root: Array,
    prefix_len: Array,
    max_new: Array,
    context_left: Array,
    live: Array,
    tree: DraftTree,
    accepted: Accepted,
    *,
    impl: str | None = None,
) -> Array:
    """Move the rows on that are live and go on after this round; all others stand still, now and from now on.

    Args:
        root: [B] i32, becomes the bonus.
        prefix_len: [B] i32, grows by n_path.
        max_new, context_left: [B] i32, shrink by it.
        live: [B] bool; what stays set are the rows whose `done` is RUNNING. These five are written in place.
        tree: of T slots.
        accepted: paths of up to C = D + 1 slots.
        impl: implementation name; None chooses by the type and device of `root`.

    Returns:
        [B, 2 + 2 C + 4 T] i32: done, n_slots, emitted, path, tokens, parents, depths, and the bits of the scores, as they are given.
    """
    fn = for_array("advance", root, impl)
    return fn(root, prefix_len, max_new, context_left, live, tree, accepted)
