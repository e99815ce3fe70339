"""The pieces that target and drafter share: matrices, the SwiGLU block, and frozen parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from draftwood.kernels.registry import Kernels
from draftwood.models.packed import PackedMatrix
from draftwood.models.weights import Take


@cache  # for good: recorded rounds read it
def ramp(n: int, device: torch.device) -> Tensor:
    """0, 1, ..., n - 1 [n] i32, made once: what does not change is no work of a round."""
    with torch.inference_mode(False):
        return torch.arange(n, dtype=torch.int32, device=device)


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


def by_head(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Each head of x [N, H, K] times its own weight [H, K, M], into out [N, H, M], of which rows and heads may lie apart."""
    if x.is_cpu:  # there a product into a part of a tensor goes head by head
        out.copy_(torch.bmm(x.transpose(0, 1), weight).transpose(0, 1))
    else:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))


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


def product_of_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] W^T as one product: of rows that do not lie side by side, torch would make one per batch entry, each
    of which reads the weight."""
    y: Tensor = F.linear(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return y


class Matrix(Packable, Fixable):
    """x [..., in] -> x W^T for a frozen weight W [out, in]; a parameter given as the weight is shared."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight if isinstance(weight, nn.Parameter) else matrix(weight)
        self.packed: PackedMatrix | None = None
        self.product: Callable[[Tensor, Tensor], Tensor] = product_of_rows

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

    def wide(self, x: Tensor) -> Tensor:
        """The product in fp32: of 16-bit numbers on a GPU as it was summed, in one launch. That has no gradient."""
        if not x.is_cuda or x.element_size() > 2 or x.requires_grad or self.product is not product_of_rows:
            y: Tensor = self(x)
            return y.float()
        product = torch.mm(x.flatten(0, -2), self.weight.mT, out_dtype=torch.float32)
        return product.view(*x.shape[:-1], -1)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one matrix [2 I, d].

    A rank has its share of the inner columns and gives their part of the sum.
    """

    def __init__(self, hidden: int, inner: int, kernels: Kernels, take: Take) -> None:
        super().__init__()
        gate, up = (take.rows(f"{name}_proj.weight", inner, hidden) for name in ("gate", "up"))
        self.gate_up = Matrix(torch.cat((gate, up)))
        self.down = Matrix(take.columns("down_proj.weight", hidden, inner))
        self.silu_mul = kernels.silu_mul

    def forward(self, x: Tensor) -> Tensor:
        """x [N, d] -> [N, d]."""
        y: Tensor = self.down(self.silu_mul(self.gate_up(x)))
        return y

    def addends(self, x: Tensor) -> tuple[Tensor, ...]:
        """What adds up to the result."""
        return (self(x),)
