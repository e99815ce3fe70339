"""rotary in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def rotary(
    positions: Tensor,
    frequencies: Tensor,
    amplitude: float,
    *,
    start: Tensor | None = None,
    double: bool = False,
    cos: Callable[[Tensor], Tensor] = torch.cos,
    sin: Callable[[Tensor], Tensor] = torch.sin,
) -> tuple[Tensor, Tensor]:
    """See `draftwood.kernels.rotary.rotary`. `cos` and `sin` are what it is made of."""
    if start is not None:
        positions = (start[:, None] + positions).flatten()
    angles = positions[..., None, None] * frequencies
    tables = cos(angles), sin(angles)
    if amplitude != 1:
        tables = tables[0] * amplitude, tables[1] * amplitude
    dtype = torch.float64 if double else torch.float32
    return tables[0].to(dtype), tables[1].to(dtype)
