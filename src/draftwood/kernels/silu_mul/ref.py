"""silu_mul, the definition: in float64."""

from __future__ import annotations

import numpy as np


def silu_mul(gate_up: np.ndarray) -> np.ndarray:
    """See `draftwood.kernels.silu_mul.silu_mul`."""
    gate, up = np.split(gate_up.astype(np.float64), 2, -1)
    sigmoid = np.exp(-np.logaddexp(0, -gate))
    return np.asarray((gate * sigmoid * up).astype(gate_up.dtype))
