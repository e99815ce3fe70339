"""`DraftTree`: the one noun that build, verify, accept and commit share.

A batch of B draft trees as a struct of arrays, padded to T slots. Slot 0 is the root: the newest committed
token, whose own KV is not in the pages yet. The arrays are numpy arrays or torch tensors; this module needs
numpy only and knows nothing about where a tree comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any
"""A numpy array or a torch tensor; the shape and dtype are in the docstring of what uses it."""

WORD = 64


class Status(IntEnum):
    """Why a row is not sound. Kernels treat a row whose status is not `SOUND` as root-only."""

    SOUND = 0
    BAD_SCORE = 1  # NaN, above zero, or log-probs of one depth not descending
    BAD_TOKEN = 2  # negative, or the same token twice among siblings
    BAD_PARENT = 3  # not before its child, out of range, or depth/ancestors disagree with it
    BAD_COUNT = 4  # n_slots outside 1..T


class TreeError(ValueError):
    """A rule of the tree is broken; the message names the row, the slot and the rule."""

    def __init__(self, row: int, slot: int, rule: str) -> None:
        super().__init__(f"draft tree row {row}, slot {slot}: {rule}")
        self.row, self.slot, self.rule = row, slot, rule


def n_words(T: int) -> int:
    """Number of 64-bit ancestor words for T slots."""
    return -(-T // WORD)


@dataclass(frozen=True)
class DraftTree:
    """B trees of at most T slots each.

    Invariants, for 0 < i < n_slots: `parents[i] < i`, siblings have distinct tokens, `depths` and `ancestors`
    match `parents`. Slots >= n_slots are inert: token 0, parent -1, depth 0, score -inf, ancestors 0.
    Scores descend in trees made by `tree_build`; imported, pruned and scripted trees need not descend.
    """

    tokens: Array  # [B, T] i32
    parents: Array  # [B, T] i32, root -1
    depths: Array  # [B, T] i32, root 0
    scores: Array  # [B, T] f32, path log-prob, root 0
    ancestors: Array  # [B, T, W] i64, bit j of slot i: j is an ancestor of i or i itself; bit 63 is legal
    n_slots: Array  # [B] i32, root included
    status: Array  # [B] i32, `Status`

    @property
    def B(self) -> int:  # noqa: N802
        return int(self.tokens.shape[0])

    @property
    def T(self) -> int:  # noqa: N802
        return int(self.tokens.shape[1])

    def numpy(self) -> DraftTree:
        """The same trees as numpy arrays (a copy only where the data is on another device)."""
        return DraftTree(*(_to_numpy(getattr(self, f.name)) for f in fields(self)))

    def torch(self, device: Any = "cpu") -> DraftTree:
        """The same trees as torch tensors on `device`."""
        import torch

        return DraftTree(*(torch.as_tensor(getattr(self, f.name)).to(device) for f in fields(self)))

    def truncated(self, T: int) -> DraftTree:
        """The first T slots. Parents precede children, so any prefix of the slots is a tree."""
        if not 1 <= T <= self.T:
            raise ValueError(f"truncated: T must be in 1..{self.T}, got {T}")
        n_slots = self.n_slots.clip(max=T) if hasattr(self.n_slots, "clip") else self.n_slots
        return DraftTree(
            self.tokens[:, :T],
            self.parents[:, :T],
            self.depths[:, :T],
            self.scores[:, :T],
            self.ancestors[:, :T, : n_words(T)],
            n_slots,
            self.status,
        )

    def check(self, vocab_size: int | None = None) -> None:
        """Raise `TreeError` naming the row, slot and rule if an invariant is broken, or if status is set."""
        t = self.numpy()
        _check_shapes(t)
        for b in range(t.B):
            _check_row(t, b, vocab_size)


def from_parents(tokens: Array, parents: Array, n_slots: Array, scores: Array | None = None) -> DraftTree:
    """Numpy tree from tokens and parents [B, T] i32 and n_slots [B] i32; inert slots are reset.

    Raises `TreeError` if n_slots is outside 1..T or a parent does not precede its child.
    """
    tokens, parents = np.array(tokens, np.int32), np.array(parents, np.int32)
    n_slots = np.array(n_slots, np.int32)
    B, T = tokens.shape
    depths = np.zeros((B, T), np.int32)
    out_scores = np.full((B, T), -np.inf, np.float32)
    bits = np.zeros((B, T, n_words(T)), np.uint64)
    for b in range(B):
        n = int(n_slots[b])
        if not 1 <= n <= T:
            raise TreeError(b, 0, f"n_slots must be in 1..{T}, got {n}")
        parents[b, 0] = -1
        tokens[b, n:], parents[b, n:] = 0, -1
        out_scores[b, :n] = 0.0 if scores is None else scores[b, :n]
        for i in range(n):
            p = int(parents[b, i])
            if i > 0:
                if not 0 <= p < i:
                    raise TreeError(b, i, f"parent must be in 0..{i - 1}, got {p}")
                depths[b, i] = depths[b, p] + 1
                bits[b, i] = bits[b, p]
            bits[b, i, i // WORD] |= np.uint64(1) << np.uint64(i % WORD)
    status = np.zeros(B, np.int32)
    return DraftTree(tokens, parents, depths, out_scores, bits.view(np.int64), n_slots, status)


def root_only(tokens: Array, T: int = 1) -> DraftTree:
    """Numpy trees that hold just the root tokens [B]."""
    root = np.asarray(tokens, np.int32)
    padded = np.zeros((len(root), T), np.int32)
    padded[:, 0] = root
    return from_parents(padded, np.full((len(root), T), -1, np.int32), np.ones(len(root), np.int32))


def _to_numpy(a: Array) -> np.ndarray:
    return a.cpu().numpy() if hasattr(a, "cpu") else np.asarray(a)


def _check_shapes(t: DraftTree) -> None:
    B, T = t.tokens.shape
    expected = {
        "tokens": ((B, T), np.int32),
        "parents": ((B, T), np.int32),
        "depths": ((B, T), np.int32),
        "scores": ((B, T), np.float32),
        "ancestors": ((B, T, n_words(T)), np.int64),
        "n_slots": ((B,), np.int32),
        "status": ((B,), np.int32),
    }
    for name, (shape, dtype) in expected.items():
        a = getattr(t, name)
        if a.shape != shape or a.dtype != dtype:
            raise ValueError(
                f"draft tree `{name}`: expected {shape} {dtype.__name__}, got {a.shape} {a.dtype}"
            )


def _check_row(t: DraftTree, b: int, vocab_size: int | None) -> None:
    T, n = t.T, int(t.n_slots[b])
    if t.status[b] != Status.SOUND:
        raise TreeError(b, 0, f"status is {Status(int(t.status[b])).name}")
    if not 1 <= n <= T:
        raise TreeError(b, 0, f"n_slots must be in 1..{T}, got {n}")
    tokens, parents, depths = t.tokens[b].tolist(), t.parents[b].tolist(), t.depths[b].tolist()
    bits = t.ancestors[b].view(np.uint64)
    seen: set[tuple[int, int]] = set()
    for i in range(n):
        p = parents[i]
        own = np.zeros_like(bits[i])
        own[i // WORD] = np.uint64(1) << np.uint64(i % WORD)
        if i == 0:
            if p != -1:
                raise TreeError(b, 0, f"the root's parent must be -1, got {p}")
            depth = 0
        else:
            if not 0 <= p < i:
                raise TreeError(b, i, f"parent must be in 0..{i - 1}, got {p}")
            if (p, tokens[i]) in seen:
                raise TreeError(b, i, f"token {tokens[i]} appears twice among the children of slot {p}")
            seen.add((p, tokens[i]))
            own |= bits[p]
            depth = depths[p] + 1
        if tokens[i] < 0 or (vocab_size is not None and tokens[i] >= vocab_size):
            raise TreeError(b, i, f"token must be in 0..{(vocab_size or 2**31) - 1}, got {tokens[i]}")
        if depths[i] != depth:
            raise TreeError(b, i, f"depth must be {depth}, got {depths[i]}")
        if not np.array_equal(bits[i], own):
            raise TreeError(b, i, "ancestors must be the parent's bits plus the slot's own bit")
        if not t.scores[b, i] <= 0:  # NaN fails too
            raise TreeError(b, i, f"score must be a log-probability <= 0, got {t.scores[b, i]}")
    for i in range(n, T):
        inert = tokens[i] == 0 and parents[i] == -1 and depths[i] == 0 and not bits[i].any()
        if not (inert and np.isneginf(t.scores[b, i])):
            raise TreeError(b, i, "slots past n_slots must be inert: token 0, parent -1, depth 0, score -inf")
