"""moe in torch: tokens sorted by expert, one pair of matrix products per expert that any token chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

Matrices = Callable[[int], Tensor]
"""Number of an expert among those there are -> its weight [out, in], of any float type."""


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
    matrices = gate_up.__getitem__, down.__getitem__
    own = None if len(down) == len(router) else range(first_expert, first_expert + len(down))
    return run_experts(x, weights, experts, *matrices, own)


def run_experts(
    x: Tensor, weights: Tensor, experts: Tensor, gate_up: Matrices, down: Matrices, own: range | None = None
) -> Tensor:
    """The weighted sum [N, d] of the experts `own`, by default all, given what `route` gives.

    Asks for the matrices of chosen experts only.
    """
    top_k = experts.shape[1]
    rows = x.to(weights.dtype)
    order = None
    if own is not None:
        return _run_own(rows, weights, experts, gate_up, down, own).to(x.dtype)
    if len(x) == 1:  # its experts are distinct: nothing to sort
        chosen, loads, rows = experts[0].tolist(), [1] * top_k, rows.expand(top_k, -1)
    else:
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        rows = rows.index_select(0, order.div(top_k, rounding_mode="floor"))
        counts = flat.bincount().tolist()
        chosen = [expert for expert, n in enumerate(counts) if n > 0]
        loads = [counts[expert] for expert in chosen]
    gate, up = _by_expert(rows, gate_up, chosen, loads).chunk(2, -1)
    outputs = _by_expert(silu(gate).mul_(up), down, chosen, loads)
    if order is not None:
        outputs = torch.empty_like(outputs).index_copy_(0, order, outputs)
    return torch.bmm(weights[:, None], outputs.view(*experts.shape, -1)).squeeze(1).to(x.dtype)


def _run_own(
    rows: Tensor, weights: Tensor, experts: Tensor, gate_up: Matrices, down: Matrices, own: range
) -> Tensor:
    """`run_experts` where only the experts `own` are here."""
    pairs = ((experts >= own.start) & (experts < own.stop)).nonzero()
    flat = experts[pairs[:, 0], pairs[:, 1]]
    order = flat.argsort(stable=True)
    token, rank = pairs[order].unbind(1)
    out = torch.zeros_like(rows)
    counts = flat.bincount(minlength=own.stop).tolist()[own.start :]
    chosen = [expert for expert, n in enumerate(counts) if n > 0]
    if not chosen:
        return out
    loads = [counts[expert] for expert in chosen]
    gate, up = _by_expert(rows[token], gate_up, chosen, loads).chunk(2, -1)
    outputs = _by_expert(silu(gate).mul_(up), down, chosen, loads)
    return out.index_add_(0, token, outputs * weights[token, rank, None])


def _by_expert(rows: Tensor, matrices: Matrices, experts: Sequence[int], loads: Sequence[int]) -> Tensor:
    """The first loads[0] rows through the first expert's matrix, and so on."""
    parts = zip(experts, rows.split_with_sizes(loads), strict=True)
    return torch.cat([torch.mm(x, matrices(expert).to(x.dtype).t()) for expert, x in parts])


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
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    scores = linear(x.to(wide), router.to(wide)).sigmoid_()
    weights, experts = choose_experts(scores, bias, top_k, n_group, topk_group)
    if norm_topk_prob:
        weights /= weights.sum(-1, keepdim=True) + 1e-20
    return weights * scaling, experts.int()


def choose_experts(
    scores: Tensor, bias: Tensor, top_k: int, n_group: int, topk_group: int
) -> tuple[Tensor, Tensor]:
    """Scores [N, E] -> those of the chosen experts, and their indices, each [N, top_k], by biased score descending."""
    biased = scores + bias
    if n_group > 1:
        groups = biased.view(len(scores), n_group, -1)
        group_score = groups.topk(2, sorted=False).values.sum(-1)
        dropped = group_score.argsort(descending=True, stable=True)[:, topk_group:]
        groups.scatter_(1, dropped[:, :, None].expand(-1, -1, groups.shape[2]), -torch.inf)
    experts = biased.argsort(descending=True, stable=True)[:, :top_k]  # topk has no order among equals
    return scores.gather(1, experts), experts
