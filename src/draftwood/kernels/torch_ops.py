"""What the torch implementations of kernels with rows share: RMSNorm and rotation, as usual and in a fixed order."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised in fp32 (fp64 for fp64), rounded to x's dtype, then multiplied by the weight.

    The weight is [d], or [..., d] where parts of x have their own.

    Passing the weight to `F.rms_norm` would round once, after the product: not what the models were made with.
    """
    if not x.is_cpu:
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight
    # on CPU the function is a longer chain of operations than this one
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    scale = torch.addcmul(_constant(eps, wide), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (x * scale).to(x.dtype) * weight


def fixed_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of x [N, d] whose rows do not depend on each other.

    Every step is one IEEE operation, or one function of one row. A part of a single row counts as contiguous, and would stay
    where it is, at an address that suits no vectors perhaps: hence the copy.
    """
    if not x.is_cpu:
        return F.rms_norm(x.clone(), x.shape[-1:], None, eps) * weight
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    scale: Tensor = (norm * norm / x.shape[-1] + eps).rsqrt()
    return (x * scale).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (j, j + dim/2) of x [..., heads, dim] by the tables of `rotary`; one rounding to x's dtype."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def fixed_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` in IEEE operations: whether torch fuses a product and a sum may depend on a number's place."""
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


@lru_cache(maxsize=16)
def _constant(value: float, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype)
