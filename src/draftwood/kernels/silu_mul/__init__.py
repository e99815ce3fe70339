"""silu_mul: the activation of a SwiGLU block."""

from __future__ import annotations

from draftwood.kernels.registry import for_array
from draftwood.tree import Array


def silu_mul(gate_up: Array, *, impl: str | None = None) -> Array:
    """silu(gate) * up.

    Args:
        gate_up: [N, 2 I], each row the gate's numbers, then the other factor's; rows may be parts of wider ones.
        impl: implementation name; None chooses by the type and device of `gate_up`.

    Returns:
        [N, I] in the same dtype; silu(x) = x / (1 + exp(-x)) is computed in fp32 (fp64 for fp64) and rounded before the product.
        Source: arXiv 2002.05202.
    """
    fn = for_array("silu_mul", gate_up, impl)
    return fn(gate_up)
