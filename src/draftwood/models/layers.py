"""The pieces that target and drafter share: RMSNorm, matrices, the SwiGLU block, and frozen parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from draftwood.kernels.by_row import by_row
from draftwood.kernels.registry import Kernels
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


class Fixable(nn.Module):
    """A module that can do without what makes a row's result depend on other rows: see docs/deterministic.md."""

    def fix(self, kernels: Kernels) -> None:
        """From now on give a row the same bits whatever other rows there are."""
        raise NotImplementedError


def fix(model: nn.Module, kernels: Kernels) -> None:
    """`Fixable.fix` everything in a model, once; nothing in it must be packed."""
    for module in model.modules():
        if isinstance(module, Fixable):
            module.fix(kernels)


class Matrix(Packable, Fixable):
    """x [..., in] -> x W^T for a frozen weight W [out, in]; a parameter given as the weight is shared."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight if isinstance(weight, nn.Parameter) else matrix(weight)
        self.packed: PackedMatrix | None = None
        self.product: Callable[[Tensor, Tensor], Tensor] = F.linear

    def pack(self) -> None:
        self.packed = PackedMatrix.of(self.weight)
        if self.packed is not None:
            del self.weight

    def fix(self, kernels: Kernels) -> None:
        def product(x: Tensor, weight: Tensor) -> Tensor:
            y: Tensor = kernels.linear(x.flatten(0, -2), weight)
            return y.view(*x.shape[:-1], -1)

        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight) if self.packed is None else self.packed(x)


class MLP(Fixable):
    """down(silu(gate(x)) * up(x)); gate and up are one matrix [2 I, d].

    A rank has its share of the inner columns and gives their part of the sum.
    """

    def __init__(self, hidden: int, inner: int, take: Take) -> None:
        super().__init__()
        gate, up = (take.rows(f"{name}_proj.weight", inner, hidden) for name in ("gate", "up"))
        self.gate_up = Matrix(torch.cat((gate, up)))
        self.down = Matrix(take.columns("down_proj.weight", hidden, inner))
        self.activation: Callable[[Tensor], Tensor] = F.silu

    def fix(self, kernels: Kernels) -> None:
        self.activation = partial(by_row, F.silu)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        y: Tensor = self.down(self.activation(gate) * up)
        return y
