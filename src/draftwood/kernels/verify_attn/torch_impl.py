"""verify_attn in torch: two batched matrix products over the gathered live prefixes and the trees."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwood.kernels.paged import gather_prefix, past_end, prefix_pages, similar_lengths


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
    """See `draftwood.kernels.verify_attn.verify_attn`."""
    attention = TreeAttention(page_table, prefix_len, ancestors, n_slots, pages.shape[1])
    lse = q.new_empty(q.shape[:3], dtype=wide_dtype(q.dtype))
    return attention(q, pages, tree_kv, scale, value_dim=value_dim, lse=lse), lse


class TreeAttention:
    """`verify_attn` over given prefixes and trees, for any number of layers.

    Requests whose prefixes are short, or within a factor of two of each other, share one padded batch, so none pays
    for a far longer one. Reads lengths on the host, which waits for the device on a GPU.
    """

    def __init__(
        self, page_table: Tensor, prefix_len: Tensor, ancestors: Tensor, n_slots: Tensor, page: int
    ) -> None:
        lengths, slots = prefix_len.tolist(), n_slots.tolist()
        groups = list(similar_lengths(lengths))
        if len(groups) == 1:
            self._rows: list[Tensor | slice] = [slice(None)]
        else:
            self._rows = [torch.tensor(group, device=page_table.device) for group in groups]
        self._batches = [
            _PaddedBatch(
                page_table[rows],
                [lengths[b] for b in group],
                ancestors[rows],
                [slots[b] for b in group],
                page,
            )
            for rows, group in zip(self._rows, groups, strict=True)
        ]

    def __call__(
        self,
        q: Tensor,
        pages: Tensor,
        tree_kv: Tensor,
        scale: float,
        *,
        value_dim: int,
        lse: Tensor | None = None,
    ) -> Tensor:
        """o [B, T, H, R]; the arguments are those that differ from layer to layer. Fills `lse` if one is given."""
        if len(self._batches) == 1:
            return self._batches[0].attend(q, pages, tree_kv, scale, value_dim, lse)
        o = q.new_empty(*q.shape[:3], value_dim)
        for rows, batch in zip(self._rows, self._batches, strict=True):
            part = None if lse is None else lse[rows]
            o[rows] = batch.attend(q[rows], pages, tree_kv[rows], scale, value_dim, part)
            if lse is not None and part is not None:
                lse[rows] = part
        return o


verify_attn.prepare = TreeAttention  # type: ignore[attr-defined]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What scores and sums of `dtype` inputs are held in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _PaddedBatch:
    """All rows at once: keys are max(lengths) prefix positions, then the trees' first max(slots) slots."""

    def __init__(
        self, page_table: Tensor, lengths: list[int], ancestors: Tensor, slots: list[int], page: int
    ) -> None:
        device = page_table.device
        self.n_prefix, self.n = n_prefix, n = max(lengths), max(1, *slots)
        self.ids = prefix_pages(page_table, lengths, n, page)
        self.dead_key: Tensor | None = None  # [B, n_prefix + n]
        self.blind: Tensor | None = None  # [B, n], inert slots and others that see nothing
        hidden = hidden_slots(ancestors[:, :n], n)
        if min(lengths) < n_prefix or min(slots) < n:
            dead_slot = past_end(slots, n, device)
            self.dead_key = torch.cat((past_end(lengths, n_prefix, device), dead_slot), 1)
            hidden = pad(hidden, (n_prefix, 0)) | self.dead_key[:, None] | dead_slot[..., None]
        if hidden.shape[-1] == n_prefix + n:
            self.blind = hidden.all(-1)
        # [B, n, 1, n], or [B, n, 1, n_prefix + n] where prefixes count: true where a slot does not see a key
        self.hidden = hidden[:, :, None] if bool(hidden.any()) else None

    def attend(
        self, q: Tensor, pages: Tensor, tree_kv: Tensor, scale: float, value_dim: int, lse: Tensor | None
    ) -> Tensor:
        B, T, H, _ = q.shape
        n = self.n
        keys = gather_prefix(pages, self.ids, self.n_prefix, tree_kv[:, :n]).to(wide_dtype(q.dtype))
        if self.dead_key is not None:
            keys.masked_fill_(self.dead_key[..., None], 0)  # a weight of 0 does not cancel NaN
        queries = q[:, :n].to(keys.dtype).flatten(1, 2)
        scores = torch.baddbmm(keys.new_zeros(()), queries, keys.mT, beta=0, alpha=scale).view(B, n, H, -1)
        if self.hidden is not None:
            width = self.hidden.shape[-1]
            scores.narrow(-1, scores.shape[-1] - width, width).masked_fill_(self.hidden, -torch.inf)
        weights = scores.softmax(-1)
        o = torch.bmm(weights.flatten(1, 2), keys[..., :value_dim]).view(B, n, H, value_dim)
        if self.blind is not None:
            o.masked_fill_(self.blind[..., None, None], 0)
        if lse is not None:
            lse[:, n:] = -torch.inf
            lse[:, :n] = scores.amax(-1) - weights.amax(-1).log()  # the largest weight is 1 / sum
            if self.blind is not None:
                lse[:, :n].masked_fill_(self.blind[..., None], -torch.inf)
        return pad(o, (0, 0, 0, 0, 0, T - n)).to(q.dtype) if n < T else o.to(q.dtype)


def hidden_slots(ancestors: Tensor, n: int) -> Tensor:
    """[B, n, W] ancestor bits -> [B, n, n] bool, true where slot i does not see slot j."""
    bit = torch.arange(64, device=ancestors.device)
    return ((ancestors[..., None] >> bit) & 1).flatten(-2)[..., :n] == 0
