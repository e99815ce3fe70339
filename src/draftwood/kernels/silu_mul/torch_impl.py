"""silu_mul in torch."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `draftwood.kernels.silu_mul.silu_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
