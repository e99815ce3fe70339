"""verify_attn for Hopper by shape: tiles that are few in CUDA C++, which merges them fastest, others in Gluon."""

from __future__ import annotations

from torch import Tensor

from draftwood.kernels.nvrtc import context_of
from draftwood.kernels.verify_attn import check_use, cuda_impl, gluon_impl


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
    """See `draftwood.kernels.verify_attn.verify_attn`. Raises as `gluon` and `cuda` do."""
    check_use("hopper", q, pages, value_dim)
    attend = cuda_impl.verify_attn if _few(q, page_table, pages.shape[1]) else gluon_impl.verify_attn
    return attend(q, pages, page_table, prefix_len, tree_kv, ancestors, n_slots, scale, value_dim=value_dim)


class Attention:
    """`verify_attn` of one pass, see `gluon_impl.Attention`."""

    def __init__(
        self, page_table: Tensor, prefix_len: Tensor, ancestors: Tensor, n_slots: Tensor, page: int
    ) -> None:
        self._shared = (page_table, prefix_len, ancestors, n_slots, page)
        self._attend: cuda_impl.Attention | gluon_impl.Attention | None = None

    def __call__(self, q: Tensor, pages: Tensor, tree_kv: Tensor, scale: float, *, value_dim: int) -> Tensor:
        """o [B, T, H, R]."""
        if self._attend is None:  # the first layer tells how many heads there are
            kind = cuda_impl if _few(q, self._shared[0], self._shared[-1]) else gluon_impl
            self._attend = kind.Attention(*self._shared)
        return self._attend(q, pages, tree_kv, scale, value_dim=value_dim)


verify_attn.prepare = Attention  # type: ignore[attr-defined]


def _few(q: Tensor, page_table: Tensor, page: int) -> bool:
    """Of blocks of keys for each thread block, if prefixes are as long as the page table allows."""
    B, T, H, _ = q.shape
    with context_of(q.device):
        return cuda_impl.tile_of(B, T * H, cuda_impl.keys_of(page_table, page, T), q.device.index).is_fast
