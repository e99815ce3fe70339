"""draft_attn, the definition: one softmax per slot and head over the keys it sees, in float64."""

from __future__ import annotations

import numpy as np


def draft_attn(
    q: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    page_table: np.ndarray,
    context_len: np.ndarray,
    block_k: np.ndarray,
    block_v: np.ndarray,
    scale: float,
    *,
    causal: bool = False,
    window: int | None = None,
) -> np.ndarray:
    """See `draftwood.kernels.draft_attn.draft_attn`."""
    B, S, Hq, _ = q.shape
    page, Hkv = k_pages.shape[1:3]
    out = np.zeros(q.shape, q.dtype)
    for b in range(B):
        start = int(context_len[b])
        context = np.arange(start)
        where = page_table[b, context // page], context % page
        k = np.concatenate([k_pages[where], block_k[b]]).astype(np.float64)  # [start + S, Hkv, hd]
        v = np.concatenate([v_pages[where], block_v[b]]).astype(np.float64)
        for s in range(S):
            after = np.arange(start + S) - (start + s)  # position of each key, counted from the query's
            seen = np.full(start + S, True)
            if causal:
                seen &= after <= 0
            if window is not None:
                seen &= abs(after) < window
            for h in range(Hq):
                group = h // (Hq // Hkv)
                scores = scale * (k[seen, group] @ q[b, s, h].astype(np.float64))
                weights = np.exp(scores - scores.max())
                out[b, s, h] = weights / weights.sum() @ v[seen, group]
    return out
