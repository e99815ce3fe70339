"""moe_int4 in torch, with products and sums whose order does not depend on the other tokens.

On CPU expert by expert, with the loads known; on a GPU every expert and every token, so that the host never waits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftwood.kernels.linear import linear
from draftwood.kernels.moe.torch_fixed import route, run_experts
from draftwood.kernels.moe_int4.torch_impl import all_experts, one_by_one


def moe_int4(
    x: Tensor,
    router: Tensor,
    bias: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    first_expert: int = 0,
    **routing: Any,
) -> Tensor:
    """See `draftwood.kernels.moe_int4.moe_int4`."""
    weights, experts = route(x, router, bias, **routing)
    own = range(first_expert, first_expert + len(down_packed))
    if x.is_cuda:
        quantised = (gate_up_packed, gate_up_scale, down_packed, down_scale)
        return all_experts(x, weights, experts, *quantised, own, multiply=linear)
    return run_experts(
        x,
        weights,
        experts,
        one_by_one(gate_up_packed, gate_up_scale, weights.dtype),
        one_by_one(down_packed, down_scale, weights.dtype),
        own,
    )
