"""embed in torch."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def embed(tokens: Tensor, table: Tensor, *, block: int = 1, filler: int = 0) -> Tensor:
    """See `draftwood.kernels.embed.embed`."""
    return F.embedding(blocks(tokens, block, filler), table)


def blocks(tokens: Tensor, block: int, filler: int) -> Tensor:
    """[N block]: every token of tokens [N] followed by block - 1 times the filler."""
    return tokens if block == 1 else F.pad(tokens[:, None], (0, block - 1), value=filler).flatten()
