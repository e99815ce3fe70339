"""Which part of the weights is one rank's: contiguous, equal slices, or nearly equal ones of the vocabulary.

Knows neither models nor how ranks talk to each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.models.errors import ModelError


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size` tensor-parallel ranks. The default is one rank that has everything."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be in 0..{self.size - 1} of {self.size} ranks, got {self.rank}")

    def bounds(self, n: int, *, what: str) -> tuple[int, int]:
        """(start, stop) of this rank's share of n things. Raises `ModelError` naming `what` if n does not divide."""
        share, rest = divmod(n, self.size)
        if rest:
            raise ModelError(f"{what}: {n} cannot be split evenly over {self.size} ranks")
        return self.rank * share, (self.rank + 1) * share

    def uneven(self, n: int) -> tuple[int, int]:
        """(start, stop) in shares of ceil(n / size): the last ranks have less, if need be nothing."""
        share = -(-n // self.size)
        return min(self.rank * share, n), min((self.rank + 1) * share, n)


WHOLE = Shard()
