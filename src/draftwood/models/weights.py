"""The tensors of a folder: one safetensors file, or an index and its shards, read lazily and checked by name.

Knows no model: the caller says how names in the files become its own, which are to be skipped, which shape each
must have, and which tensors a rank of several has a slice of. What is missing, left over, misshapen or truncated is
a `ModelError` naming it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftwood.models.errors import ModelError
from draftwood.models.json_config import read_json
from draftwood.models.shard import WHOLE, Shard

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I32": 4, "I64": 8}
"""Bytes per number of the types that some tensor may have, by safetensors' names."""

DTYPES = {"BF16", "F16", "F32", "F64"}

Rename = Callable[[str], str | None]
"""Name in the file -> the model's own name, or None for a tensor that is not needed."""

Progress = Callable[[int, int], None]
"""Called with (bytes of the tensors read, bytes in all). A slice counts as its tensor: other ranks read the rest."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about a tensor, without the tensor."""

    where: str  # file and name, as messages begin
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """0 for a type that no tensor may have."""
        return SIZES.get(self.dtype, 0) * prod(self.shape)


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
        self._files: dict[str, Any] = {}  # open ones
        self._where: dict[str, tuple[str, str]] = {}  # own name -> (file, name in it)
        for name, file in self._inventory().items():
            own = rename(name)
            if own is None:
                continue
            if own in self._where:
                raise ModelError(f"{folder}: tensors `{self._where[own][1]}` and `{name}` both mean `{own}`")
            self._where[own] = (file, name)
        self._unused = set(self._where)
        self._left = Counter(file for file, _ in self._where.values())  # unused tensors per file
        self._read, self._total = 0, 0
        if progress is not None:
            self._total = sum(header.nbytes for header in self.headers().values())

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(
        self,
        name: str,
        *shape: int,
        dtype: torch.dtype | None = None,
        part: tuple[slice, ...] = (),
        stored: Collection[str] = DTYPES,
    ) -> Tensor:
        """Tensor `name`, which must have this shape, on the device in `dtype` (default: the model's).

        With `part`, one slice per leading axis, only that part of it, and no other bytes are read. The file must have
        it in one of the types `stored`.
        """
        header = self.header(name, *shape)
        file, key = self._where[name]
        if header.shape != shape:
            raise ModelError(f"{header.where} has shape {list(header.shape)}, expected {list(shape)}")
        if header.dtype not in stored:
            expected = f"{'one of ' if len(stored) > 1 else ''}{', '.join(sorted(stored))}"
            raise ModelError(f"{header.where} is {header.dtype}, expected {expected}")
        try:
            view: Tensor = self._file(file).get_slice(key)[part] if part else self._file(file).get_tensor(key)
        except SafetensorError as e:
            raise ModelError(f"{header.where} cannot be read: {e}") from e
        # A copy in any case: a view would keep the whole file mapped, and follow what happens to it.
        tensor = view.to(device=self.device, dtype=dtype or self.dtype, copy=True).contiguous()
        self._done_with(name, header)
        return tensor

    def skip(self, name: str) -> None:
        """Count a tensor as used that another rank has."""
        self._done_with(name, self.header(name))

    def _done_with(self, name: str, header: Header) -> None:
        file, _ = self._where[name]
        if name in self._unused:
            self._unused.discard(name)
            self._left[file] -= 1
            self._read += header.nbytes
        if not self._left[file]:
            del self._files[file]  # its pages need not stay mapped
        if self.progress is not None:
            self.progress(self._read, self._total)

    def header(self, name: str, *shape: int) -> Header:
        """What the file says about a tensor; without it, the error names the shape it should have."""
        if name not in self._where:
            raise ModelError(f"{self.folder}: tensor `{name}`{f' {list(shape)}' if shape else ''} is missing")
        file, key = self._where[name]
        header = self._file(file).get_slice(key)
        where = f"{self.folder / file}: tensor `{key}`"
        return Header(where, header.get_dtype(), tuple(header.get_shape()))

    @property
    def names(self) -> Collection[str]:
        return self._where.keys()

    def headers(self) -> dict[str, Header]:
        """Own name -> header of every tensor; none is read."""
        return {name: self.header(name) for name in self._where}

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

    def _open(self, file: str) -> list[str]:
        if Path(file).name != file or Path(file).suffix != ".safetensors":
            raise ModelError(
                f"{self.folder / INDEX}: file name `{file}` must be that of a .safetensors file and must not hold a path"
            )
        return list(self._file(file).keys())

    def _file(self, file: str) -> Any:
        """The open file; opened again if it was done with."""
        if file not in self._files:
            try:
                self._files[file] = safe_open(str(self.folder / file), framework="pt")
            except FileNotFoundError:
                raise ModelError(f"{self.folder / file}: no such file, but {INDEX} names it") from None
            except SafetensorError as e:
                raise ModelError(f"{self.folder / file}: truncated, or not a safetensors file: {e}") from e
            except OSError as e:  # which does not name the file
                raise ModelError(f"{self.folder / file}: cannot be opened: {e}") from e
        return self._files[file]


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, as the folder's index says."""
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(s, str) for s in index.values()):
        raise ModelError(f"{folder / INDEX}: key `weight_map` must map tensor names to file names")
    return index


class Take:
    """`Weights.take` below a name prefix, so that a module names its own tensors only.

    A call gives the whole tensor; `rows`, `columns` and `vocabulary` give this rank's slice. Shapes are always those of
    the whole tensor, as the file has it; options are those of `Weights.take`. What cannot be split evenly is a
    `ModelError` naming the tensor.
    """

    def __init__(self, weights: Weights, prefix: str = "", shard: Shard | None = None) -> None:
        """`shard` is another than that of the weights, for a part of a model that is shared in another way."""
        self._weights, self._prefix = weights, prefix
        self.shard = shard or weights.shard

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    def __contains__(self, name: str) -> bool:
        """Whether the files hold it: for tensors that only some exports have."""
        return self._prefix + name in self._weights

    def __call__(self, name: str, *shape: int, **options: Any) -> Tensor:
        return self._weights.take(self._prefix + name, *shape, **options)

    def rows(self, name: str, *shape: int, **options: Any) -> Tensor:
        """This rank's equal share of the first axis."""
        part = slice(*self.shard.bounds(shape[0], what=f"rows of tensor `{self._prefix}{name}`"))
        return self(name, *shape, part=(part,), **options)

    def columns(self, name: str, *shape: int, **options: Any) -> Tensor:
        """This rank's equal share of the last axis."""
        part = slice(*self.shard.bounds(shape[-1], what=f"columns of tensor `{self._prefix}{name}`"))
        return self(name, *shape, part=(*(slice(None),) * (len(shape) - 1), part), **options)

    def vocabulary(self, name: str, V: int, d: int, **options: Any) -> Tensor:
        """This rank's rows of a matrix with one row per token, see `Shard.uneven`."""
        return self(name, V, d, part=(slice(*self.shard.uneven(V)),), **options)

    def header(self, name: str) -> Header:
        return self._weights.header(self._prefix + name)

    def skip(self, *names: str) -> None:
        """Tensors that another rank takes."""
        for name in names:
            self._weights.skip(self._prefix + name)

    def whole(self) -> Self:
        """For tensors of which each rank has all or nothing: `rows` and `columns` take all."""
        return type(self)(self._weights, self._prefix, WHOLE)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory where the tensors go, to stack several into one."""
        return torch.empty(shape, dtype=dtype or self._weights.dtype, device=self._weights.device)

    def under(self, prefix: str) -> Self:
        return type(self)(self._weights, f"{self._prefix}{prefix}.", self.shard)
