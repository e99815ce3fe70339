"""commit_kv in torch: the copies are listed on the host, then one gather and one scatter move all layers."""

from __future__ import annotations

import torch
from torch import Tensor


def commit_kv(
    pages: Tensor, tree_kv: Tensor, page_table: Tensor, prefix_len: Tensor, path: Tensor, n_path: Tensor
) -> None:
    """See `draftwood.kernels.commit_kv.commit_kv`. Reads paths on the host, which waits for the device on a GPU.

    `pages` must be viewable as [L, n_pages * page, C].
    """
    L, n_pages, page, C = pages.shape
    T, columns = tree_kv.shape[2], page_table.shape[1]
    source, target = [], []
    rows = zip(*(a.tolist() for a in (page_table, prefix_len, path, n_path)), strict=True)
    for b, (table, start, slots, n) in enumerate(rows):
        for position, slot in enumerate(slots[: max(n, 0)], start):
            column, offset = divmod(position, page)
            if 0 <= slot < T and 0 <= column < columns and 0 <= table[column] < n_pages:
                source.append(b * T + slot)
                target.append(table[column] * page + offset)
    index = torch.tensor([source, target], dtype=torch.int64, device=pages.device)
    latents = tree_kv.flatten(1, 2).index_select(1, index[0])
    pages.view(L, n_pages * page, C).index_copy_(1, index[1], latents)
