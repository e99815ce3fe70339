"""draft_attn: the drafter's attention, a block of queries over paged context K/V plus the block itself (GQA)."""

from __future__ import annotations

from draftwood.kernels.registry import for_array
from draftwood.tree import Array


def draft_attn(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Array,
    context_len: Array,
    block_k: Array,
    block_v: Array,
    scale: float,
    *,
    causal: bool = False,
    window: int | None = None,
    impl: str | None = None,
) -> Array:
    """Every block slot attends to all context and all block slots, unless causal or windowed.

    Args:
        q: [B, S, Hq, hd]; slot s sits at position context_len + s.
        k_pages, v_pages: [n_pages, page, Hkv, hd], context of one layer, RoPE applied; Hq a multiple of Hkv.
        page_table: [B, M] i32.
        context_len: [B] i32; 0 is legal.
        block_k, block_v: [B, S, Hkv, hd].
        scale: softmax scale.
        causal: keys after the query's position are hidden.
        window: W, counted including the query: keys at or before position - W are hidden and, unless causal, keys
            at or after position + W too. None for no window.
        impl: implementation name; None chooses by the type and device of `q`.

    Returns:
        [B, S, Hq, hd] in q's dtype. Page tails past context_len and pages not in use never matter, NaN included.
    """
    fn = for_array("draft_attn", q, impl)
    return fn(
        q, k_pages, v_pages, page_table, context_len, block_k, block_v, scale, causal=causal, window=window
    )
