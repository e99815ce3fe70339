"""What the torch implementations of paged attention share: live prefixes gathered into one padded batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def similar_lengths(lengths: Sequence[int]) -> Iterable[list[int]]:
    """The rows, grouped so that lengths from 64 on are within a factor of two of their group's longest.

    A group can share a padded batch: none of its rows pays for a far longer one.
    """
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        groups.setdefault((length >> 6).bit_length(), []).append(row)
    return groups.values()


def past_end(lengths: Sequence[int], size: int, device: torch.device) -> Tensor:
    """[B, size] bool, true at or past each row's length."""
    return torch.arange(size, device=device) >= torch.tensor(lengths, device=device)[:, None]


def gather_prefix(pages: Tensor, page_table: Tensor, lengths: Sequence[int], tail: Tensor) -> Tensor:
    """Each row's prefix out of its pages, then its tail.

    Args:
        pages: [n_pages, page, ...].
        page_table: [B, M] i32; only entries of live pages are used.
        lengths: B prefix lengths.
        tail: [B, n, ...], n > 0.

    Returns:
        [B, max(lengths) + n, ...]; what lies between a row's length and the longest is whatever the pool holds.
    """
    B, n = tail.shape[:2]
    page, n_prefix = pages.shape[1], max(lengths)
    n_live = -(-n_prefix // page)
    ids = page_table.new_zeros(B, -(-(n_prefix + n) // page))  # with room for the tail
    ids[:, :n_live] = page_table[:, :n_live]
    if min(lengths) < n_prefix:
        ids.masked_fill_(past_end([-(-length // page) for length in lengths], ids.shape[1], ids.device), 0)
    gathered = pages.index_select(0, ids.flatten()).view(B, -1, *pages.shape[2:])[:, : n_prefix + n]
    gathered[:, n_prefix:] = tail  # over the last page's tail
    return gathered
