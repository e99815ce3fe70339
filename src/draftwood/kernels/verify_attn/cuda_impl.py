"""verify_attn in CUDA C++, for Hopper and few tiles: latents of 512 + 64 numbers in bf16 (see `cuda_kernel.cu`;
tiles of 64 rows are `cuda_kernel_64.cu`'s).

One launch per layer, with no workspace: the thread blocks that share a tile are a cluster, and merge through shared memory. So
launches may run side by side.
"""

from __future__ import annotations

import math
from ctypes import c_float, c_int
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from draftwood.kernels.nvrtc import CudaKernel, compile_cubin, context_of, tensor_map
from draftwood.kernels.verify_attn import check_pages, check_use
from draftwood.kernels.verify_attn.cuda_tile import Tile, choose_tile, shared_bytes, threads

WIDTH, VALUE_DIM = 576, 512

_LOG2_E = math.log2(math.e)


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

    Raises `NotImplementedError` for a use that this is not made for, `ValueError` where the pages are not contiguous, and
    `TypeError` for another dtype than the contract's: the kernel takes plain addresses. Lengths and page ids out of range are clamped.
    """
    check_use("cuda", q, pages, value_dim)
    attention = Attention(page_table, prefix_len, ancestors, n_slots, pages.shape[1])
    return attention.with_lse(q, pages, tree_kv, scale)


class Attention:
    """`verify_attn` of one pass."""

    def __init__(
        self, page_table: Tensor, prefix_len: Tensor, ancestors: Tensor, n_slots: Tensor, page: int
    ) -> None:
        self.page = page
        of_i32 = {"page_table": page_table, "prefix_len": prefix_len, "n_slots": n_slots}
        for name, x in (*of_i32.items(), ("ancestors", ancestors)):
            want = torch.int32 if name in of_i32 else torch.int64
            if x.dtype != want:
                raise TypeError(f"`{name}`: expected {want}, got {x.dtype}")
        self.shared = [x.contiguous() for x in (*of_i32.values(), ancestors)]

    def __call__(self, q: Tensor, pages: Tensor, tree_kv: Tensor, scale: float, *, value_dim: int) -> Tensor:
        """o [B, T, H, R]; the arguments are those that differ from layer to layer."""
        return self.with_lse(q, pages, tree_kv, scale)[0]

    def with_lse(self, q: Tensor, pages: Tensor, tree_kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """o, and lse [B, T, H]. Raises as `verify_attn` does for the pages and for dtypes."""
        check_pages(pages)
        B, T, H, _ = q.shape
        page_table, *_, ancestors = self.shared
        q, tree_kv = q.contiguous(), tree_kv.contiguous()
        o = torch.empty((B, T, H, VALUE_DIM), dtype=q.dtype, device=q.device)
        lse = torch.empty((B, T, H), dtype=torch.float32, device=q.device)
        if not lse.numel():
            return o, lse
        with context_of(q.device):
            tile = tile_of(B, T * H, keys_of(page_table, self.page, T), q.device.index)
            chunks = 3 if self.page == 64 else 1  # boxes of fewer rows would lie apart
            arguments = (
                tensor_map(q.view(-1, WIDTH), tile.rows, 3 if tile.rows == 64 else 9),
                tensor_map(pages.view(-1, WIDTH), self.page, chunks),
                tensor_map(tree_kv.view(-1, WIDTH), 64, 3),
                *self.shared,
                *(o, lse),
                c_float(scale * _LOG2_E),
                *map(c_int, (T, H, page_table.shape[1], pages.shape[0], ancestors.shape[2])),
            )
            function = kernel(tile.rows, tile.cluster, self.page, q.device.index)
            function.launch((tile.count // B * tile.cluster, B), tile.cluster, arguments)
        return o, lse


verify_attn.prepare = Attention  # type: ignore[attr-defined]


@cache
def tile_of(B: int, rows: int, keys: int, device: int) -> Tile:
    """See `choose_tile`; the device's context must be current."""
    return choose_tile(B, rows, keys, kernel(32, 1, 64, device, "probe").resident_clusters)


def sources_of(rows: int) -> tuple[Path, ...]:
    """Files for tiles of `rows` rows, one after another."""
    kernel = "cuda_kernel_64.cu" if rows == 64 else "cuda_kernel.cu"
    return tuple(Path(__file__).with_name(name) for name in ("cuda_common.cu", kernel))


def options_of(rows: int, cluster: int, page: int) -> tuple[str, ...]:
    """Of the compiler, for tiles of `rows` rows, each of a cluster's size in thread blocks."""
    sizes = {"ROWS": rows, "CLUSTER": cluster, "PAGE": page, "SHARED_BYTES": shared_bytes(rows, cluster)}
    options = ("--gpu-architecture=sm_90a", "--std=c++17", "--device-as-default-execution-space")
    return (*options, *(f"--define-macro={name}={size}" for name, size in sizes.items()))


def keys_of(page_table: Tensor, page: int, T: int) -> int:
    """The most that a request can have."""
    return page_table.shape[1] * page + T


@cache
def kernel(rows: int, cluster: int, page: int, device: int, name: str = "attend") -> CudaKernel:
    """Ready for launches in a device's context, which must be current."""
    cubin = compile_cubin(sources_of(rows), options_of(rows, cluster, page))
    return CudaKernel(cubin, name, threads(rows), shared_bytes(rows, cluster))
