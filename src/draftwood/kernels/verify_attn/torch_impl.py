"""verify_attn in torch: two batched matrix products over the gathered live prefixes and the trees."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwood.kernels.paged import gather_prefix, past_end, similar_lengths


def verify_attn(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    prefix_len: Tensor,
    tree_kv: Tensor,
    ancestors: Tensor,
    n_slots: Tensor,
    scale: float,
    *,
    value_dim: int,
) -> tuple[Tensor, Tensor]:
    """See `draftwood.kernels.verify_attn.verify_attn`.

    Requests whose prefixes are short, or within a factor of two of each other, share one padded batch, so none pays
    for a far longer one. Reads lengths on the host, which waits for the device on a GPU.
    """
    lengths, slots = prefix_len.tolist(), n_slots.tolist()
    groups = list(similar_lengths(lengths))
    if len(groups) == 1:
        return _padded_batch(
            q, pages, page_table, lengths, tree_kv, ancestors, slots, scale=scale, value_dim=value_dim
        )
    B, T, H, _ = q.shape
    o = q.new_empty(B, T, H, value_dim)
    lse = q.new_empty(B, T, H, dtype=_wide(q.dtype))
    for group in groups:
        rows = torch.tensor(group, device=q.device)
        o[rows], lse[rows] = _padded_batch(
            q[rows],
            pages,
            page_table[rows],
            [lengths[b] for b in group],
            tree_kv[rows],
            ancestors[rows],
            [slots[b] for b in group],
            scale=scale,
            value_dim=value_dim,
        )
    return o, lse


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What scores and sums of `dtype` inputs are held in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _padded_batch(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    lengths: list[int],
    tree_kv: Tensor,
    ancestors: Tensor,
    slots: list[int],
    *,
    scale: float,
    value_dim: int,
) -> tuple[Tensor, Tensor]:
    """All rows at once: keys are max(lengths) prefix positions, then the trees' first max(slots) slots."""
    B, T, H, _ = q.shape
    n_prefix, n = max(lengths), max(1, *slots)
    keys = gather_prefix(pages, page_table, lengths, tree_kv[:, :n]).to(_wide(q.dtype))
    hidden = _hidden_slots(ancestors[:, :n], n)
    ragged = min(lengths) < n_prefix or min(slots) < n
    if ragged:
        dead_slot = past_end(slots, n, q.device)
        dead_key = torch.cat((past_end(lengths, n_prefix, q.device), dead_slot), 1)
        keys.masked_fill_(dead_key[..., None], 0)  # a weight of 0 does not cancel NaN
        hidden = pad(hidden, (n_prefix, 0)) | dead_key[:, None] | dead_slot[..., None]
    queries = (q[:, :n].to(keys.dtype) * scale).flatten(1, 2)
    scores = (queries @ keys.transpose(1, 2)).view(B, n, H, -1)
    scores[..., -hidden.shape[-1] :].masked_fill_(hidden[:, :, None], -torch.inf)
    weights, total, lse = _softmax(scores)
    o = (weights.flatten(1, 2) @ keys[..., :value_dim]).view(B, n, H, value_dim).div_(total)
    if ragged:
        o.masked_fill_(dead_slot[..., None, None], 0)
    if n < T:
        o, lse = pad(o, (0, 0, 0, 0, 0, T - n)), pad(lse, (0, 0, 0, T - n), value=-torch.inf)
    return o.to(q.dtype), lse


def _hidden_slots(ancestors: Tensor, n: int) -> Tensor:
    """[B, n, W] ancestor bits -> [B, n, n] bool, true where slot i does not see slot j."""
    bit = torch.arange(64, device=ancestors.device)
    return ((ancestors[..., None] >> bit) & 1).flatten(-2)[..., :n] == 0


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Overwrites scores [..., keys] -> weights, their sum (at least 1) [..., 1], log of the scores' sum [...]."""
    # A row that sees nothing is all -inf; a finite maximum makes its weights 0, not NaN.
    top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = total.log().add_(top).squeeze(-1)
    return weights, total.clamp_(min=1), lse
