"""verify_attn in torch, slot by slot: a slot's keys are put in the order of their positions, whatever pages or tree hold them.

So every call into a library has a shape that follows from the slot's position alone, and a slot's result is the same in any
tree, batch and prefill chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftwood.kernels.verify_attn.torch_impl import hidden_slots, wide_dtype


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
    attention = PathAttention(page_table, prefix_len, ancestors, n_slots, pages.shape[1])
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=wide_dtype(q.dtype))
    return attention(q, pages, tree_kv, scale, value_dim=value_dim, lse=lse), lse


class PathAttention:
    """`verify_attn` over given prefixes and trees, for any number of layers. Reads lengths and trees on the host."""

    def __init__(
        self, page_table: Tensor, prefix_len: Tensor, ancestors: Tensor, n_slots: Tensor, page: int
    ) -> None:
        self._lengths: list[int] = prefix_len.tolist()
        self._pages = [table[: -(-n // page)] for table, n in zip(page_table, self._lengths, strict=True)]
        seen = ~hidden_slots(ancestors, ancestors.shape[1])
        self._paths = [
            [row[:n].nonzero().flatten() for row in rows[:n]]
            for rows, n in zip(seen, n_slots.tolist(), strict=True)
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
        o = q.new_zeros(*q.shape[:3], value_dim)
        for b, (n, ids, paths) in enumerate(zip(self._lengths, self._pages, self._paths, strict=True)):
            keys = q.new_empty(n + q.shape[1], q.shape[3], dtype=wide_dtype(q.dtype))
            keys[:n] = pages.index_select(0, ids).flatten(0, 1)[:n]
            for t, path in enumerate(paths):
                end = n + len(path)
                if end == 0:
                    continue
                keys[n:end] = tree_kv[b, path]
                query = torch.empty_like(q[b, t], dtype=keys.dtype).copy_(q[b, t])  # aligned as any other
                scores = torch.mm(query, keys[:end].t()) * scale
                o[b, t] = torch.mm(scores.softmax(-1), keys[:end, :value_dim])
                if lse is not None:
                    lse[b, t] = scores.logsumexp(-1)
        return o


verify_attn.prepare = PathAttention  # type: ignore[attr-defined]
