"""A rank's slice of the vocabulary: the rows of embedding and head that it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftwood.models.shard import Shard


@dataclass(frozen=True)
class SoftmaxPart:
    """What a slice of the vocabulary adds to a log softmax."""

    chosen: Tensor  # the chosen token's logit, -inf if it is in another slice
    sum: Tensor  # logsumexp over the slice


@dataclass(frozen=True)
class VocabularySlice:
    """Tokens first .. first + rows - 1. All ranks' logits have `share` columns, so that they can be gathered."""

    first: int
    rows: int
    share: int
    padded: int
    """Columns of all ranks together: the vocabulary, and what fills the last slice."""

    @classmethod
    def of(cls, vocab_size: int, shard: Shard) -> Self:
        start, stop = shard.uneven(vocab_size)
        share = -(-vocab_size // shard.size)
        return cls(start, stop - start, share, share * shard.size)

    def row(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Where each token is in the slice, and whether it is; others are given a row all the same."""
        row = tokens - self.first
        inside = (row >= 0) & (row < self.rows)
        return row.clamp(0, self.rows - 1), inside

    def filled(self, logits: Tensor) -> Tensor:
        """[..., rows] -> [..., share]: the columns past the vocabulary are -inf, so never chosen."""
        return (
            logits
            if self.rows == self.share
            else F.pad(logits, (0, self.share - self.rows), value=float("-inf"))
        )
