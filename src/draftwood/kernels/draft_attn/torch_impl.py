"""draft_attn in torch: two matrix products over the gathered live context and the block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.kernels.paged import gather_prefix, past_end, prefix_pages, similar_lengths


def draft_attn(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    context_len: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """See `draftwood.kernels.draft_attn.draft_attn`. Reads lengths on the host, which waits for the device on a GPU."""
    lengths = context_len.tolist()
    groups = list(similar_lengths(lengths))
    if len(groups) == 1:
        return _padded_batch(
            q, k_pages, v_pages, page_table, lengths, block_k, block_v, scale, causal=causal, window=window
        )
    out = torch.empty_like(q)
    for group in groups:
        rows = torch.tensor(group, device=q.device)
        out[rows] = _padded_batch(
            q[rows],
            k_pages,
            v_pages,
            page_table[rows],
            [lengths[b] for b in group],
            block_k[rows],
            block_v[rows],
            scale,
            causal=causal,
            window=window,
        )
    return out


def _padded_batch(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    lengths: list[int],
    block_k: Tensor,
    block_v: Tensor,
    scale: float,
    *,
    causal: bool,
    window: int | None,
) -> Tensor:
    """All rows at once, each over max(lengths) context positions and the block."""
    S, page = q.shape[1], k_pages.shape[1]
    if (
        window is not None
    ):  # pages that end before the first slot's window are not read; only distances matter
        n_before = max(0, min(lengths) - window + 1) // page
        page_table = page_table[:, n_before:]
        lengths = [length - n_before * page for length in lengths]
    ids, n_context = prefix_pages(page_table, lengths, S, page), max(lengths)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    k = gather_prefix(k_pages, ids, n_context, block_k).to(wide)
    v = gather_prefix(v_pages, ids, n_context, block_v).to(wide)
    if min(lengths) < n_context:
        dead = past_end(lengths, n_context, q.device)[..., None, None]
        for kv in (k, v):
            kv[:, :n_context].masked_fill_(dead, 0)  # a weight of 0 does not cancel NaN
    return _attend(q.to(wide), k, v, _seen(lengths, S, causal, window, q.device), scale).to(q.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """q [B, S, H, hd] over k and v [B, N, Hkv, hd] -> [B, S, H, hd]; the queries that share a key head are one matrix."""
    B, S, H, hd = q.shape
    shared = q.view(B, S, -1, H // k.shape[2], hd).transpose(1, 2).flatten(2, 3)  # [B, Hkv, S H/Hkv, hd]
    scores = torch.matmul(shared, k.permute(0, 2, 3, 1)).mul_(scale)
    if seen is not None:
        scores.view(B, k.shape[2], S, -1, k.shape[1]).masked_fill_(~seen[..., None, :], -torch.inf)
    o = torch.matmul(scores.softmax(-1), v.transpose(1, 2))
    return o.view(B, k.shape[2], S, -1, hd).transpose(1, 2).reshape(q.shape)


def _seen(
    lengths: Sequence[int], S: int, causal: bool, window: int | None, device: torch.device
) -> Tensor | None:
    """[B or 1, 1, S, max(lengths) + S] bool, or None where every slot sees everything."""
    n_context = max(lengths)
    ragged = min(lengths) < n_context
    if not (ragged or causal or window is not None):
        return None
    length = torch.tensor(lengths if ragged else lengths[:1], device=device)[:, None]  # [B or 1, 1]
    slot, context = torch.arange(S, device=device), torch.arange(n_context, device=device)
    key = torch.cat((context.expand(len(length), -1), length + slot), 1)
    after = key[:, None] - (length + slot)[..., None]
    seen = torch.ones_like(after, dtype=torch.bool)
    seen[..., :n_context] = (context < length)[:, None]
    if causal:
        seen &= after <= 0
    if window is not None:
        seen &= after.abs() < window
    return seen[:, None]
