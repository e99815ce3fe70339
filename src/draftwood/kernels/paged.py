"""What the torch implementations of paged attention share: live prefixes gathered into one padded batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


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


def prefix_pages(page_table: Tensor, lengths: Sequence[int], n_tail: int, page: int) -> Tensor:
    """[B * m] i32, the pages of each row's prefix; page 0 fills up shorter rows and makes room for a tail.

    Only entries of live pages are used of page_table [B, M] i32.
    """
    n_live = -(-max(lengths) // page)
    ids = page_table[:, :n_live]
    if min(lengths) < max(lengths):
        ids = ids.masked_fill(past_end([-(-n // page) for n in lengths], n_live, ids.device), 0)
    return pad(ids, (0, -(-(max(lengths) + n_tail) // page) - n_live)).flatten()


def gather_prefix(pages: Tensor, ids: Tensor, n_prefix: int, tail: Tensor) -> Tensor:
    """Each row's prefix out of its pages, then its tail.

    Args:
        pages: [n_pages, page, ...].
        ids: of `prefix_pages`.
        n_prefix: the longest prefix.
        tail: [B, n, ...], n > 0.

    Returns:
        [B, n_prefix + n, ...]; what lies between a row's length and the longest is whatever the pool holds.
    """
    B, n = tail.shape[:2]
    gathered = pages.index_select(0, ids).view(B, -1, *pages.shape[2:]).narrow(1, 0, n_prefix + n)
    gathered.narrow(1, n_prefix, n).copy_(tail)  # over the last page's tail
    return gathered
