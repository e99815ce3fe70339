"""Reference of `path_features`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def path_features(taps: Sequence[np.ndarray], path: np.ndarray) -> np.ndarray:
    """See `draftwood.kernels.path_features.path_features`."""
    row = np.arange(len(path))[:, None]
    return np.concatenate([tap[row, np.maximum(path, 0)] for tap in taps], -1)
