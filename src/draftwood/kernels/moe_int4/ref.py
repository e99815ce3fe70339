"""moe_int4, the definition: the chosen experts' matrices in float64, then as `moe`."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftwood.kernels.moe.ref import route, run_experts
from draftwood.kernels.moe_int4 import GROUP, PER_WORD


def moe_int4(
    x: np.ndarray,
    router: np.ndarray,
    bias: np.ndarray,
    gate_up_packed: np.ndarray,
    gate_up_scale: np.ndarray,
    down_packed: np.ndarray,
    down_scale: np.ndarray,
    first_expert: int = 0,
    **routing: Any,
) -> np.ndarray:
    """See `draftwood.kernels.moe_int4.moe_int4`."""
    weights, experts = route(x, router, bias, **routing)
    return run_experts(
        x,
        weights,
        experts,
        range(first_expert, first_expert + len(down_packed)),
        lambda e: dequantise(gate_up_packed[e], gate_up_scale[e]),
        lambda e: dequantise(down_packed[e], down_scale[e]),
    )


def dequantise(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Words [..., n / 8] i32 and scales [..., n / 32] -> numbers [..., n] f64."""
    shifts = np.arange(PER_WORD) * 4
    values = ((packed[..., None] >> shifts) & 15).reshape(*packed.shape[:-1], -1) - 8
    return values * np.repeat(scale.astype(np.float64), GROUP, axis=-1)
