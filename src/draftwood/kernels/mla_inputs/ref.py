"""mla_inputs, the definition: in float64."""

from __future__ import annotations

import numpy as np


def mla_inputs(
    q_rope: np.ndarray,
    k_rope: np.ndarray,
    latent: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    kv_norm: np.ndarray,
    eps: float,
    q: np.ndarray,
    latents: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """See `draftwood.kernels.mla_inputs.mla_inputs`."""
    R = latent.shape[1]
    wide = latent.astype(np.float64)
    q[..., R:] = rotate(q_rope, cos, sin)
    latents[:, :R] = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + eps) * kv_norm
    latents[:, R:] = rotate(k_rope[:, None], cos, sin)[:, 0]
    return q, latents


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Of x [..., heads, P]."""
    wide = x.astype(np.float64)
    return np.asarray(wide * cos + np.roll(wide, x.shape[-1] // 2, -1) * sin)
