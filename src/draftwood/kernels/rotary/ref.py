"""rotary, the definition: in float64."""

from __future__ import annotations

import numpy as np


def rotary(
    positions: np.ndarray,
    frequencies: np.ndarray,
    amplitude: float,
    *,
    start: np.ndarray | None = None,
    double: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """See `draftwood.kernels.rotary.rotary`."""
    if start is not None:
        positions = (start[:, None] + positions).reshape(-1)
    angles = positions[..., None, None] * frequencies
    table = np.float64 if double else np.float32
    return (amplitude * np.cos(angles)).astype(table), (amplitude * np.sin(angles)).astype(table)
