"""moe: DeepSeek-V3 routing (sigmoid, correction bias, group limits) and the routed experts."""

from __future__ import annotations

from draftwood.kernels.registry import for_array
from draftwood.tree import Array


def moe(
    x: Array,
    router: Array,
    bias: Array,
    gate_up: Array,
    down: Array,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    scaling: float = 1.0,
    first_expert: int = 0,
    impl: str | None = None,
) -> Array:
    """Sum over each token's experts of weight * down(silu(gate(x)) * up(x)). Shared experts are not included.

    Args:
        x: [N, d].
        router: [E, d]; scores are computed in fp32 (f64 for f64 input).
        bias: [E] f32, added for the selection only.
        gate_up: [E, 2 I, d], gate rows first; or of the experts first_expert .. first_expert + E' - 1 alone, E' < E.
        down: [E, d, I], or of the same experts.
        top_k: experts per token.
        n_group, topk_group: experts are split into n_group groups, of which the topk_group with the largest sum of
            their two best biased scores stay.
        norm_topk_prob: divide the weights by (their sum + 1e-20).
        scaling: routed_scaling_factor, applied after the normalisation.
        first_expert: the expert that gate_up and down begin with. Experts that they lack add nothing to the sum.
        impl: implementation name; None chooses by the type and device of `x`.

    Returns:
        [N, d] in x's dtype. Equal biased scores go to the smaller expert (or group) index.

    Each implementation also offers `route(x, router, bias, top_k=..., ...) -> (weights [N, top_k] f32 (f64 for
    f64 input), experts [N, top_k] i32)`, the experts ordered by biased score descending.
    Source: DeepSeek-V3 report, arXiv 2412.19437, section 2.1.2.
    """
    fn = for_array("moe", x, impl)
    return fn(
        x,
        router,
        bias,
        gate_up,
        down,
        top_k=top_k,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=norm_topk_prob,
        scaling=scaling,
        first_expert=first_expert,
    )
