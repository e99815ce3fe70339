"""add_rms_norm in torch."""

from __future__ import annotations

from torch import Tensor

from draftwood.kernels.torch_ops import rms_norm


def add_rms_norm(
    x: Tensor, weight: Tensor, eps: float, a: Tensor | None = None, b: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `draftwood.kernels.add_rms_norm.add_rms_norm`."""
    x = add(x, a, b)
    return x, rms_norm(x, weight, eps)


def add(x: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
    if a is None:
        return x
    return x + (a if b is None else a + b)
