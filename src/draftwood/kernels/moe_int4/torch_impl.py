"""moe_int4 in torch: what is chosen is unpacked just before it is multiplied, so that little more than that is read.

On CPU expert by expert, with the loads known. On a GPU the host never waits, so that a graph can hold it: few (token, expert)
pairs each unpack their own expert; many go through every expert, with weight 0 where it was not chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from draftwood.kernels.moe.torch_impl import Matrices, route, run_experts
from draftwood.kernels.moe_int4 import GROUP

_AT_ONCE = 1 << 28
"""Numbers of gate_up matrices unpacked together for pairs: half a gigabyte in bf16."""


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
    quantised = (gate_up_packed, gate_up_scale, down_packed, down_scale)
    E = len(down_packed)
    own = None if len(router) == E else range(first_expert, first_expert + E)
    if x.is_cuda:
        if own is not None:
            return all_experts(x, weights, experts, *quantised, own)
        every = pair_by_pair if experts.numel() < len(router) else all_experts
        return every(x, weights, experts, *quantised)
    return run_experts(
        x,
        weights,
        experts,
        one_by_one(gate_up_packed, gate_up_scale, weights.dtype),
        one_by_one(down_packed, down_scale, weights.dtype),
        own,
    )


def one_by_one(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Matrices:
    """The experts' matrices, each unpacked when it is asked for."""
    return lambda e: dequantise(packed[e], scale[e], dtype)


def dequantise(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Words [..., n / 8] i32 and scales [..., n / 32] -> numbers [..., n], rounded once to `dtype`."""
    low_and_high = packed.view(torch.uint8)  # a word's nibbles in order are its bytes' low and high ones
    nibbles = torch.stack((low_and_high & 15, low_and_high >> 4), -1)
    groups = nibbles.view(*scale.shape, GROUP).to(torch.promote_types(dtype, scale.dtype))
    return groups.sub_(8).mul_(scale[..., None]).flatten(-2).to(dtype)


def pair_by_pair(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
) -> Tensor:
    """The experts' weighted sum [N, d]; every pair of a token and an expert unpacks that expert's matrices."""
    flat = experts.flatten()
    rows = x.repeat_interleave(experts.shape[1], 0)[:, :, None]  # [pairs, d, 1]
    outputs = []
    together = max(1, _AT_ONCE // (gate_up_packed[0].numel() * 8))
    for chosen, row in zip(flat.split(together), rows.split(together), strict=True):
        gate_up = dequantise(gate_up_packed[chosen], gate_up_scale[chosen], x.dtype)
        gate, up = torch.bmm(gate_up, row).chunk(2, 1)
        down = dequantise(down_packed[chosen], down_scale[chosen], x.dtype)
        outputs.append(torch.bmm(down, silu(gate).mul_(up)))
    per_token = torch.cat(outputs).view(*experts.shape, -1).to(weights.dtype)
    return torch.bmm(weights[:, None], per_token).squeeze(1).to(x.dtype)


def all_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    own: range | None = None,
    multiply: Callable[[Tensor, Tensor], Tensor] = linear,
) -> Tensor:
    """The same by way of every expert, or those of `own`, and every token. A token that is not finite stays by itself."""
    own = own or range(len(gate_up_packed))
    out = torch.zeros_like(x, dtype=weights.dtype)
    for e, expert in enumerate(own):
        here = experts == expert  # [N, top_k], once per row at most
        gate, up = multiply(x, dequantise(gate_up_packed[e], gate_up_scale[e], x.dtype)).chunk(2, 1)
        y = multiply(silu(gate).mul_(up), dequantise(down_packed[e], down_scale[e], x.dtype))
        scale = torch.where(here, weights, 0).sum(1, keepdim=True)
        out += torch.where(here.any(1, keepdim=True), y * scale, 0)
    return out.to(x.dtype)
