"""`topk_logprobs` in torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.kernels.noise.torch_impl import slice_gumbel
from draftwood.kernels.ordering import finite, largest
from draftwood.kernels.topk_logprobs import Partial, check_arguments


def topk_logprobs(
    logits: Tensor,
    k: int,
    *,
    temperature: Tensor | None = None,
    seed: Tensor | None = None,
    position: Tensor | None = None,
    start: Tensor | None = None,
    scale: Tensor | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check_arguments(logits.shape[-1], k, temperature, seed, position, start, weight)
    noise = {"temperature": temperature, "seed": seed, "position": position, "start": start}
    lp, ids = merge([partial(logits, k, 0, **noise, scale=scale)], k)
    return (lp if weight is None or temperature is None else weighted(lp, weight, temperature)), ids


def weighted(lp: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    """lp [B, D, k] with the rows of temperature > 0 replaced by the log-softmax of weight * lp."""
    scores = (lp * weight[..., None]).log_softmax(-1)
    hot = (temperature > 0)[:, None, None]
    return torch.where(hot & (lp > -torch.inf), scores, lp)  # a row may be without a candidate


def partial(
    logits: Tensor,
    k: int,
    offset: int = 0,
    *,
    temperature: Tensor | None = None,
    seed: Tensor | None = None,
    position: Tensor | None = None,
    start: Tensor | None = None,
    scale: Tensor | None = None,
) -> Partial:
    """Of logits [B, D, v], the vocabulary slice that starts at token `offset`."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    if scale is not None:
        x = x * scale[..., None]
    if temperature is not None and seed is not None and position is not None:
        position = position.expand(x.shape[:2]) if start is None else start[:, None] + position
        x = _coupled(x, offset, temperature, seed, position)
    x = finite(x)
    value, index = largest(x, min(k, x.shape[-1]))
    maximum = value[..., 0]
    total = (x - _shift(maximum)[..., None]).exp_().sum(-1)
    return Partial(value, (index + offset).int(), maximum, total)


def merge(partials: Sequence[Partial], k: int) -> tuple[Tensor, Tensor]:
    """Of all slices of the vocabulary, in its order."""
    if len(partials) == 1:
        (p,) = partials
        value, ids, maximum, total = p.value, p.ids, p.maximum, p.total
    else:
        value, index = largest(torch.cat([p.value for p in partials], -1), k)
        ids = torch.cat([p.ids for p in partials], -1).gather(-1, index)
        maxima = torch.stack([p.maximum for p in partials])
        maximum = maxima.amax(0)
        total = (torch.stack([p.total for p in partials]) * (maxima - _shift(maximum)).exp()).sum(0)
    # the largest adds exp(0) = 1 to the total, so that lp <= 0 however the sum is rounded
    lp = (value - _shift(maximum)[..., None]) - total.clamp(min=1.0).log()[..., None]
    return lp.float(), ids


def _coupled(x: Tensor, offset: int, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """x with the rows of temperature > 0 replaced by fp32(x) / temperature + noise."""
    hot = (temperature > 0).nonzero().squeeze(1)
    if len(hot) == 0:
        return x
    noise = slice_gumbel(seed[hot, None], position[hot], offset, x.shape[-1])
    perturbed = x[hot].float() / temperature[hot, None, None] + noise
    return x.index_copy(0, hot, perturbed.to(x.dtype))


def _shift(maximum: Tensor) -> Tensor:
    """The maximum, or 0 where a row has no finite entry."""
    return maximum.clamp(min=torch.finfo(maximum.dtype).min)
