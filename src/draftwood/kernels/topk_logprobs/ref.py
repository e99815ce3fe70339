"""Reference of `topk_logprobs`: partial results over vocabulary slices, and their merge."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftwood.kernels.noise.ref import gumbel
from draftwood.kernels.topk_logprobs import Partial, check_arguments


def topk_logprobs(
    logits: np.ndarray,
    k: int,
    *,
    temperature: np.ndarray | None = None,
    seed: np.ndarray | None = None,
    position: np.ndarray | None = None,
    start: np.ndarray | None = None,
    scale: np.ndarray | None = None,
    weight: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    check_arguments(logits.shape[-1], k, temperature, seed, position, start, weight)
    noise = {"temperature": temperature, "seed": seed, "position": position, "start": start}
    lp, ids = merge([partial(logits, k, 0, **noise, scale=scale)], k)
    if temperature is not None and weight is not None:
        for b, d in np.ndindex(lp.shape[:2]):
            live = lp[b, d] > -np.inf
            if temperature[b] > 0 and live.any():
                x = np.float64(weight[b, d]) * lp[b, d, live]
                lp[b, d, live] = x - np.logaddexp.reduce(x)
    return lp, ids


def partial(
    logits: np.ndarray,
    k: int,
    offset: int = 0,
    *,
    temperature: np.ndarray | None = None,
    seed: np.ndarray | None = None,
    position: np.ndarray | None = None,
    start: np.ndarray | None = None,
    scale: np.ndarray | None = None,
) -> Partial:
    """Of logits [B, D, v], the vocabulary slice that starts at token `offset`."""
    x: np.ndarray = logits.astype(np.float64 if logits.dtype == np.float64 else np.float32)
    if scale is not None:
        x = x * scale[..., None]
    token = np.arange(offset, offset + x.shape[-1])
    if temperature is not None and seed is not None and position is not None:
        position = np.broadcast_to(position, x.shape[:2]) + (0 if start is None else start[:, None])
        for b in np.flatnonzero(temperature > 0):
            noise = gumbel(seed[b], position[b, :, None], token)  # [D, v]
            x[b] = x[b].astype(np.float32) / np.float32(temperature[b]) + noise
    x[~np.isfinite(x)] = -np.inf
    order = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    maximum = x.max(-1).astype(np.float64)
    shift = np.where(np.isfinite(maximum), maximum, 0.0)
    total = np.exp(x.astype(np.float64) - shift[..., None]).sum(-1)
    return Partial(np.take_along_axis(x, order, -1), token[order].astype(np.int32), maximum, total)


def merge(partials: Sequence[Partial], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Of all slices of the vocabulary, in its order."""
    value = np.concatenate([p.value for p in partials], -1)
    ids = np.concatenate([p.ids for p in partials], -1)
    order = np.argsort(-value, axis=-1, kind="stable")[..., :k]
    value, ids = np.take_along_axis(value, order, -1), np.take_along_axis(ids, order, -1)
    maxima = np.stack([p.maximum for p in partials])
    shift = np.where(np.isfinite(maxima.max(0)), maxima.max(0), 0.0)
    total = sum(p.total * np.exp(p.maximum - shift) for p in partials)
    lse = shift + np.log(np.where(total > 0, total, 1.0))
    return (value - lse[..., None]).astype(np.float32), ids
