"""commit_kv in torch: one gather and one scatter over all layers, with no wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def commit_kv(
    pages: Tensor, tree_kv: Tensor, page_table: Tensor, prefix_len: Tensor, path: Tensor, n_path: Tensor
) -> None:
    """See `draftwood.kernels.commit_kv.commit_kv`.

    Selecting the entries to copy would need their number on the host. Instead an entry to be skipped repeats the copy
    of one that is not; if all are to be skipped, a position is overwritten with itself.
    """
    n_pages, page = pages.shape[1:3]
    B, T = tree_kv.shape[1:3]
    step = torch.arange(path.shape[1], device=path.device)
    position = prefix_len.long()[:, None] + step  # [B, D + 1]
    column = position.div(page, rounding_mode="floor")
    last = page_table.shape[1] - 1
    target = page_table.long().gather(1, column.clamp(0, last))
    slot = path.long()
    row = torch.arange(B, device=path.device)[:, None].expand_as(slot)
    keep = (step < n_path[:, None]) & (slot >= 0) & (slot < T)
    keep &= (column >= 0) & (column <= last) & (target >= 0) & (target < n_pages)
    keep = keep.flatten()
    entry = torch.arange(len(keep), device=path.device)
    entry = torch.where(keep, entry, keep.long().argmax())
    any_kept = keep.any()

    def chosen(index: Tensor) -> Tensor:
        return torch.where(any_kept, index.flatten()[entry], 0)

    to, at = chosen(target), chosen(position.remainder(page))
    latents = tree_kv[:, chosen(row), chosen(slot)]  # [L, B (D + 1), C]
    pages[:, to, at] = torch.where(any_kept, latents, pages[:, to, at])
