"""commit_kv in torch: one gather and one scatter over all layers, with no wait for the device.

On CPU the index arithmetic runs on numpy views of the tensors, which costs a fraction.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from draftwood.tree import Array


def commit_kv(
    pages: Tensor, tree_kv: Tensor, page_table: Tensor, prefix_len: Tensor, path: Tensor, n_path: Tensor
) -> None:
    """See `draftwood.kernels.commit_kv.commit_kv`. `pages` must be viewable as [L, n_pages * page, C]."""
    L, n_pages, page, C = pages.shape
    arrays: list[Array] = [page_table, prefix_len, path, n_path]
    if pages.is_cpu:
        arrays = [a.numpy() for a in arrays]
    target, source, any_kept = map(torch.as_tensor, _entries(*arrays, tree_kv.shape[2], n_pages, page))
    positions = pages.view(L, n_pages * page, C)
    latents = tree_kv.flatten(1, 2).index_select(1, source)  # [L, B (D + 1), C]
    positions.index_copy_(1, target, torch.where(any_kept, latents, positions.index_select(1, target)))


def _entries(
    page_table: Array, prefix_len: Array, path: Array, n_path: Array, T: int, n_pages: int, page: int
) -> tuple[Array, Array, Array]:
    """Positions of the pool and slots of the batch [B (D + 1)] i64 to copy between, and whether any are to be.

    Selecting the entries to copy would need their number on the host. Instead an entry to be skipped repeats one
    that is not; if all are to be skipped, what is returned is at least within bounds.
    """
    on_host = isinstance(path, np.ndarray)
    where: Callable[..., Array] = np.where if on_host else torch.where
    arange: Callable[..., Array] = np.arange if on_host else partial(torch.arange, device=path.device)
    B, columns = page_table.shape
    step, row = arange(path.shape[1]), arange(B)[:, None]
    position = prefix_len[:, None] + step  # [B, D + 1] i64
    column = position // page
    known_column, slot = column.clip(0, columns - 1), path.clip(0, T - 1)
    owner = page_table.reshape(-1)[row * columns + known_column]
    known_owner = owner.clip(0, n_pages - 1)
    keep = (step < n_path[:, None]) & (slot == path) & (known_column == column) & (known_owner == owner)
    keep = keep.reshape(-1)
    entry = where(keep, arange(len(keep)), (keep * 1).argmax())
    target = (known_owner * page + position % page).reshape(-1)
    return target[entry], (row * T + slot).reshape(-1)[entry], keep.any()
