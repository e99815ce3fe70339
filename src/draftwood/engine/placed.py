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
        self._told = torch.empty(sum(map(_room, leaves(like))), dtype=torch.uint8)
        self._parts = _parts(self._told, leaves(like))
        self._buffer = torch.empty_like(self._told, device=device)
        self.record: Record = _with_leaves(like, iter(_parts(self._buffer, leaves(like))))
        self.set(like)

    def set(self, values: Record) -> None:
        """Copy a record of the same shapes from the host. Returns before it has arrived, and `values` may change then."""
        for part, leaf in zip(self._parts, leaves(values), strict=True):
            part.copy_(leaf)
        # from other memory than pinned the copy would wait for the rounds in flight
        told = self._told.pin_memory() if self._buffer.is_cuda else self._told
        self._buffer.copy_(told, non_blocking=True)

    def kept(self) -> Tensor:
        """All that it holds now, for `restore`."""
        return self._buffer.clone()

    def restore(self, kept: Tensor) -> None:
        self._buffer.copy_(kept)


def leaves(record: object) -> list[Tensor]:
    """The tensors of a dataclass and of the dataclasses in it, in the order of their fields."""
    found: list[Tensor] = []
    _collect(record, found)
    return found


def _collect(record: object, found: list[Tensor]) -> None:
    if isinstance(record, Tensor):
        found.append(record)
    elif record is not None:
        for name in _names(type(record)):
            _collect(getattr(record, name), found)


_NAMES: dict[type, tuple[str, ...]] = {}
"""What `_names` has found: looking fields up takes longer than what is done with them."""


def _names(kind: type) -> tuple[str, ...]:
    """Of the fields of a dataclass; none of another type."""
    if kind not in _NAMES:
        _NAMES[kind] = tuple(f.name for f in fields(kind)) if is_dataclass(kind) else ()
    return _NAMES[kind]


def on_device(record: Record, device: str) -> Record:
    """The record with its tensors on a device."""
    moved: Record = _with_leaves(record, (leaf.to(device) for leaf in leaves(record)))
    return moved


def _with_leaves(record: Any, new: Iterator[Tensor]) -> Any:
    """The record with the next tensors of an iterator in the place of its own."""
    if isinstance(record, Tensor):
        return next(new)
    names = _names(type(record))
    return replace(record, **{n: _with_leaves(getattr(record, n), new) for n in names}) if names else record


def _parts(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a buffer, of these shapes and types, each at a multiple of `ALIGNED`."""
    starts = accumulate(map(_room, like), initial=0)
    return [
        buffer[at : at + x.nbytes].view(x.dtype).view(x.shape) for at, x in zip(starts, like, strict=False)
    ]


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNED) * ALIGNED
