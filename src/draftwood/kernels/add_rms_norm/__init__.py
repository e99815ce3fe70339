"""add_rms_norm: a residual sum and its RMSNorm, so that no sum between layers is a launch of its own."""

from __future__ import annotations

from draftwood.kernels.registry import for_array
from draftwood.tree import Array


def add_rms_norm(
    x: Array,
    weight: Array,
    eps: float,
    a: Array | None = None,
    b: Array | None = None,
    *,
    impl: str | None = None,
) -> tuple[Array, Array]:
    """x + (a + b), and norm of that times weight.

    Args:
        x: [N, d]; rows may be parts of wider ones.
        weight: [d] in x's dtype.
        eps: added to the mean of the squares.
        a, b: [N, d] as `x`, what is to be added; b only with a.
        impl: implementation name; None chooses by the type and device of `x`.

    Returns:
        sum, normed: each [N, d] in x's dtype. a + b is rounded, and so is the sum, which is `x` itself without addends. It is
        divided by its root mean square in fp32 (fp64 for fp64), rounded, then multiplied by the weight. Source: arXiv 1910.07467.
    """
    fn = for_array("add_rms_norm", x, impl)
    return fn(x, weight, eps, a, b)  # type: ignore[no-any-return]
