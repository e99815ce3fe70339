"""add_rms_norm, the definition: in float64."""

from __future__ import annotations

import numpy as np


def add_rms_norm(
    x: np.ndarray, weight: np.ndarray, eps: float, a: np.ndarray | None = None, b: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """See `draftwood.kernels.add_rms_norm.add_rms_norm`."""
    total = np.sum([part.astype(np.float64) for part in (x, a, b) if part is not None], 0)
    normed = total / np.sqrt(np.mean(total**2, -1, keepdims=True) + eps) * weight
    return total.astype(x.dtype), normed.astype(x.dtype)
