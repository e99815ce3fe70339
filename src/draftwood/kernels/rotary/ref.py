"""rotary, the definition: in float64."""

from __future__ import annotations

import numpy as np


def rotary(
    positions: np.ndarray, frequencies: np.ndarray, amplitude: float, *, double: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """See `draftwood.kernels.rotary.rotary`."""
    angles = positions[..., None, None] * frequencies
    table = np.float64 if double else np.float32
    return (amplitude * np.cos(angles)).astype(table), (amplitude * np.sin(angles)).astype(table)
