"""Records of tensors that stay where they are: all of one lie end to end in one buffer, so that one copy from the host sets it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

ALIGNED = 16
"""Bytes that each tensor's address is a multiple of: kernels are compiled for that."""

Record = TypeVar("Record")
"""A dataclass of tensors, of such dataclasses, and of what else stays the same."""


class Placed(Generic[Record]):
    """A record on the device, whose tensors never move."""

    def __init__(self, like: Record, device: str) -> None:
        """Of these shapes and values; `like` is on the host."""
        self._buffer = _joined(leaves(like)).to(device)
        self.record: Record = _with_leaves(like, iter(_parts(self._buffer, leaves(like))))

    def set(self, values: Record) -> None:
        """Copy a record of the same shapes from the host. Returns before it has arrived, and `values` may change then."""
        host = _joined(leaves(values))
        if self._buffer.is_cuda:
            host = host.pin_memory()  # from other memory the copy would wait for the rounds in flight
        self._buffer.copy_(host, non_blocking=True)

    def kept(self) -> Tensor:
        """All that it holds now, for `restore`."""
        return self._buffer.clone()

    def restore(self, kept: Tensor) -> None:
        self._buffer.copy_(kept)


def leaves(record: object) -> list[Tensor]:
    """The tensors of a dataclass and of the dataclasses in it, in the order of their fields."""
    if isinstance(record, Tensor):
        return [record]
    if not is_dataclass(record):
        return []
    return [leaf for f in fields(record) for leaf in leaves(getattr(record, f.name))]


def on_device(record: Record, device: str) -> Record:
    """The record with its tensors on a device."""
    moved: Record = _with_leaves(record, (leaf.to(device) for leaf in leaves(record)))
    return moved


def _with_leaves(record: Any, new: Iterator[Tensor]) -> Any:
    """The record with the next tensors of an iterator in the place of its own."""
    if isinstance(record, Tensor):
        return next(new)
    if not is_dataclass(record) or isinstance(record, type):
        return record
    return replace(record, **{f.name: _with_leaves(getattr(record, f.name), new) for f in fields(record)})


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes in one tensor on the host, each at a multiple of `ALIGNED`."""
    buffer = torch.empty(sum(map(_room, tensors)), dtype=torch.uint8)
    for part, tensor in zip(_parts(buffer, tensors), tensors, strict=True):
        part.copy_(tensor)
    return buffer


def _parts(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a buffer, of these shapes and types."""
    starts = accumulate(map(_room, like), initial=0)
    return [
        buffer[at : at + x.nbytes].view(x.dtype).view(x.shape) for at, x in zip(starts, like, strict=False)
    ]


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNED) * ALIGNED
