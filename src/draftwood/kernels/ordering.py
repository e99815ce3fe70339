"""The order "larger value first, then smaller id", exact at ties, which `torch.topk` alone does not promise."""

from __future__ import annotations

import torch
from torch import Tensor

_LAST = 0x7FFFFFFF


def pack(value: Tensor, token: Tensor) -> Tensor:
    """i64 keys whose integer order is that of (value, -token). value f32 without NaN; token i32 or i64 >= 0."""
    bits = (value + 0.0).view(torch.int32)  # -0.0 + 0.0 = 0.0, so that the two zeros tie
    return (_flip(bits).long() << 32) | (_LAST - token)


def unpack(key: Tensor) -> tuple[Tensor, Tensor]:
    """f32 values and i32 tokens of packed keys."""
    return _flip((key >> 32).int()).view(torch.float32), (_LAST - (key & 0xFFFFFFFF)).int()


def largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last axis in order, and their i64 indices. x f32 or f64 without NaN.

    Looks for ties on the host, which waits for the device on a GPU.
    """
    if x.dtype == torch.float64:  # a value and an id do not fit into one key
        value, index = x.sort(stable=True, dim=-1, descending=True)
        return value[..., :k], index[..., :k]
    value, index = x.topk(min(k + 1, x.shape[-1]))
    if bool((value[..., 1:] < value[..., :-1]).all()):  # no ties, which topk breaks as it likes
        return value[..., :k], index[..., :k]
    keys = pack(x, torch.arange(x.shape[-1], device=x.device))
    value, token = unpack(keys.topk(k).values)
    return value, token.long()


def finite(x: Tensor) -> Tensor:
    """A copy in which NaN and infinities are -inf."""
    low = float("-inf")
    return x.nan_to_num(low, low, low)


def _flip(bits: Tensor) -> Tensor:
    """Between the bits of an f32 and an i32 of the same order; its own inverse."""
    return bits ^ ((bits >> 31) & _LAST)
