"""`sample` in torch, on any device: a cheap path for greedy rows, one for unfiltered rows and one for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from draftwood.kernels.noise.torch_impl import gumbel, gumbel_of_bits, slice_bits
from draftwood.kernels.ordering import NO_CANDIDATE, largest, pack, unpack
from draftwood.kernels.sample.logits import live_counts, live_slots, processed
from draftwood.kernels.sample.params import SampleParams
from draftwood.tree import DraftTree

_PREFIX = 32
"""Sorted candidates looked at first; filters that keep more look at eight times as many, and so on."""


@dataclass(frozen=True)
class Partial:
    """What one vocabulary slice contributes. Rows are counted over [B, T] flattened."""

    best: Tensor  # [B * T] i64, packed winner of each greedy or unfiltered row, else NO_CANDIDATE
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
    best = torch.full((B * T,), NO_CANDIDATE, device=logits.device)
    if len(greedy):
        value, index = _take(x, greedy).max(1)  # the first of equals
        best[greedy] = pack(value, index + offset)
    if len(plain):
        b = plain // T
        scaled = _take(x, plain) / params.temperature[b, None]
        best[plain] = _noisy_winner(scaled, seed[b], position.flatten()[plain], offset)
    if len(filtered) == 0:
        return Partial(best, filtered, x[:0], filtered.new_empty(0, v))
    b = filtered // T
    scaled, index = _slice_candidates(_take(x, filtered) / params.temperature[b, None], params.top_k[b])
    return Partial(best, filtered, scaled, index + offset)


def merge(
    partials: Sequence[Partial],
    params: SampleParams,
    seed: Tensor,
    position: Tensor,
    tree: DraftTree | None = None,
) -> tuple[Tensor, Tensor]:
    """Of all slices of the vocabulary, in its order."""
    B, T = position.shape
    best = reduce(torch.maximum, (p.best for p in partials))
    rows = partials[0].rows
    if len(rows):
        x, ids = torch.cat([p.x for p in partials], 1), torch.cat([p.ids for p in partials], 1)
        b = rows // T
        value, index = _kept(x, params.top_k[b], params.top_p[b], params.log_min_p[b])
        token = ids.gather(1, index)
        noise = gumbel(seed[b, None], position.flatten()[rows, None], token)
        best = best.index_copy(0, rows, pack(value + noise, token).amax(1))
    value, token = unpack(best.view(B, T))
    found = value > float("-inf")
    choice = torch.where(found, token, 0)
    status = (live_slots(tree, B, T, position.device) & ~found).any(1).int()
    return choice, status


def _rows_by_kind(params: SampleParams, tree: DraftTree | None, B: int, T: int) -> list[Tensor]:
    """Live rows, counted over [B, T] flattened: greedy, unfiltered, filtered."""
    kinds: tuple[list[int], ...] = ([], [], [])
    device = params.temperature.device
    n_live = live_counts(tree, B, T, device)
    arrays = (params.temperature, params.top_k, params.top_p, params.log_min_p, n_live)
    rows = zip(*(a.tolist() for a in arrays), strict=True)
    for b, (temperature, top_k, top_p, log_min_p, n) in enumerate(rows):
        filters = top_k > 0 or top_p < 1 or log_min_p > float("-inf")
        which = 0 if temperature == 0 else 2 if filters else 1
        kinds[which].extend(range(b * T, b * T + n))
    return [torch.tensor(kind, dtype=torch.int64, device=device) for kind in kinds]


def _take(x: Tensor, rows: Tensor) -> Tensor:
    return x if len(rows) == len(x) else x[rows]


def _slice_candidates(x: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor]:
    """Values and indices of x [R, v] that can survive top-k; all of them if a row has none."""
    if bool((top_k > 0).all()):
        return largest(x, min(x.shape[1], int(top_k.max())))
    return x, torch.arange(x.shape[1], device=x.device).expand(x.shape)


def _noisy_winner(x: Tensor, seed: Tensor, position: Tensor, offset: int) -> Tensor:
    """[R] packed winner of x + noise, x [R, v], with exact noise only for tokens that could win.

    The noise of random number v is at most -log(v), so x - log(v) bounds each value from above. Its maximum
    names a token whose own value all others must reach; the few whose bound does are compared exactly.
    """
    bits = slice_bits(seed, position, offset, x.shape[1])
    peak = x.amax(1, keepdim=True)
    shift = peak.clamp(min=torch.finfo(torch.float32).min)
    # exp(shift - bound), up to rounding and the factor 2^32 of v
    inverse = (shift - x).exp_().mul_(bits.float().add_(0.5))
    leader = inverse.argmin(1, keepdim=True)
    value = x.gather(1, leader) + gumbel_of_bits(bits.gather(1, leader))
    slack = (shift.abs() + 64.0) * 2.0**-20  # covers the roundings of x - shift, exp, the product and the sum
    threshold = torch.where(peak == shift, (shift - value + slack).exp() * 2.0**32, -1.0)
    row, index = (inverse <= threshold).nonzero(as_tuple=True)
    keys = pack(x[row, index] + gumbel_of_bits(bits[row, index]), index + offset)
    none = torch.full((len(x),), NO_CANDIDATE, device=x.device)
    return none.scatter_reduce(0, row, keys, "amax")


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
