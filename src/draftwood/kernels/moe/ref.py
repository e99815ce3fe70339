"""moe, the definition: each token's experts one after the other, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Matrices = Callable[[int], np.ndarray]
"""Number of an expert among those there are -> its weight [out, in]."""


def moe(
    x: np.ndarray,
    router: np.ndarray,
    bias: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    scaling: float = 1.0,
    first_expert: int = 0,
) -> np.ndarray:
    """See `draftwood.kernels.moe.moe`."""
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
    own = range(first_expert, first_expert + len(down))
    return run_experts(x, weights, experts, own, gate_up.__getitem__, down.__getitem__)


def run_experts(
    x: np.ndarray, weights: np.ndarray, experts: np.ndarray, own: range, gate_up: Matrices, down: Matrices
) -> np.ndarray:
    """The weighted sum [N, d] of the experts `own`, which the matrices are of, given what `route` gives."""
    out = np.zeros(x.shape, np.float64)
    for e, expert in enumerate(own):
        token, rank = np.nonzero(experts == expert)
        gate, up = np.split(x[token].astype(np.float64) @ gate_up(e).T.astype(np.float64), 2, axis=1)
        hidden = gate * _sigmoid(gate) * up
        out[token] += weights[token, rank, None] * (hidden @ down(e).T.astype(np.float64))
    return out.astype(x.dtype)


def route(
    x: np.ndarray,
    router: np.ndarray,
    bias: np.ndarray,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    scaling: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Weights [N, top_k] f32 (f64 for f64 input) and experts [N, top_k] i32, by biased score descending."""
    scores = _sigmoid(x.astype(np.float64) @ router.T.astype(np.float64))  # [N, E]
    biased = scores + bias
    if n_group > 1:
        groups = biased.reshape(len(x), n_group, -1)
        group_score = np.sort(groups)[:, :, -2:].sum(-1)
        dropped = _descending(group_score)[:, topk_group:]
        np.put_along_axis(groups, dropped[:, :, None], -np.inf, axis=1)
        biased = groups.reshape(scores.shape)
    experts = _descending(biased)[:, :top_k]
    weights = np.take_along_axis(scores, experts, axis=1)
    if norm_topk_prob:
        weights /= weights.sum(-1, keepdims=True) + 1e-20
    return (weights * scaling).astype(x.dtype), experts.astype(np.int32)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


def _descending(x: np.ndarray) -> np.ndarray:
    """Indices of each row's values, largest first; equal values by index."""
    return np.argsort(-x, axis=1, kind="stable")
