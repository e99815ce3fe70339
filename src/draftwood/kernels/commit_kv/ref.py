"""commit_kv, the definition: one accepted token after the other."""

from __future__ import annotations

import numpy as np


def commit_kv(
    pages: np.ndarray,
    tree_kv: np.ndarray,
    page_table: np.ndarray,
    prefix_len: np.ndarray,
    path: np.ndarray,
    n_path: np.ndarray,
) -> None:
    """See `draftwood.kernels.commit_kv.commit_kv`."""
    n_pages, page = pages.shape[1:3]
    B, T = tree_kv.shape[1:3]
    for b in range(B):
        for j, slot in enumerate(path[b, : max(0, n_path[b])].tolist()):
            column, offset = divmod(int(prefix_len[b]) + j, page)
            if not 0 <= column < page_table.shape[1]:
                continue
            target = int(page_table[b, column])
            if 0 <= slot < T and 0 <= target < n_pages:
                pages[:, target, offset] = tree_kv[:, b, slot]
