"""What cases put where a kernel must not look: NaN, infinities, absurd indices, and page tables full of them."""

from __future__ import annotations

import numpy as np

from draftwood.kernels.rounding import round_to

ABSURD = (-1, 2**31 - 1, -(2**31), 1_000_003, -64)
"""Indices that fit i32 and nothing else."""


def poison(rng: np.random.Generator, width: int, dtype: str) -> np.ndarray:
    """[width] numbers that spoil any sum they enter, in `dtype`."""
    return round_to(rng.choice((np.nan, np.inf, -np.inf, 3e38), width), dtype)


def scattered_pages(rng: np.random.Generator, first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, int]:
    """Page table [B, M] i32 and the size of its pool, a few pages more than used.

    Columns first[b] <= m < end[b] of row b name pages of its own in random order, all others are absurd; M is two more
    than needed.
    """
    n_used = end - first
    pool = int(n_used.sum()) + 3
    ids = rng.permutation(pool).astype(np.int32)
    table = np.resize(np.array(ABSURD, np.int32), (len(end), int(end.max()) + 2))
    for b, n in enumerate(n_used):
        table[b, first[b] : end[b]], ids = ids[:n], ids[n:]
    return table, pool


def live_positions(page_table: np.ndarray, lengths: np.ndarray, pool: int, page: int) -> np.ndarray:
    """[pool, page] bool, true where some row's positions before its length are kept."""
    live = np.zeros((pool, page), bool)
    for row, length in zip(page_table, lengths, strict=True):
        position = np.arange(length)
        live[row[position // page], position % page] = True
    return live
