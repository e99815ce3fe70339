"""`sample` in torch, on any device: a cheap path for greedy rows, one for unfiltered rows and one for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.kernels.noise.torch_impl import gumbel, slice_gumbel
from draftwood.kernels.ordering import largest
from draftwood.kernels.sample.logits import processed
from draftwood.kernels.sample.params import SampleParams
from draftwood.tree import DraftTree, Status

_NO_TOKEN = 2**31 - 1
_PREFIX = 32
"""Sorted candidates looked at first; filters that keep more look at eight times as many, and so on."""


@dataclass(frozen=True)
class Partial:
    """What one vocabulary slice contributes. Rows are counted over [B, T] flattened."""

    value: Tensor  # [B * T] f32, of the winner of each greedy or unfiltered row, else -inf
    token: Tensor  # [B * T] i64
    rows: Tensor  # [R] i64, the filtered rows, the same in every slice
    x: Tensor  # [R, C] f32, their candidates after step 4: all of the slice, or its top_k in order
    ids: Tensor  # [R, C] i64


def sample(
    logits: Tensor, params: SampleParams, seed: Tensor, position: Tensor, tree: DraftTree | None = None
) -> tuple[Tensor, Tensor]:
    return merge([partial(logits, params, seed, position, tree)], params, seed, position, tree)


def partial(
    logits: Tensor,
    params: SampleParams,
    seed: Tensor,
    position: Tensor,
    tree: DraftTree | None = None,
    offset: int = 0,
) -> Partial:
    """Of logits [B, T, v], the slice from token `offset`; the other arguments are those of the whole vocabulary."""
    B, T, v = logits.shape
    x = processed(logits, params, tree, offset).view(B * T, v)
    greedy, plain, filtered = _rows_by_kind(params, tree, B, T)
    value, token = x.new_full((B * T,), -torch.inf), position.new_zeros(B * T, dtype=torch.int64)
    if len(greedy):
        value, token = _put(value, token, greedy, *_take(x, greedy).max(1))  # the first of equals
    if len(plain):
        b = plain // T
        noise = slice_gumbel(seed[b], position.flatten()[plain], offset, v)
        y = _take(x, plain) / params.temperature[b, None] + noise
        value, token = _put(value, token, plain, *y.max(1))
    token = token + offset
    if len(filtered) == 0:
        return Partial(value, token, filtered, x[:0], filtered.new_empty(0, v))
    b = filtered // T
    scaled, index = _slice_candidates(_take(x, filtered) / params.temperature[b, None], params.top_k[b])
    return Partial(value, token, filtered, scaled, index + offset)


def merge(
    partials: Sequence[Partial],
    params: SampleParams,
    seed: Tensor,
    position: Tensor,
    tree: DraftTree | None = None,
) -> tuple[Tensor, Tensor]:
    """Of all slices of the vocabulary, in its order."""
    B, T = position.shape
    value, token, rows = partials[0].value, partials[0].token, partials[0].rows
    for p in partials[1:]:
        better = p.value > value  # of equals, the smaller id was first
        value, token = torch.where(better, p.value, value), torch.where(better, p.token, token)
    if len(rows):
        x, ids = torch.cat([p.x for p in partials], 1), torch.cat([p.ids for p in partials], 1)
        b = rows // T
        kept, index = _kept(x, params.top_k[b], params.top_p[b], params.log_min_p[b])
        ids = ids.gather(1, index)
        y = kept + gumbel(seed[b, None], position.flatten()[rows, None], ids)
        best = y.amax(1)
        smallest = ids.masked_fill_(y < best[:, None], _NO_TOKEN).amin(1)
        value, token = _put(value, token, rows, best, smallest)
    found = (value > float("-inf")).view(B, T)
    choice = token.int().view(B, T).masked_fill_(~found, -1)
    status = [n < live for n, live in zip(found.sum(1).tolist(), _live_counts(tree, B, T), strict=True)]
    return choice, torch.tensor(status, dtype=torch.int32, device=choice.device)


def _live_counts(tree: DraftTree | None, B: int, T: int) -> list[int]:
    """How many slots of each row choose a token. The root always does, also in an unsound tree."""
    if tree is None:
        return [T] * B
    rows = zip(tree.n_slots.tolist(), tree.status.tolist(), strict=True)
    return [min(max(n, 1), T) if status == Status.SOUND else 1 for n, status in rows]


def _rows_by_kind(params: SampleParams, tree: DraftTree | None, B: int, T: int) -> list[Tensor]:
    """Live rows, counted over [B, T] flattened: greedy, unfiltered, filtered."""
    kinds: tuple[list[int], ...] = ([], [], [])
    arrays = (params.temperature, params.top_k, params.top_p, params.log_min_p)
    rows = zip(*(a.tolist() for a in arrays), _live_counts(tree, B, T), strict=True)
    for b, (temperature, top_k, top_p, log_min_p, n) in enumerate(rows):
        filters = top_k > 0 or top_p < 1 or log_min_p > float("-inf")
        which = 0 if temperature == 0 else 2 if filters else 1
        kinds[which].extend(range(b * T, b * T + n))
    device = params.temperature.device
    return [torch.tensor(kind, dtype=torch.int64, device=device) for kind in kinds]


def _take(x: Tensor, rows: Tensor) -> Tensor:
    return x if len(rows) == len(x) else x[rows]


def _put(
    value: Tensor, token: Tensor, rows: Tensor, new_value: Tensor, new_token: Tensor
) -> tuple[Tensor, Tensor]:
    if len(rows) == len(value):
        return new_value, new_token
    return value.index_copy(0, rows, new_value), token.index_copy(0, rows, new_token)


def _slice_candidates(x: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor]:
    """Values and indices of x [R, v] that can survive top-k; all of them if a row has none."""
    if bool((top_k > 0).all()):
        return largest(x, min(x.shape[1], int(top_k.max())))
    return x, torch.arange(x.shape[1], device=x.device).expand(x.shape)


def _kept(x: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> tuple[Tensor, Tensor]:
    """Values and indices [R, m] of what steps 5 to 7 leave of x [R, C], in order, -inf padded.

    Each step keeps a prefix of the order, so a sorted prefix is enough once every row ends inside it.
    """
    C = x.shape[1]
    m = min(C, max(_PREFIX, int(top_k.max()) + 1))
    while True:
        value, index = largest(x, m)
        rank = torch.arange(m, device=x.device)
        keep = (value > float("-inf")) & ((rank < top_k[:, None]) | (top_k[:, None] <= 0))
        gap = value - value[:, :1]
        if bool((top_p < 1).any()):
            keep &= _inside_top_p(x, gap, keep, top_k, top_p)
        keep &= gap >= log_min_p[:, None]
        if m == C or not bool(keep[:, -1].any()):
            break
        m = min(C, 8 * m)
    longest = int(keep.sum(1).amax())
    value = value.masked_fill_(~keep, float("-inf"))
    return value[:, : max(1, longest)], index[:, : max(1, longest)]


def _inside_top_p(x: Tensor, gap: Tensor, keep: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Step 6 for the sorted prefix of x whose distances from the maximum are `gap` and whose top-k is `keep`."""
    w = _fixed_point(gap)
    total = (w * keep).sum(1)
    unlimited = ((top_k <= 0) & (top_p < 1)).nonzero().squeeze(1)
    if len(unlimited):
        tail = _take(x, unlimited)
        total[unlimited] = _fixed_point(tail - tail.amax(1, keepdim=True)).sum(1)
    cut = (top_p.double() * total.double()).long().clamp(min=1)
    return (w.cumsum(1) - w < cut[:, None]) | (top_p == 1)[:, None]


def _fixed_point(gap: Tensor) -> Tensor:
    return gap.double().exp_().mul_(2.0**40).round_().long()
