"""keep_features: put the features of a plain round aside, where those of several wait to be projected together."""

from __future__ import annotations

from draftwood.kernels.registry import for_array
from draftwood.tree import Array


def keep_features(
    ring: Array, first: Array, count: Array, features: Array, position: Array, *, impl: str | None = None
) -> None:
    """ring[b, count[b] mod R] = features[b, 0]; first[b] = position[b] where count[b] is 0; then count[b] += 1. In place.

    Args:
        ring: [B, R, F].
        first: [B] i32, position of ring[b, 0].
        count: [B] i32, not negative.
        features: [B, 1, F] in the dtype of `ring`.
        position: [B] i32, of the features.
        impl: implementation name; None chooses by the type and device of `ring`.
    """
    for_array("keep_features", ring, impl)(ring, first, count, features, position)
