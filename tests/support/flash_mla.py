"""A stand-in for the package `flash_mla`: both published interfaces over one decode in torch, as strict as theirs about what it is given.

What FlashMLA leaves undefined it fills with NaN, and lse is +inf where there are no keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch


def object_form():
    """Since 2026: an empty object that the first decode fills, and that must then go with the same shapes and lengths."""

    @dataclass
    class Schedule:
        made_for: tuple | None = None

    def get_mla_metadata(*args, **kwargs):
        return Schedule(), None

    def flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits=None,
        softmax_scale=None,
        causal=False,
        is_fp8_kvcache=False,
        indices=None,
    ):
        assert isinstance(tile_scheduler_metadata, Schedule)
        assert num_splits is None
        made_for = (*q.shape[:3], *k_cache.shape[1:3], causal, cache_seqlens.tolist())
        assert tile_scheduler_metadata.made_for in (None, made_for)
        tile_scheduler_metadata.made_for = made_for
        return decode(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal)

    return module(get_mla_metadata, flash_mla_with_kvcache)


def tensor_form():
    """Until then: two tensors, made of the lengths and of how many queries share a key head."""

    def get_mla_metadata(
        cache_seqlens,
        num_q_tokens_per_head_k,
        num_heads_k,
        num_heads_q=None,
        is_fp8_kvcache=False,
        topk=None,
    ):
        assert (num_heads_k, num_heads_q, is_fp8_kvcache, topk) == (1, None, False, None)
        of = torch.cat((cache_seqlens, torch.tensor([num_q_tokens_per_head_k], dtype=torch.int32)))
        return of[:, None], torch.zeros(len(cache_seqlens) + 1, dtype=torch.int32)

    def flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits,
        softmax_scale=None,
        causal=False,
    ):
        assert tile_scheduler_metadata[:, 0].tolist() == [*cache_seqlens.tolist(), q.shape[1] * q.shape[2]]
        assert num_splits.shape == (len(q) + 1,)
        return decode(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal)

    return module(get_mla_metadata, flash_mla_with_kvcache)


def module(get_mla_metadata, flash_mla_with_kvcache):
    made = ModuleType("flash_mla")
    made.get_mla_metadata, made.flash_mla_with_kvcache = get_mla_metadata, flash_mla_with_kvcache
    return made


def decode(q, k_cache, block_table, cache_seqlens, head_dim_v, scale, causal):
    """o [B, T, H, R] and lse [B, H, T], natural logarithm."""
    B, T, H, C = q.shape
    assert q.dtype == k_cache.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert (C, head_dim_v, causal) == (576, 512, False)
    assert k_cache.shape[1:] == (64, 1, C)
    assert q.stride(-1) == k_cache.stride(-1) == block_table.stride(-1) == 1
    assert block_table.dtype == cache_seqlens.dtype == torch.int32
    assert block_table.shape[0] == len(cache_seqlens) == B
    assert cache_seqlens.is_contiguous()
    o = torch.full((B, T, H, head_dim_v), torch.nan, dtype=q.dtype)
    lse = torch.full((B, H, T), torch.inf)
    for b, n in enumerate(cache_seqlens.tolist()):
        first_page = k_cache[int(block_table[b, 0])]  # is loaded whatever the length is
        assert int(block_table[b, 0]) >= 0
        assert first_page.numel() > 0
        if n:
            table = block_table[b, : -(-n // 64)].long()
            keys = k_cache[table, :, 0].flatten(0, 1)[:n].float()
            scores = torch.einsum("thc,nc->thn", q[b].float(), keys) * scale
            o[b] = (scores.softmax(-1) @ keys[:, :head_dim_v]).to(q.dtype)
            lse[b] = scores.logsumexp(-1).T
    return o, lse
