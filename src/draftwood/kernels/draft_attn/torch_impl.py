"""draft_attn in torch: scaled_dot_product_attention over the gathered live context and the block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from draftwood.kernels.paged import gather_prefix, past_end, similar_lengths


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
    out = torch.empty_like(q)
    for group in similar_lengths(lengths):
        alone = len(group) == len(lengths)
        rows = slice(None) if alone else torch.tensor(group, device=q.device)
        table, group_lengths = page_table[rows], [lengths[b] for b in group]
        if (
            window is not None
        ):  # pages that end before the first slot's window are not read; only distances matter
            n_before = max(0, min(group_lengths) - window + 1) // k_pages.shape[1]
            table = table[:, n_before:]
            group_lengths = [length - n_before * k_pages.shape[1] for length in group_lengths]
        k = gather_prefix(k_pages, table, group_lengths, block_k[rows])
        v = gather_prefix(v_pages, table, group_lengths, block_v[rows])
        out[rows] = _attend(q[rows], k, v, group_lengths, scale, causal, window)
    return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float, causal: bool, window: int | None
) -> Tensor:
    """q [B, S, Hq, hd]; k, v [B, max(lengths) + S, Hkv, hd], of which context past a row's length may be anything."""
    B, S, Hq, hd = q.shape
    Hkv = k.shape[2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = k.to(wide), v.to(wide)
    queries = q.to(wide).view(B, S, Hkv, -1, hd).transpose(1, 2).flatten(2, 3)  # [B, Hkv, S G, hd]
    seen = _seen(lengths, S, causal, window, q.device)
    if seen is not None:
        seen = seen.repeat_interleave(Hq // Hkv, 1)[:, None]
    if min(lengths) < max(lengths):
        dead = past_end(lengths, max(lengths), q.device)[..., None, None]
        for kv in (k, v):
            kv[:, : max(lengths)].masked_fill_(dead, 0)  # a weight of 0 does not cancel NaN
    o = scaled_dot_product_attention(queries, k.transpose(1, 2), v.transpose(1, 2), seen, scale=scale)
    return o.view(B, Hkv, S, -1, hd).transpose(1, 2).reshape(q.shape).to(q.dtype)


def _seen(
    lengths: Sequence[int], S: int, causal: bool, window: int | None, device: torch.device
) -> Tensor | None:
    """[B or 1, S, max(lengths) + S] bool, or None where every slot sees everything."""
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
    return seen
