"""commit_kv: copy the accepted slots' latents, all layers, from scratch into the pages."""

from __future__ import annotations

from draftwood.kernels.registry import for_array
from draftwood.tree import Array


def commit_kv(
    pages: Array,
    tree_kv: Array,
    page_table: Array,
    prefix_len: Array,
    path: Array,
    n_path: Array,
    impl: str | None = None,
) -> None:
    """pages[l, position prefix_len[b] + j] = tree_kv[l, b, path[b, j]] for j < n_path[b]; in place.

    Args:
        pages: [L, n_pages, page, C], written.
        tree_kv: [L, B, T, C] in the dtype of `pages`.
        page_table: [B, M] i32; must cover prefix_len + n_path positions.
        prefix_len: [B] i32.
        path: [B, D + 1] i32 slots. Entries outside 0..T-1 and everything past n_path are skipped.
        n_path: [B] i32; 0 commits nothing.
        impl: implementation name; None chooses by the type and device of `pages`.

    A position past the page table, or a page outside the pool, is skipped, never written elsewhere.
    """
    for_array("commit_kv", pages, impl)(pages, tree_kv, page_table, prefix_len, path, n_path)
