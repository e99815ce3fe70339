"""Reference of `embed`."""

from __future__ import annotations

import numpy as np


def embed(tokens: np.ndarray, table: np.ndarray, *, block: int = 1, filler: int = 0) -> np.ndarray:
    """See `draftwood.kernels.embed.embed`."""
    blocks = np.full((len(tokens), block), filler)
    blocks[:, 0] = tokens
    return np.asarray(table[blocks.reshape(-1)])
