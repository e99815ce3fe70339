"""moe in torch: tokens sorted by expert, one pair of matrix products per expert that any token chose."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


def moe(
    x: Tensor,
    router: Tensor,
    bias: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    scaling: float = 1.0,
) -> Tensor:
    """See `draftwood.kernels.moe.moe`. Reads the experts' loads on the host, which waits for the device on a GPU."""
    weights, experts = route(
        x,
        router,
        bias,
        top_k=top_k,
        n_group=n_group,
        topk_group=topk_group,
        norm_topk_prob=norm_topk_prob,
        scaling=scaling,
    )
    by_expert, order = experts.flatten().sort(stable=True)
    chosen, loads = by_expert.unique_consecutive(return_counts=True)
    inputs = x.to(weights.dtype).index_select(0, order // top_k).split(loads.tolist())
    outputs = torch.cat(
        [_expert(h, gate_up[e], down[e]) for e, h in zip(chosen.tolist(), inputs, strict=True)]
    )
    per_choice = torch.empty_like(outputs).index_copy_(0, order, outputs).view(*experts.shape, -1)
    return (weights[:, None] @ per_choice).squeeze(1).to(x.dtype)


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
    scores = linear(x.to(wide), router.to(wide)).sigmoid_()  # [N, E]
    biased = scores + bias
    if n_group > 1:
        groups = biased.view(len(x), n_group, -1)
        group_score = groups.topk(2, sorted=False).values.sum(-1)
        dropped = group_score.argsort(descending=True, stable=True)[:, topk_group:]
        groups.scatter_(1, dropped[:, :, None].expand(-1, -1, groups.shape[2]), -torch.inf)
    experts = biased.argsort(descending=True, stable=True)[:, :top_k]  # topk has no order among equals
    weights = scores.gather(1, experts)
    if norm_topk_prob:
        weights /= weights.sum(-1, keepdim=True) + 1e-20
    return weights * scaling, experts.int()


def _expert(h: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = linear(h, gate_up.to(h.dtype)).chunk(2, -1)
    return linear(silu(gate).mul_(up), down.to(h.dtype))
