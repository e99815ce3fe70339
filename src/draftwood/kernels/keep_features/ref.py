"""Reference of `keep_features`."""

from __future__ import annotations

import numpy as np


def keep_features(
    ring: np.ndarray, first: np.ndarray, count: np.ndarray, features: np.ndarray, position: np.ndarray
) -> None:
    """See `draftwood.kernels.keep_features.keep_features`."""
    for b in range(len(ring)):
        ring[b, count[b] % ring.shape[1]] = features[b, 0]
        if count[b] == 0:
            first[b] = position[b]
        count[b] += 1
