"""verify_attn with the prefix on an installed FlashMLA, and the tree on whichever of our own implementations is chosen here.

FlashMLA's dense decode shows every query the whole prefix, which is what slots see of it; ancestors alone see each other, so they are
attention over an empty prefix. Softmax over both is made of the two by their sums. A cross-check, and for those who must use FlashMLA.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from flash_mla import flash_mla_with_kvcache, get_mla_metadata
from torch import Tensor

from draftwood.kernels.registry import for_array
from draftwood.kernels.verify_attn import check_pages, check_use, use_of

_DECODE = "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale"

Part = tuple[Tensor, Tensor]
"""o [B, T, H, R] and lse [B, T, H] over some of the keys."""


def verify_attn(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    prefix_len: Tensor,
    tree_kv: Tensor,
    ancestors: Tensor,
    n_slots: Tensor,
    scale: float,
    *,
    value_dim: int,
) -> tuple[Tensor, Tensor]:
    """See `draftwood.kernels.verify_attn.verify_attn`.

    Raises `NotImplementedError` for a use that FlashMLA is not made for, and `ValueError` where the pages are not contiguous.
    """
    check_use("flash_mla", q, pages, value_dim)
    check_pages(pages)
    attention = Attention(page_table, prefix_len, ancestors, n_slots, pages.shape[1])
    return attention.with_lse(q, pages, tree_kv, scale, value_dim=value_dim)


class Attention:
    """`verify_attn` of one pass. Chip and types are not asked about here, so a stand-in for FlashMLA may run on a CPU."""

    def __init__(
        self, page_table: Tensor, prefix_len: Tensor, ancestors: Tensor, n_slots: Tensor, page: int
    ) -> None:
        B, T, _ = ancestors.shape
        empty = (prefix_len == 0)[:, None]
        self._lengths = prefix_len.contiguous()
        # FlashMLA loads a row's first page even where the prefix is empty
        self._page_table = page_table.masked_fill(empty, 0).contiguous()
        self._blind = empty | (torch.arange(T, device=n_slots.device) >= n_slots[:, None])
        self._no_prefix = page_table.new_zeros(B, 1), torch.zeros_like(self._lengths)
        self._tree = ancestors, n_slots
        self._prepared: tuple[tuple[Any, Any], Callable[..., Part]] | None = None

    def __call__(self, q: Tensor, pages: Tensor, tree_kv: Tensor, scale: float, *, value_dim: int) -> Tensor:
        """o [B, T, H, R]; the arguments are those that differ from layer to layer."""
        return self.with_lse(q, pages, tree_kv, scale, value_dim=value_dim)[0]

    def with_lse(self, q: Tensor, pages: Tensor, tree_kv: Tensor, scale: float, *, value_dim: int) -> Part:
        """o, and lse [B, T, H]."""
        if self._prepared is None:  # the first layer tells how many heads there are
            attend = for_array("verify_attn", q, use=lambda: use_of(q, pages, value_dim))
            self._prepared = _schedule(self._lengths, q.shape[1] * q.shape[2]), attend
        (metadata, splits), attend = self._prepared
        shared = self._page_table, self._lengths, value_dim, metadata, splits
        o, lse = flash_mla_with_kvcache(q.contiguous(), pages[:, :, None], *shared, scale, causal=False)
        tree = attend(q, pages, *self._no_prefix, tree_kv, *self._tree, scale, value_dim=value_dim)
        return merge((o, lse.transpose(1, 2)), tree, self._blind)


verify_attn.prepare = Attention  # type: ignore[attr-defined]


def merge(prefix: Part, tree: Part, blind: Tensor) -> Part:
    """Attention over the keys of both parts.

    Where `blind` [B, T], the prefix's part is taken for one over no keys, whatever it holds. The tree's part is 0 and -inf where it is one.
    """
    (o, lse), (o_tree, lse_tree) = prefix, tree
    lse = lse.masked_fill(blind[..., None], -torch.inf)
    # a weight of 0 does not cancel NaN, and the difference is NaN where both parts are over no keys
    weight = torch.sigmoid(lse - lse_tree).masked_fill(blind[..., None], 0)[..., None]
    wide = o.masked_fill(blind[..., None, None], 0).to(lse.dtype)
    return o_tree.to(lse.dtype).lerp(wide, weight).to(o.dtype), torch.logaddexp(lse, lse_tree)


def scheduler(plan: Callable[..., Any], decode: Callable[..., Any]) -> Callable[[Tensor, int], Any]:
    """Of lengths [B] i32 and the number of queries per key: the tile_scheduler_metadata and num_splits that `decode` takes.

    FlashMLA's `get_mla_metadata` used to plan at once and return two tensors; since 2026 it takes anything and returns an empty object and
    None: the first layer's `decode` plans. Raises `ImportError` for another interface.
    """
    takes = signature(plan).parameters.values()
    required = [p.name for p in takes if p.default is p.empty]
    if list(signature(decode).parameters)[:8] == _DECODE.split():
        if all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in takes):
            return lambda lengths, queries: plan()
        if len(required) == 3 and required[::2] == ["cache_seqlens", "num_heads_k"]:
            return lambda lengths, queries: plan(lengths, queries, 1)
    raise ImportError(
        "flash_mla: expected get_mla_metadata(*args, **kwargs) or (cache_seqlens, queries per key, num_heads_k), and "
        f"flash_mla_with_kvcache({_DECODE.replace(' ', ', ')}, ...); "
        f"found get_mla_metadata{signature(plan)} and flash_mla_with_kvcache{signature(decode)}"
    )


_schedule = scheduler(get_mla_metadata, flash_mla_with_kvcache)
