"""path_features: the target's features of the accepted slots, side by side as the drafter wants them."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.kernels.registry import for_array
from draftwood.tree import Array


def path_features(taps: Sequence[Array], path: Array, *, impl: str | None = None) -> Array:
    """out[b, j] = the concatenated rows of all taps at slot path[b, j] of request b; at slot 0 where that is negative.

    Args:
        taps: K arrays [B, T, d] of one dtype, the residual stream after the tapped layers; or one [K, B, T, d].
        path: [B, S] i32, below T; may be one row expanded to all requests.
        impl: implementation name; None chooses by the type and device of `path`.

    Returns:
        [B, S, K d].
    """
    fn = for_array("path_features", path, impl)
    return fn(taps, path)
