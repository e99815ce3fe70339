"""The pieces that target and drafter share: RMSNorm, matrices, the SwiGLU block, and frozen parameters."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from draftwood.models.packed import PackedMatrix
from draftwood.models.weights import Take


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def matrix(weight: Tensor) -> nn.Parameter:
    """A frozen weight [..., out, in] for `F.linear`, in the memory order that suits the device.

    fp32 products with few rows wait for the weight; on CPU its rows stream up to twice as fast if they are long.
    16-bit products on CPU accept the usual order only.
    """
    if weight.is_cpu and weight.dtype == torch.float32 and weight.shape[-2] >= weight.shape[-1]:
        weight = weight.mT.contiguous().mT
    return frozen(weight)


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


@lru_cache(maxsize=16)
def _constant(value: float, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype)


class Packable(nn.Module):
    """A module that has a form for decoding only: faster, without the parameters it was made from."""

    def pack(self) -> None:
        """Take that form, if there is one for these weights on this device; the results stay the same."""
        raise NotImplementedError


def pack(model: nn.Module) -> None:
    """`Packable.pack` everything in a model, once; it can then be neither trained nor saved."""
    for module in model.modules():
        if isinstance(module, Packable):
            module.pack()


class Matrix(Packable):
    """x [..., in] -> x W^T for a frozen weight W [out, in]; a parameter given as the weight is shared."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight if isinstance(weight, nn.Parameter) else matrix(weight)
        self.packed: PackedMatrix | None = None

    def pack(self) -> None:
        self.packed = PackedMatrix.of(self.weight)
        if self.packed is not None:
            del self.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) if self.packed is None else self.packed(x)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one matrix [2 I, d].

    A rank has its share of the inner columns and gives their part of the sum.
    """

    def __init__(self, hidden: int, inner: int, take: Take) -> None:
        super().__init__()
        gate, up = (take.rows(f"{name}_proj.weight", inner, hidden) for name in ("gate", "up"))
        self.gate_up = Matrix(torch.cat((gate, up)))
        self.down = Matrix(take.columns("down_proj.weight", hidden, inner))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y
