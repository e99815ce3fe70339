"""A case's inputs as tensors: generated, checked and cast; and how they pass from one process to another."""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from multiprocessing.reduction import DupFd
from typing import Any

import torch

from draftwood.bench.catalog import Catalog
from draftwood.kernels.case import Case
from draftwood.kernels.rounding import Repeated
from draftwood.kernels.run_case import parts_to_torch, refused, to_torch, whole

_ALIGN = 64


def generate(catalog: Catalog, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Checked inputs: numpy, and tensors on the CPU in the case's dtype; large ones in parts. Raises `CaseError`."""
    cases = catalog.cases(case.kernel)
    arrays = cases.make(case)
    cases.check(case, arrays)
    dtype = dict(case.axes).get("dtype")

    def tensor(name: str, value: Any) -> Any:
        cast = str(dtype) if dtype is not None and name in cases.FLOATS else None
        return (parts_to_torch if isinstance(value, Repeated) else to_torch)(value, "cpu", cast)

    return arrays, {k: tensor(k, v) for k, v in arrays.items()}


def on_device(tensors: Mapping[str, Any], device: str) -> dict[str, Any]:
    """What `generate` gave, as whole tensors there."""
    moved = map_tensors(tensors, lambda t: t.to(device))
    return {k: whole(v) if isinstance(v, Repeated) else v for k, v in moved.items()}


def hollow(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same with large ones as whole tensors of nothing in particular: enough to compile with."""
    return {
        k: torch.empty(v.shape, dtype=v.block.dtype) if isinstance(v, Repeated) else v
        for k, v in tensors.items()
    }


def size_of(tensors: Mapping[str, Any]) -> int:
    """Bytes of the whole tensors."""
    return sum(t.nbytes for t in tensors_in(hollow(tensors)))


def nearest_small(catalog: Catalog, case: Case, impl: str, capability: int) -> Case:
    """The kernel's small case that has most axes in common, of those that the implementation serves."""
    wanted = set(case.axes)
    served = [small for small in catalog.cases(case.kernel).small() if not refused(small, impl, capability)]
    found: Case = max(served, key=lambda small: len(wanted & set(small.axes)))
    return found


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same value with `function` applied to every tensor in it, dictionaries and dataclasses included."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {k: map_tensors(v, function) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(map_tensors(v, function) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: map_tensors(getattr(value, f.name), function) for f in fields(value)})
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(value, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    return found


@dataclass(frozen=True)
class Packed:
    """A value whose tensors lie in anonymous shared memory: as large as memory, unlike what /dev/shm may hold."""

    pickled: bytes
    size: int
    memory: Any  # a file descriptor that another process can take over, once

    @staticmethod
    def of(value: Any) -> Packed:
        """Of tensors on the CPU."""
        pickled = io.BytesIO()
        packer = _Packer(pickled)
        packer.dump(value)
        descriptor = os.memfd_create("case")
        try:
            os.ftruncate(descriptor, packer.size)
            memory = mmap.mmap(descriptor, packer.size)
            for (dtype, shape, offset), tensor in packer.places:
                _tensor(memory, dtype, shape, offset).copy_(tensor)
            return Packed(pickled.getvalue(), packer.size, DupFd(descriptor))
        finally:
            os.close(descriptor)

    def unpack(self) -> Any:
        """The value, its tensors on the CPU in the shared memory."""
        descriptor = self.memory.detach()
        try:
            return _Unpacker(io.BytesIO(self.pickled), mmap.mmap(descriptor, self.size)).load()
        finally:
            os.close(descriptor)


_Place = tuple[torch.dtype, tuple[int, ...], int]  # the last is an offset in bytes


def _tensor(memory: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)


class _Packer(pickle.Pickler):
    """Leaves the contents of tensors out and says where they go."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.places: list[tuple[_Place, torch.Tensor]] = []
        self.size = _ALIGN

    def persistent_id(self, value: Any) -> _Place | None:
        if not isinstance(value, torch.Tensor):
            return None
        place = (value.dtype, tuple(value.shape), self.size)
        self.places.append((place, value))
        self.size += -(-value.nbytes // _ALIGN) * _ALIGN
        return place


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: mmap.mmap) -> None:
        super().__init__(file)
        self.memory = memory

    def persistent_load(self, place: _Place) -> torch.Tensor:
        return _tensor(self.memory, *place)
