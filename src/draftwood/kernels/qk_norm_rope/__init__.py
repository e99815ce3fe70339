"""qk_norm_rope: queries and keys of the drafter, each head normalised and rotated; values pass unchanged."""

from __future__ import annotations

from draftwood.kernels.registry import for_array
from draftwood.tree import Array


def qk_norm_rope(
    x: Array,
    q_norm: Array | None,
    k_norm: Array,
    cos: Array,
    sin: Array,
    eps: float,
    n_q: int,
    *,
    n_v: int = 0,
    impl: str | None = None,
) -> Array:
    """Every head of x by the norm of `add_rms_norm`, queries and keys with weights of their own, then rotated as in `mla_inputs`.

    Args:
        x: [L, N, H, hd] of L layers, the first `n_q` heads queries, the last `n_v` values, the others keys; all but the last axis
            may be parts of wider ones, hd even.
        q_norm: [hd] in x's dtype; may be None without queries.
        k_norm: [L, hd] in x's dtype.
        cos, sin: [N, 1, hd], tables of `rotary`.
        eps: of the norm.
        n_q, n_v: heads, together at most H.
        impl: implementation name; None chooses by the type and device of `x`.

    Returns:
        [L, N, H, hd] in x's dtype, contiguous.
    """
    fn = for_array("qk_norm_rope", x, impl)
    return fn(x, q_norm, k_norm, cos, sin, eps, n_q, n_v=n_v)
