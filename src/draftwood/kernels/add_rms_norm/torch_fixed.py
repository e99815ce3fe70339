"""add_rms_norm in torch, each row by itself."""

from __future__ import annotations

from torch import Tensor

from draftwood.kernels.add_rms_norm.torch_impl import add
from draftwood.kernels.torch_ops import fixed_rms_norm


def add_rms_norm(
    x: Tensor, weight: Tensor, eps: float, a: Tensor | None = None, b: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `draftwood.kernels.add_rms_norm.add_rms_norm`."""
    x = add(x, a, b)
    return x, fixed_rms_norm(x, weight, eps)
