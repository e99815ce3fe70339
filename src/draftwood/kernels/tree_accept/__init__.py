"""tree_accept: the target's choices -> the accepted path, the bonus token and whether the request is done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from draftwood.kernels.registry import for_array
from draftwood.tree import Array, DraftTree


class Done(IntEnum):
    """Why a request ended with this round; a stop token wins over a limit reached by the same token."""

    RUNNING = 0
    STOP = 1  # a stop token was emitted
    LENGTH = 2  # max_new tokens were emitted
    CONTEXT = 3  # the context is full
    FAILED = 4  # the path ended where nothing could be chosen


@dataclass(frozen=True)
class Limits:
    """What may end a request on the device."""

    stop_ids: Array  # [B, S] i32, -1 padded; S may be 0
    max_new: Array  # [B] i32 >= 1, tokens the request may still emit
    context_left: Array  # [B] i32 >= 1, tokens that still fit into the context


@dataclass(frozen=True)
class Accepted:
    """A round emits the tokens of path[1:n_path], then the bonus: n_path in all."""

    path: Array  # [B, max_depth + 1] i32 slots, root first, -1 padded
    emitted: Array  # [B, max_depth + 1] i32 tokens, the bonus last, -1 padded
    n_path: Array  # [B] i32 >= 1
    bonus: Array  # [B] i32, the next root
    done: Array  # [B] i32, `Done`


def tree_accept(
    tree: DraftTree, choice: Array, limits: Limits, *, max_depth: int, impl: str | None = None
) -> Accepted:
    """Walk from the root along the children that the target itself would have chosen.

    Args:
        tree: B trees of T slots; rows with a status are taken as root-only.
        choice: [B, T] i32, the target's choice at each slot, -1 where it has none.
        limits: see `Limits`.
        max_depth: D; paths are cut to D drafted tokens.
        impl: implementation name; None chooses by the type and device of `choice`.

    match[0] holds; match[i] iff i < n_slots, the parent is in 0..T-1 and token[i] equals the choice there. The root
    is accepted; slot i is iff i < n_slots, bit i is in ancestors[i] and every ancestor bit is a match. The accepted
    slots, in slot order, are the path; the bonus is the choice at its end. The emitted sequence is cut after the
    first stop token, else at max_new or context_left (LENGTH if both are reached; one token is always kept):
    n_path shrinks to the number of tokens kept and the bonus becomes the last one of them. Where the
    choice at the path's end is negative and no cut comes before it, done is FAILED.

    Never reads or writes outside its row and terminates on any input bits.
    """
    fn = for_array("tree_accept", choice, impl)
    return fn(tree, choice, limits, max_depth=max_depth)  # type: ignore[no-any-return]
