"""The tensors of a folder: one safetensors file, or an index and its shards, read lazily and checked by name.

Knows no model: the caller says how names in the files become its own, which are to be skipped, which shape each
must have, and which tensors a rank of several has a slice of. What is missing, left over, misshapen or truncated is
a `ModelError` naming it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftwood.models.errors import ModelError
from draftwood.models.json_config import read_json
from draftwood.models.shard import WHOLE, Shard

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

DTYPES = {"BF16", "F16", "F32", "F64"}

Rename = Callable[[str], str | None]
"""Name in the file -> the model's own name, or None for a tensor that is not needed."""

Progress = Callable[[int, int], None]
"""Called with (tensors read, tensors in all)."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about a tensor, without the tensor."""

    where: str  # file and name, as messages begin
    dtype: str
    shape: tuple[int, ...]


class Weights:
    """A folder's tensors under the model's own names, for one rank; use `take`, then `finish`."""

    def __init__(
        self,
        folder: Path,
        rename: Rename,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        self.folder, self.dtype, self.device, self.progress = folder, dtype, device, progress
        self.shard = shard
        self._shards: dict[str, Any] = {}
        self._where: dict[str, tuple[str, str]] = {}  # own name -> (file, name in it)
        for name, file in self._inventory().items():
            own = rename(name)
            if own is None:
                continue
            if own in self._where:
                raise ModelError(f"{folder}: tensors `{self._where[own][1]}` and `{name}` both mean `{own}`")
            self._where[own] = (file, name)
        self._total, self._unused = len(self._where), set(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(
        self, name: str, *shape: int, dtype: torch.dtype | None = None, part: tuple[slice, ...] = ()
    ) -> Tensor:
        """Tensor `name`, which must have this shape, on the device in `dtype` (default: the model's).

        With `part`, one slice per leading axis, only that part of it, and no other bytes are read.
        """
        if name not in self._where:
            raise ModelError(f"{self.folder}: tensor `{name}` {list(shape)} is missing")
        file, stored = self._where[name]
        try:
            header = self._shards[file].get_slice(stored)
            if tuple(header.get_shape()) != shape:
                raise ModelError(
                    f"{self.folder / file}: tensor `{stored}` has shape {header.get_shape()}, expected {list(shape)}"
                )
            if header.get_dtype() not in DTYPES:
                raise ModelError(
                    f"{self.folder / file}: tensor `{stored}` is {header.get_dtype()}, "
                    f"expected one of {', '.join(sorted(DTYPES))}"
                )
            tensor: Tensor = header[part] if part else self._shards[file].get_tensor(stored)
        except SafetensorError as e:
            raise ModelError(f"{self.folder / file}: tensor `{stored}` cannot be read: {e}") from e
        self._unused.discard(name)
        if self.progress is not None:
            self.progress(self._total - len(self._unused), self._total)
        return tensor.to(device=self.device, dtype=dtype or self.dtype).contiguous()

    def headers(self) -> dict[str, Header]:
        """Own name -> header of every tensor; none is read."""
        found = {}
        for own, (file, stored) in self._where.items():
            header = self._shards[file].get_slice(stored)
            where = f"{self.folder / file}: tensor `{stored}`"
            found[own] = Header(where, header.get_dtype(), tuple(header.get_shape()))
        return found

    def finish(self) -> None:
        """Raise `ModelError` if a tensor was left over: it would have changed the maths."""
        if self._unused:
            file, stored = self._where[min(self._unused)]
            raise ModelError(
                f"{self.folder / file}: tensor `{stored}` has no place in this model ({len(self._unused)} such)"
            )

    def _inventory(self) -> dict[str, str]:
        """Name in the files -> shard, every shard opened and held against the index."""
        if not (self.folder / INDEX).exists():
            if not (self.folder / SINGLE).exists():
                raise ModelError(f"{self.folder}: holds neither {SINGLE} nor {INDEX}")
            return dict.fromkeys(self._open(SINGLE), SINGLE)
        index = read_index(self.folder)
        held = {(name, shard) for shard in sorted(set(index.values())) for name in self._open(shard)}
        for name, shard in index.items():
            if (name, shard) not in held:
                raise ModelError(f"{self.folder / shard}: tensor `{name}` is missing, but {INDEX} names it")
        for name, shard in sorted(held - set(index.items())):
            raise ModelError(f"{self.folder / shard}: tensor `{name}` is there, but {INDEX} does not name it")
        return index

    def _open(self, shard: str) -> list[str]:
        if Path(shard).name != shard:
            raise ModelError(f"{self.folder / INDEX}: file name `{shard}` must not hold a path")
        try:
            self._shards[shard] = safe_open(str(self.folder / shard), framework="pt")
        except FileNotFoundError:
            raise ModelError(f"{self.folder / shard}: no such file, but {INDEX} names it") from None
        except SafetensorError as e:
            raise ModelError(f"{self.folder / shard}: truncated, or not a safetensors file: {e}") from e
        return list(self._shards[shard].keys())


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, as the folder's index says."""
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(s, str) for s in index.values()):
        raise ModelError(f"{folder / INDEX}: key `weight_map` must map tensor names to file names")
    return index


class Take:
    """`Weights.take` below a name prefix, so that a module names its own tensors only.

    A call gives the whole tensor; `rows`, `columns` and `vocabulary` give this rank's slice. Shapes are always those of
    the whole tensor, as the file has it. What cannot be split evenly is a `ModelError` naming the tensor.
    """

    def __init__(self, weights: Weights, prefix: str = "") -> None:
        self._weights, self._prefix = weights, prefix

    @property
    def shard(self) -> Shard:
        return self._weights.shard

    def __contains__(self, name: str) -> bool:
        """Whether the files hold it: for tensors that only some exports have."""
        return self._prefix + name in self._weights

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self._weights.take(self._prefix + name, *shape, dtype=dtype)

    def rows(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's equal share of the first axis."""
        part = slice(*self.shard.bounds(shape[0], what=f"rows of tensor `{self._prefix}{name}`"))
        return self._weights.take(self._prefix + name, *shape, dtype=dtype, part=(part,))

    def columns(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's equal share of the last axis."""
        part = slice(*self.shard.bounds(shape[-1], what=f"columns of tensor `{self._prefix}{name}`"))
        whole = (slice(None),) * (len(shape) - 1)
        return self._weights.take(self._prefix + name, *shape, dtype=dtype, part=(*whole, part))

    def vocabulary(self, name: str, V: int, d: int, *, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's rows of a matrix with one row per token, see `Shard.uneven`."""
        part = slice(*self.shard.uneven(V))
        return self._weights.take(self._prefix + name, V, d, dtype=dtype, part=(part,))

    def empty(self, *shape: int) -> Tensor:
        """Memory where the tensors go, to stack several into one."""
        return torch.empty(shape, dtype=self._weights.dtype, device=self._weights.device)

    def under(self, prefix: str) -> Self:
        return type(self)(self._weights, f"{self._prefix}{prefix}.")
