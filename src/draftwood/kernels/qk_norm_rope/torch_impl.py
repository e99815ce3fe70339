"""qk_norm_rope in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.torch_ops import rms_norm, rotate


def qk_norm_rope(
    x: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    n_q: int,
    *,
    n_v: int = 0,
) -> Tensor:
    """See `draftwood.kernels.qk_norm_rope.qk_norm_rope`."""
    if n_v > 0:
        x, values = x.split((x.shape[2] - n_v, n_v), 2)
        keys = qk_norm_rope(x, q_norm, k_norm, cos, sin, eps, n_q)
        return torch.cat((keys, values), 2)
    norms = k_norm[:, None, None]  # [L, 1, 1, hd]
    if q_norm is not None:
        L, _, H, _ = x.shape
        queries, keys = q_norm.expand(L, 1, n_q, -1), norms.expand(-1, -1, H - n_q, -1)
        norms = torch.cat((queries, keys), 2)
    return rotate(rms_norm(x, norms, eps), cos, sin)
