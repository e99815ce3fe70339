"""What the peers of `verify_attn` share that are shared libraries with a C interface, a causal mask and latents in pages.

A causal mask is the ancestor mask of a chain. The tree's latents are put in pages beforehand, after the prefix.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
from torch import Tensor

from draftwood.kernels.case import Case

PAGE, WIDTH, VALUE_DIM = 64, 576, 512


def require(case: Case, inputs: dict[str, Any], name: str) -> None:
    """Raises `NotImplementedError` unless the case is chains of one length in bfloat16, 512 + 64, in pages of 64."""
    q, pages = inputs["q"], inputs["pages"]
    if case["tree"] != "chain" or case["ragged"]:
        raise NotImplementedError(f"{name} has a causal mask only: `-a tree=chain -a ragged=0`")
    if (q.dtype, inputs["value_dim"], q.shape[3], pages.shape[1]) != (torch.bfloat16, VALUE_DIM, WIDTH, PAGE):
        raise NotImplementedError(f"{name} is given bfloat16, 512 + 64 and pages of 64")


def paged(inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
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


def library(variable: str, name: str) -> ctypes.CDLL:
    """The library that an environment variable names. Raises `NotImplementedError` where it does not."""
    path = os.environ.get(variable)
    if path is None:
        raise NotImplementedError(f"the environment variable {variable} must name the library of {name}")
    return ctypes.CDLL(path)


def multiprocessors(tensor: Tensor) -> int:
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def pointers(*tensors: Tensor) -> list[int]:
    return [t.data_ptr() for t in tensors]


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream
