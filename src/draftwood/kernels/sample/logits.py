"""Steps 1 to 3 of `sample` in torch: penalties, bias and mask, on one vocabulary slice."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.ordering import finite
from draftwood.kernels.sample.params import SampleParams
from draftwood.tree import WORD, DraftTree, Status


def live_counts(tree: DraftTree | None, B: int, T: int, device: torch.device) -> Tensor:
    """[B]: how many slots choose a token. The root always does, also in an unsound tree."""
    if tree is None:
        return torch.full((B,), T, device=device)
    n: Tensor = tree.n_slots.clamp(1, T)
    return n.masked_fill(tree.status != Status.SOUND, 1)


def live_slots(tree: DraftTree | None, B: int, T: int, device: torch.device) -> Tensor:
    """[B, T] bool: the same as a mask."""
    return torch.arange(T, device=device) < live_counts(tree, B, T, device)[:, None]


def processed(logits: Tensor, params: SampleParams, tree: DraftTree | None, offset: int) -> Tensor:
    """A new [B, T, v] f32 in which everything that is no candidate is -inf."""
    x = finite(logits)
    if params.counts is not None:
        x = _penalised(x, params, tree, offset)
    if params.bias_ids is not None:
        x = x + _bias(params, offset, x.shape[2])[:, None]
    if params.mask_bits is not None:
        token = torch.arange(offset, offset + x.shape[2], device=x.device)
        allowed = params.mask_bits[:, :, token // 32] >> (token % 32) & 1
        x = x.masked_fill(allowed == 0, float("-inf"))
    return x if params.counts is None and params.bias_ids is None else finite(x)


def _penalised(x: Tensor, params: SampleParams, tree: DraftTree | None, offset: int) -> Tensor:
    n = _occurrences(x, params, tree, offset)
    repetition, frequency, presence = (
        p[:, None, None] for p in (params.repetition, params.frequency, params.presence)
    )
    seen = (n > 0) | params.prompt_seen[:, None, offset : offset + x.shape[2]]
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - frequency * n.float()
    penalised: Tensor = x - presence * (n > 0).float()
    return penalised


def _occurrences(x: Tensor, params: SampleParams, tree: DraftTree | None, offset: int) -> Tensor:
    """[B, T, v] i32: committed counts plus those among the slot's ancestors, the root left out."""
    B, T, v = x.shape
    n: Tensor = params.counts[:, None, offset : offset + v].expand(B, T, v).clone()
    if tree is None:
        return n
    slot = torch.arange(T, device=x.device)
    is_ancestor = tree.ancestors[:, :, slot // WORD] >> (slot % WORD) & 1  # [B, T, T]
    token = tree.tokens.long() - offset
    counted = live_slots(tree, B, T, x.device) & (slot > 0) & (token >= 0) & (token < v)
    index = token.clamp(0, v - 1)[:, None].expand(B, T, T)
    return n.scatter_add_(2, index, (is_ancestor * counted[:, None]).to(n.dtype))


def _bias(params: SampleParams, offset: int, v: int) -> Tensor:
    """[B, v] f32."""
    token = params.bias_ids.long() - offset
    inside = (token >= 0) & (token < v) & (params.bias_ids >= 0)
    value = torch.where(inside, params.bias_values, 0.0)
    return value.new_zeros(len(token), v).scatter_add_(1, token.clamp(0, v - 1), value)
