"""embed: rows of the embedding table, each followed by those of a block's mask tokens where the drafter wants a block."""

from __future__ import annotations

from draftwood.kernels.registry import for_array
from draftwood.tree import Array


def embed(tokens: Array, table: Array, *, block: int = 1, filler: int = 0, impl: str | None = None) -> Array:
    """table[tokens[i]], then block - 1 times table[filler], for every i.

    Args:
        tokens: [N] i32, of the vocabulary.
        table: [V, d].
        block: rows per token, its own included.
        filler: token of the others.
        impl: implementation name; None chooses by the type and device of `tokens`.

    Returns:
        [N block, d].
    """
    fn = for_array("embed", tokens, impl)
    return fn(tokens, table, block=block, filler=filler)
