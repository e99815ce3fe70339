"""mla_inputs: the rotary parts of the queries, and the latents with their norm and rotary part, where attention reads them."""

from __future__ import annotations

from draftwood.kernels.registry import for_array
from draftwood.tree import Array


def mla_inputs(
    q_rope: Array,
    k_rope: Array,
    latent: Array,
    cos: Array,
    sin: Array,
    kv_norm: Array,
    eps: float,
    q: Array,
    latents: Array,
    *,
    impl: str | None = None,
) -> tuple[Array, Array]:
    """q[:, :, R:] = rotated q_rope; latents = norm of latent times kv_norm, then rotated k_rope; both in place.

    Args:
        q_rope: [N, H, P], half-split; rows, heads and what follows may be parts of wider tensors, P even.
        k_rope: [N, P].
        latent: [N, R].
        cos, sin: [N, 1, P], tables of `rotary`.
        kv_norm: [R], in the dtype of all but the tables.
        eps: of the norm, which is that of `add_rms_norm`.
        q: [N, H, R + P], contiguous; its first R numbers per head are left as they are.
        latents: [N, R + P], contiguous.
        impl: implementation name; None chooses by the type and device of `q`.

    Returns:
        q and latents. x turns into x cos + roll(x, P / 2) sin, computed in the dtype of the tables or a wider one and rounded once.
    """
    fn = for_array("mla_inputs", q, impl)
    return fn(q_rope, k_rope, latent, cos, sin, kv_norm, eps, q, latents)  # type: ignore[no-any-return]
