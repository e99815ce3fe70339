"""linear: x W^T whose every number is added up in one order, whatever other rows there are: the product of deterministic mode."""

from __future__ import annotations

from draftwood.kernels.registry import for_array
from draftwood.tree import Array


def linear(x: Array, weight: Array, *, impl: str | None = None) -> Array:
    """x W^T, accumulated in fp32 (f64 for f64 input) and rounded once.

    Args:
        x: [N, K], or [G, N, K] where each of G groups has a weight of its own.
        weight: [M, K], or [G, M, K]; in x's dtype, in any memory order.
        impl: implementation name; None chooses by the type and device of `x`.

    Returns:
        [N, M] or [G, N, M] in x's dtype. A row depends on the same row of x and on the weight alone: the number of rows, their
        contents and the row's place among them change no bit of it. So does the weight's memory order, which is fixed while
        an engine lives. Different implementations, dtypes and machines may add in different orders.
    """
    fn = for_array("linear", x, impl)
    return fn(x, weight)
