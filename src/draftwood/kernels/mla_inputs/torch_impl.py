"""mla_inputs in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftwood.kernels.torch_ops import rms_norm, rotate


def mla_inputs(
    q_rope: Tensor,
    k_rope: Tensor,
    latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_norm: Tensor,
    eps: float,
    q: Tensor,
    latents: Tensor,
    *,
    norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm,
    turn: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate,
) -> tuple[Tensor, Tensor]:
    """See `draftwood.kernels.mla_inputs.mla_inputs`. `norm` and `turn` are what it is made of."""
    H, R = q_rope.shape[1], latent.shape[1]
    ropes = turn(torch.cat((q_rope, k_rope[:, None]), 1), cos, sin)
    q[..., R:] = ropes[:, :H]
    torch.cat((norm(latent, kv_norm, eps), ropes[:, H]), -1, out=latents)
    return q, latents
