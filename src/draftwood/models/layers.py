"""The pieces that target and drafter share: RMSNorm, the SwiGLU block, and frozen parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from draftwood.models.weights import Take


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised in fp32 (fp64 for fp64), rounded to x's dtype, then multiplied by the weight.

    Passing the weight to `F.rms_norm` would round once, after the product: not what the models were made with.
    """
    return F.rms_norm(x, weight.shape, None, eps) * weight


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one matrix [2 I, d]."""

    def __init__(self, hidden: int, inner: int, take: Take) -> None:
        super().__init__()
        gate = take("gate_proj.weight", inner, hidden)
        self.gate_up = frozen(torch.cat((gate, take("up_proj.weight", inner, hidden))))
        self.down = frozen(take("down_proj.weight", hidden, inner))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down)
