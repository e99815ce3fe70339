"""moe_int4: `moe` with routed experts stored as 4-bit integers, 32 of a row to one scale."""

from __future__ import annotations

from draftwood.kernels.registry import for_array
from draftwood.tree import Array

GROUP = 32
"""Consecutive numbers of a row that share a scale."""
PER_WORD = 8
"""Numbers in one i32."""


def moe_int4(
    x: Array,
    router: Array,
    bias: Array,
    gate_up_packed: Array,
    gate_up_scale: Array,
    down_packed: Array,
    down_scale: Array,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    scaling: float = 1.0,
    first_expert: int = 0,
    impl: str | None = None,
) -> Array:
    """Sum over each token's experts of weight * down(silu(gate(x)) * up(x)), as `moe` and with its routing.

    A matrix [out, in] is kept as compressed-tensors packs it. Number (r, c) is scale[r, c // 32] * (n - 8), where n is the
    nibble c % 8, least significant first, of word [r, c // 8]: -8..7 times the scale. An implementation may round that
    product to x's dtype. Scales may be zero or negative.

    Args:
        x: [N, d], d a multiple of 32.
        router: [E, d]; scores are computed in fp32 (f64 for f64 input).
        bias: [E] f32, added for the selection only.
        gate_up_packed: [E, 2 I, d / 8] i32, gate rows first, I a multiple of 32.
        gate_up_scale: [E, 2 I, d / 32], bf16, fp16 or f32 (f64 for f64 input), whatever x's dtype is.
        down_packed: [E, d, I / 8] i32.
        down_scale: [E, d, I / 32], as gate_up_scale.
        top_k, n_group, topk_group, norm_topk_prob, scaling: as for `moe`, whose `route` decides.
        first_expert: as for `moe`; the four matrices may be those of some experts alone.
        impl: implementation name; None chooses by the type and device of `x`.

    Returns:
        [N, d] in x's dtype.
    """
    fn = for_array("moe_int4", x, impl)
    return fn(
        x,
        router,
        bias,
        gate_up_packed,
        gate_up_scale,
        down_packed,
        down_scale,
        top_k=top_k,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=norm_topk_prob,
        scaling=scaling,
        first_expert=first_expert,
    )
