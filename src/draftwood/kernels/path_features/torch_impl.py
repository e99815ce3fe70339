"""path_features in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def path_features(taps: Sequence[Tensor], path: Tensor) -> Tensor:
    """See `draftwood.kernels.path_features.path_features`."""
    features = torch.cat(tuple(taps), -1)
    if features.shape[1] == 1:  # of a root alone there is nothing to choose
        return features.expand(-1, path.shape[1], -1)
    rows = path.clamp(min=0).long()[..., None].expand(-1, -1, features.shape[-1])
    return features.gather(1, rows)
