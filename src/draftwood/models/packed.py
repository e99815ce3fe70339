"""Weights in the form that fp32 products with few rows stream fastest on a CPU: FBGEMM's half-precision tiles.

Such a product waits for its weight, so its time is that of the bytes read. Weights published in 16 bits fit half precision
exactly once a power of two has brought them into its range; they are widened in registers and every sum is fp32, so the
product is the one of the fp32 weights, rounding order apart.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

_TOP = 15
"""Largest weights go to 2^14..2^15: half precision ends below 2^16."""

_prepack = torch.ops.quantized.linear_prepack_fp16
_multiply = torch.ops.quantized.linear_dynamic_fp16.default


class PackedMatrix:
    """x [..., in] f32 -> x W^T [..., out] f32, for a weight W [out, in] that half precision holds. See `of`."""

    def __init__(self, half: Tensor, unscale: float) -> None:
        self._packed = _prepack(half.float(), None)
        self._unscale = torch.tensor(unscale)  # a number would become a tensor at every call

    @classmethod
    def of(cls, weight: Tensor) -> Self | None:
        """The packed form of [out, in], or None: not fp32 on a CPU that has it, or a number would be rounded."""
        if not (weight.is_cpu and weight.dtype == torch.float32 and _has_fbgemm()):
            return None
        scale = 2.0 ** (_TOP - int(torch.frexp(weight.abs().max()).exponent))
        half = (weight.detach() * scale).half()
        return cls(half, 1 / scale) if torch.equal(half.float() / scale, weight) else None

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = _multiply(x, self._packed).mul_(self._unscale)
        return y


def _has_fbgemm() -> bool:
    return torch.backends.quantized.engine in ("fbgemm", "x86")
