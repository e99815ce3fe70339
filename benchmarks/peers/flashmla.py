"""FlashMLA's dense decode as a peer of `verify_attn`: `draftwood bench kernels --peer benchmarks/peers/flashmla.py`.

FLASHMLA names a shared library, built from FlashMLA's own sources for sm_90a, with the C functions declared in `_library`. FlashMLA has
a causal mask only, so it takes trees that are chains; it wants the tree's latents in pages, so they are put there beforehand. Its planning
kernel runs beforehand as well.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from draftwood.kernels.case import Case

KERNEL = "verify_attn"
NAME = "flash_mla"

PAGE, WIDTH, VALUE_DIM = 64, 576, 512
PLAN_INTS = 8  # per part, in the plan


def build(case: Case, inputs: dict[str, Any]) -> Callable[[], tuple[Tensor, Tensor]]:
    """One launch of attention and one of its merge, on these inputs. Raises `NotImplementedError` where FlashMLA cannot do the case."""
    q, pages, value_dim = inputs["q"], inputs["pages"], inputs["value_dim"]
    B, T, H, _ = q.shape
    if case["tree"] != "chain" or case["ragged"]:
        raise NotImplementedError("FlashMLA has a causal mask only: `-a tree=chain -a ragged=0`")
    if (q.dtype, value_dim, q.shape[3], pages.shape[1]) != (torch.bfloat16, VALUE_DIM, WIDTH, PAGE):
        raise NotImplementedError("FlashMLA's dense decode takes bfloat16, 512 + 64 and pages of 64")
    library = _library()
    kv, table, lengths = _paged(inputs)
    parts = library.flashmla_parts(torch.cuda.get_device_properties(q.device).multi_processor_count, T, H)
    plan, splits, part_o, part_lse = _workspace(case, B, T, H, parts, q.device)
    library.flashmla_plan(*_pointers(lengths, plan, splits), B, T, parts, _stream())

    def call() -> tuple[Tensor, Tensor]:
        o = q.new_empty(B, T, H, VALUE_DIM)
        lse = q.new_empty(B, T, H, dtype=torch.float32)
        library.flashmla_decode(
            *_pointers(q, kv, lengths, table, plan, splits, o, lse, part_o, part_lse),
            *(B, T, H, len(kv), table.shape[1], parts),
            ctypes.c_float(inputs["scale"]),
            1,
            _stream(),
        )
        return o, lse

    return call


@lru_cache(maxsize=1)
def _workspace(
    case: Case, B: int, T: int, H: int, parts: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Plan, splits and partial results, which the calls of a case share as layers would. It stays alive with any of these."""
    return (
        torch.empty(parts, PLAN_INTS, dtype=torch.int32, device=device),
        torch.empty(B + 1, dtype=torch.int32, device=device),
        torch.empty(B + parts, T * H, VALUE_DIM, device=device),
        torch.empty(B + parts, T * H, device=device),
    )


def _paged(inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Prefix and tree of every row in pages of their own, scattered: pool [n, 64, 576], table [B, M] and lengths [B]."""
    pages, table, tree = (inputs[k] for k in ("pages", "page_table", "tree_kv"))
    B, T, _ = tree.shape
    prefix_len = inputs["prefix_len"]
    used = -(-(int(prefix_len.max()) + T) // PAGE)
    scattered = torch.randperm(B * used, device=pages.device).int().view(B, used)
    pool = pages.new_zeros(B * used, PAGE, WIDTH)
    for b, n in enumerate(prefix_len.tolist()):
        prefix = pages[table[b, : -(-n // PAGE)].long()].view(-1, WIDTH)[:n]
        keys = torch.cat((prefix, tree[b], pages.new_zeros(used * PAGE - n - T, WIDTH)))
        pool[scattered[b].long()] = keys.view(used, PAGE, WIDTH)
    return pool, scattered, prefix_len + T


def _library() -> ctypes.CDLL:
    """The library with its signatures; pointers and the stream are addresses."""
    path = os.environ.get("FLASHMLA")
    if path is None:
        raise NotImplementedError("the environment variable FLASHMLA must name the library of FlashMLA")
    library, address, number = ctypes.CDLL(path), ctypes.c_void_p, ctypes.c_int
    # (multiprocessors, T, H) -> parts that a request's keys are cut into at most
    library.flashmla_parts.argtypes = [number] * 3
    # (lengths, plan, splits, B, T, parts, stream)
    library.flashmla_plan.argtypes = [address] * 3 + [number] * 3 + [address]
    # (q, pages, lengths, table, plan, splits, o, lse, part_o, part_lse, B, T, H, pages, M, parts, scale, causal, stream)
    library.flashmla_decode.argtypes = [address] * 10 + [number] * 6 + [ctypes.c_float, number, address]
    library.flashmla_plan.restype = library.flashmla_decode.restype = None
    return library


def _pointers(*tensors: Tensor) -> list[int]:
    return [t.data_ptr() for t in tensors]


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
