"""qk_norm_rope, the definition: in float64."""

from __future__ import annotations

import numpy as np


def qk_norm_rope(
    x: np.ndarray,
    q_norm: np.ndarray | None,
    k_norm: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    eps: float,
    n_q: int,
    *,
    n_v: int = 0,
) -> np.ndarray:
    """See `draftwood.kernels.qk_norm_rope.qk_norm_rope`."""
    wide = x.astype(np.float64)
    wide /= np.sqrt(np.mean(wide**2, -1, keepdims=True) + eps)
    if q_norm is not None:
        wide[:, :, :n_q] *= q_norm
    wide[:, :, n_q:] *= k_norm[:, None, None]
    turned = wide * cos + np.roll(wide, x.shape[-1] // 2, -1) * sin
    out = turned.astype(x.dtype)
    keys = x.shape[2] - n_v
    out[:, :, keys:] = x[:, :, keys:]
    return np.asarray(out)
