"""FlashAttention-3 over latents as a peer of `verify_attn`: `draftwood bench kernels --peer benchmarks/peers/flash_attention_3.py`.

FLASH_ATTENTION_3 names a shared library, built from FlashAttention's sources (`hopper/`) for sm_90a, with the C functions declared in
`_library`. They do what `flash_attn_with_kvcache(q[..., 512:], k, v, qv=q[..., :512], page_table=..., causal=True)` does: the number of splits and
how pages are loaded are FlashAttention's choice. k and v are views of one page. Scheduler metadata are computed beforehand.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from causal_library import VALUE_DIM, library, multiprocessors, paged, pointers, require, stream
from torch import Tensor

from draftwood.kernels.case import Case

KERNEL = "verify_attn"
NAME = "flash_attention_3"


def build(case: Case, inputs: dict[str, Any]) -> Callable[[], tuple[Tensor, Tensor]]:
    """Attention and, of keys in splits, the merge. Raises `NotImplementedError` for a case that the library has no kernel for."""
    require(case, inputs, "FlashAttention-3")
    q = inputs["q"]
    B, T, H, _ = q.shape
    fa3 = _library()
    kv, table, lengths = paged(inputs)
    shape = B, T, H, table.shape[1], multiprocessors(q)
    splits = fa3.fa3_splits(*shape)
    if splits == 0:
        raise NotImplementedError("the library of FlashAttention-3 has no kernel for this case")
    metadata, part_o, part_lse = _workspace(case, B, T, H, splits, fa3.fa3_metadata_ints(B), q.device)
    _check(fa3.fa3_plan(*pointers(lengths, metadata), *shape, stream()))

    def call() -> tuple[Tensor, Tensor]:
        o = q.new_empty(B, T, H, VALUE_DIM)
        lse = q.new_empty(B, H, T, dtype=torch.float32)
        failed = fa3.fa3_decode(
            *pointers(q, kv, lengths, table, metadata, o, lse, part_o, part_lse),
            *shape,
            len(kv),
            inputs["scale"],
            stream(),
        )
        _check(failed)
        return o, lse.transpose(1, 2)

    return call


@lru_cache(maxsize=1)
def _workspace(
    case: Case, B: int, T: int, H: int, splits: int, ints: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Metadata and partial results, which the calls of a case share as layers would. It stays alive with any of these."""
    return (
        torch.empty(ints, dtype=torch.int32, device=device),
        torch.empty(splits, B, H, T, VALUE_DIM, device=device),
        torch.empty(splits, B, H, T, device=device),
    )


def _check(failed: int) -> None:
    if failed:
        raise RuntimeError("FlashAttention-3 failed; its message is on stderr")


def _library() -> ctypes.CDLL:
    """The library with its signatures; pointers and the stream are addresses, and 0 is success."""
    fa3 = library("FLASH_ATTENTION_3", "FlashAttention-3")
    address, number = ctypes.c_void_p, ctypes.c_int
    shape = [number] * 5  # B, T, H, M, multiprocessors
    # (B) -> integers of the scheduler metadata
    fa3.fa3_metadata_ints.argtypes = [number]
    # (shape) -> splits of a request's keys at most, 0 without a kernel for the shape
    fa3.fa3_splits.argtypes = shape
    # (lengths, metadata, shape, stream)
    fa3.fa3_plan.argtypes = [address, address, *shape, address]
    # (q, pages, lengths, table, metadata, o, lse, part_o, part_lse, shape, pages, scale, stream); part_o is [splits, B, H, T, 512]
    fa3.fa3_decode.argtypes = [*[address] * 9, *shape, number, ctypes.c_float, address]
    return fa3
