"""keep_features in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_features(ring: Tensor, first: Tensor, count: Tensor, features: Tensor, position: Tensor) -> None:
    """See `draftwood.kernels.keep_features.keep_features`."""
    first.copy_(torch.where(count == 0, position, first))
    at = (count % ring.shape[1]).long()[:, None, None].expand(-1, -1, ring.shape[-1])
    ring.scatter_(1, at, features)
    count.add_(1)
