"""commit_kv in torch: one gather and one scatter over all layers, with no wait for the device.

On CPU the index arithmetic runs on numpy views of the tensors, which costs a third.
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
    entries = partial(_entries, T=tree_kv.shape[2], n_pages=n_pages, page=page)
    arrays = page_table, prefix_len, path, n_path
    if pages.is_cpu:
        target, source, any_kept = map(torch.from_numpy, entries(*(a.numpy() for a in arrays)))
    else:
        target, source, any_kept = entries(*arrays)
    positions = pages.view(L, n_pages * page, C)
    latents = tree_kv.flatten(1, 2).index_select(1, source)  # [L, B (D + 1), C]
    latents = latents.where(any_kept, positions.index_select(1, target))
    positions.index_copy_(1, target, latents)


def _entries(
    page_table: Array, prefix_len: Array, path: Array, n_path: Array, *, T: int, n_pages: int, page: int
) -> tuple[Array, Array, Array]:
    """Positions of the pool and slots of the batch [B (D + 1)] i64 to copy between, and whether any are to be [1].

    Selecting the entries to copy would need their number on the host. Instead an entry to be skipped repeats one
    that is not; if all are to be skipped, all are 0.
    """
    on_host = isinstance(path, np.ndarray)
    arange: Callable[..., Array] = np.arange if on_host else partial(torch.arange, device=path.device)
    where: Callable[..., Array] = np.where if on_host else torch.where
    B, columns = page_table.shape
    step, row = arange(path.shape[1]), arange(B)[:, None]
    position = prefix_len[:, None] + step  # [B, D + 1] i64
    column = position // page
    keep = (step < n_path[:, None]) & (path >= 0) & (path < T) & (column >= 0) & (column < columns)
    owner = page_table.reshape(-1)[row * columns + column * keep]
    keep = (keep & (owner >= 0) & (owner < n_pages)).reshape(1, -1)
    any_kept = keep.any(1)
    entry = where(keep[0], arange(keep.shape[1]), (keep * 1).argmax())
    target, source = owner * page + position % page, row * T + path
    return target.reshape(-1)[entry] * any_kept, source.reshape(-1)[entry] * any_kept, any_kept
