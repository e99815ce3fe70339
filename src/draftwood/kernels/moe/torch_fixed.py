"""moe in torch, with products and sums whose order does not depend on the other tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from draftwood.kernels.by_row import by_row
from draftwood.kernels.linear import linear
from draftwood.kernels.moe.torch_impl import Matrices, choose_experts


def moe(
    x: Tensor,
    router: Tensor,
    bias: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    first_expert: int = 0,
    **routing: Any,
) -> Tensor:
    """See `draftwood.kernels.moe.moe`. Reads the experts' loads on the host, which waits for the device on a GPU."""
    weights, experts = route(x, router, bias, **routing)
    own = range(first_expert, first_expert + len(down))
    return run_experts(x, weights, experts, gate_up.__getitem__, down.__getitem__, own)


def route(
    x: Tensor,
    router: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Weights [N, top_k] f32 (f64 for f64 input) and experts [N, top_k] i32, by biased score descending."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = by_row(torch.sigmoid, linear(x.to(wide), router.to(wide)))
    weights, experts = choose_experts(scores, bias, top_k, n_group, topk_group)
    if norm_topk_prob:
        weights = weights / (_sum_of(weights.unbind(1))[:, None] + 1e-20)
    return weights * scaling, experts.int()


def run_experts(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Matrices, down: Matrices, own: range
) -> Tensor:
    """The weighted sum [N, d] of the experts `own`, in the order of a token's ranks, given what `route` gives.

    Asks for the matrices of chosen experts only, by their number in `own`.
    """
    rows = x.to(weights.dtype)
    outputs = rows.new_zeros(*experts.shape, rows.shape[1])
    for expert in experts.unique().tolist():
        if expert not in own:
            continue
        token, rank = (experts == expert).nonzero(as_tuple=True)
        e = expert - own.start
        gate, up = linear(rows[token], gate_up(e).to(rows.dtype)).chunk(2, -1)
        outputs[token, rank] = linear(by_row(silu, gate) * up, down(e).to(rows.dtype))
    return _sum_of((weights[..., None] * outputs).unbind(1)).to(x.dtype)


def _sum_of(parts: tuple[Tensor, ...]) -> Tensor:
    """One after the other."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
