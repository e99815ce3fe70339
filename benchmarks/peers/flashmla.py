"""FlashMLA's dense decode as a peer of `verify_attn`: `draftwood bench kernels --peer benchmarks/peers/flashmla.py`.

FLASHMLA names a shared library, built from FlashMLA's own sources for sm_90a, with the C functions declared in `_library`. Its planning
kernel runs beforehand.
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
NAME = "flash_mla"

PLAN_INTS = 8  # per part, in the plan


def build(case: Case, inputs: dict[str, Any]) -> Callable[[], tuple[Tensor, Tensor]]:
    """One launch of attention and one of its merge, on these inputs. Raises `NotImplementedError` where FlashMLA cannot do the case."""
    require(case, inputs, "FlashMLA")
    q = inputs["q"]
    B, T, H, _ = q.shape
    flashmla = _library()
    kv, table, lengths = paged(inputs)
    parts = flashmla.flashmla_parts(multiprocessors(q), T, H)
    plan, splits, part_o, part_lse = _workspace(case, B, T, H, parts, q.device)
    flashmla.flashmla_plan(*pointers(lengths, plan, splits), B, T, parts, stream())

    def call() -> tuple[Tensor, Tensor]:
        o = q.new_empty(B, T, H, VALUE_DIM)
        lse = q.new_empty(B, T, H, dtype=torch.float32)
        flashmla.flashmla_decode(
            *pointers(q, kv, lengths, table, plan, splits, o, lse, part_o, part_lse),
            *(B, T, H, len(kv), table.shape[1], parts),
            ctypes.c_float(inputs["scale"]),
            1,
            stream(),
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


def _library() -> ctypes.CDLL:
    """The library with its signatures; pointers and the stream are addresses."""
    flashmla, address, number = library("FLASHMLA", "FlashMLA"), ctypes.c_void_p, ctypes.c_int
    # (multiprocessors, T, H) -> parts that a request's keys are cut into at most
    flashmla.flashmla_parts.argtypes = [number] * 3
    # (lengths, plan, splits, B, T, parts, stream)
    flashmla.flashmla_plan.argtypes = [address] * 3 + [number] * 3 + [address]
    # (q, pages, lengths, table, plan, splits, o, lse, part_o, part_lse, B, T, H, pages, M, parts, scale, causal, stream)
    flashmla.flashmla_decode.argtypes = [address] * 10 + [number] * 6 + [ctypes.c_float, number, address]
    flashmla.flashmla_plan.restype = flashmla.flashmla_decode.restype = None
    return flashmla
