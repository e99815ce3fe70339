"""moe_int4 in torch, with products and sums whose order does not depend on the other tokens.

On CPU expert by expert, with the loads known; on a GPU every expert and every token, so that the host never waits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from draftwood.kernels.linear import linear
from draftwood.kernels.moe.torch_fixed import route, run_experts
from draftwood.kernels.moe_int4.torch_impl import dequantise


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
    if not x.is_cuda:
        return run_experts(
            x,
            weights,
            experts,
            lambda e: dequantise(gate_up_packed[e], gate_up_scale[e], weights.dtype),
            lambda e: dequantise(down_packed[e], down_scale[e], weights.dtype),
            own,
        )
    out = torch.zeros_like(x, dtype=weights.dtype)
    for e, expert in enumerate(own):
        here = experts == expert  # [N, top_k], once per row at most
        gate, up = linear(x, dequantise(gate_up_packed[e], gate_up_scale[e], x.dtype)).chunk(2, 1)
        y = linear(silu(gate) * up, dequantise(down_packed[e], down_scale[e], x.dtype))
        scale = torch.where(here, weights, 0).amax(1, keepdim=True)
        out += torch.where(here.any(1, keepdim=True), y * scale, 0)
    return out.to(x.dtype)
