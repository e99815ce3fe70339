"""Draft trees as `first_child` / `next_sibling` links, the form that SGLang-style engines exchange.

Links may come from anywhere, so reading them is a walk that visits each slot at most once and raises `TreeError`
for anything that is not exactly one tree over the live slots.
"""

from __future__ import annotations

import numpy as np

from draftwood.tree import Array, DraftTree, TreeError, from_parents


def to_links(tree: DraftTree) -> tuple[np.ndarray, np.ndarray]:
    """first_child and next_sibling, both [B, T] i32 with -1 for none; children in ascending slot order.

    Raises `TreeError` if the tree is not sound.
    """
    tree.check()
    t = tree.numpy()
    first_child, next_sibling = np.full((t.B, t.T), -1, np.int32), np.full((t.B, t.T), -1, np.int32)
    for b in range(t.B):
        for slot in range(int(t.n_slots[b]) - 1, 0, -1):
            parent = t.parents[b, slot]
            next_sibling[b, slot] = first_child[b, parent]
            first_child[b, parent] = slot
    return first_child, next_sibling


def from_links(
    tokens: Array, first_child: Array, next_sibling: Array, n_slots: Array, scores: Array | None = None
) -> DraftTree:
    """Numpy tree from tokens, first_child and next_sibling [B, T] i32, n_slots [B] i32 and scores [B, T] f32 (0).

    Slots from n_slots on are not read. The order of siblings is free.

    Raises:
        TreeError: naming row and slot, if n_slots is outside 1..T, a link leaves the live slots, a slot has two
            parents, none, or one that does not precede it (which a cycle always brings about), or the tree is
            unsound in another way, such as a token repeated among siblings.
        ValueError: if the shapes differ.
    """
    shape = np.shape(tokens)
    given = {"first_child": first_child, "next_sibling": next_sibling, "scores": scores}
    for name, array in given.items():
        if array is not None and np.shape(array) != shape:
            raise ValueError(
                f"from_links `{name}`: expected the shape of tokens {shape}, got {np.shape(array)}"
            )
    if len(shape) != 2 or np.shape(n_slots) != shape[:1]:
        raise ValueError(f"from_links: expected tokens [B, T], n_slots [B]; got {shape}, {np.shape(n_slots)}")
    parents = np.full(shape, -1, np.int32)
    rows = zip(np.asarray(first_child).tolist(), np.asarray(next_sibling).tolist(), strict=True)
    for b, (child_of, sibling_of) in enumerate(rows):
        n = int(n_slots[b])
        if not 1 <= n <= shape[1]:
            raise TreeError(b, 0, f"n_slots must be in 1..{shape[1]}, got {n}")
        parents[b, :n] = _parents(b, child_of[:n], sibling_of[:n])
    tree = from_parents(tokens, parents, n_slots, scores)
    tree.check()
    return tree


def _parents(row: int, first_child: list[int], next_sibling: list[int]) -> list[int]:
    """Parent of each slot, -1 for the root. Every step of the walk gives a slot its parent, so it ends."""
    n = len(first_child)
    parents = [-1] * n
    if next_sibling[0] != -1:
        raise TreeError(row, 0, f"the root must have no sibling, got {next_sibling[0]}")
    for parent in range(n):
        source, name, slot = parent, "first_child", first_child[parent]
        while slot != -1:
            if not 0 <= slot < n:
                raise TreeError(row, source, f"{name} must be -1 or in 0..{n - 1}, got {slot}")
            if slot <= parent:
                raise TreeError(row, source, f"{name} {slot} must come after its parent, slot {parent}")
            if parents[slot] != -1:
                raise TreeError(
                    row, source, f"{name} {slot} is reached twice, already a child of slot {parents[slot]}"
                )
            parents[slot] = parent
            source, name, slot = slot, "next_sibling", next_sibling[slot]
    for slot in range(1, n):
        if parents[slot] == -1:
            raise TreeError(row, slot, "no link reaches this live slot")
    return parents
