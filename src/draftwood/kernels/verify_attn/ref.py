"""verify_attn, the definition: one softmax per slot over its prefix and its ancestors, in float64."""

from __future__ import annotations

import numpy as np


def verify_attn(
    q: np.ndarray,
    pages: np.ndarray,
    page_table: np.ndarray,
    prefix_len: np.ndarray,
    tree_kv: np.ndarray,
    ancestors: np.ndarray,
    n_slots: np.ndarray,
    scale: float,
    *,
    value_dim: int,
) -> tuple[np.ndarray, np.ndarray]:
    """See `draftwood.kernels.verify_attn.verify_attn`."""
    B, T, H, _ = q.shape
    page = pages.shape[1]
    o = np.zeros((B, T, H, value_dim), q.dtype)
    lse = np.full((B, T, H), -np.inf, q.dtype)
    for b in range(B):
        position = np.arange(prefix_len[b])
        prefix = pages[page_table[b, position // page], position % page].astype(np.float64)
        for i in range(n_slots[b]):
            visible = [j for j in range(n_slots[b]) if ancestors[b, i, j // 64] >> (j % 64) & 1]
            keys = np.concatenate([prefix, tree_kv[b, visible]])
            if len(keys):
                o[b, i], lse[b, i] = _attend(scale * q[b, i].astype(np.float64), keys, keys[:, :value_dim])
    return o, lse


def _attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scores = q @ keys.T  # [H, keys]
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return weights / total @ values, (top + np.log(total))[:, 0]
