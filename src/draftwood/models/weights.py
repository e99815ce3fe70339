"""The tensors of a folder: one safetensors file, or an index and its shards, read lazily and checked by name.

Knows no model: the caller says how names in the files become its own, which are to be skipped, and which
shape each must have. What is missing, left over, misshapen or truncated is a `ModelError` naming it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftwood.models.errors import ModelError
from draftwood.models.json_config import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

DTYPES = {"BF16", "F16", "F32", "F64"}

Rename = Callable[[str], str | None]
"""Name in the file -> the model's own name, or None for a tensor that is not needed."""

Progress = Callable[[int, int], None]
"""Called with (tensors read, tensors in all)."""


class Weights:
    """A folder's tensors under the model's own names; use `take`, then `finish`."""

    def __init__(
        self,
        folder: Path,
        rename: Rename,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        self.folder, self.dtype, self.device, self.progress = folder, dtype, device, progress
        self._shards: dict[str, Any] = {}
        self._where: dict[str, tuple[str, str]] = {}  # own name -> (shard, name in the file)
        for name, shard in self._inventory().items():
            own = rename(name)
            if own is None:
                continue
            if own in self._where:
                raise ModelError(f"{folder}: tensors `{self._where[own][1]}` and `{name}` both mean `{own}`")
            self._where[own] = (shard, name)
        self._total, self._unused = len(self._where), set(self._where)

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Tensor `name`, which must have this shape, on the device in `dtype` (default: the model's)."""
        if name not in self._where:
            raise ModelError(f"{self.folder}: tensor `{name}` {list(shape)} is missing")
        shard, stored = self._where[name]
        try:
            header = self._shards[shard].get_slice(stored)
            if tuple(header.get_shape()) != shape:
                raise ModelError(
                    f"{self.folder / shard}: tensor `{stored}` has shape {header.get_shape()}, expected {list(shape)}"
                )
            if header.get_dtype() not in DTYPES:
                raise ModelError(
                    f"{self.folder / shard}: tensor `{stored}` is {header.get_dtype()}, "
                    f"expected one of {', '.join(sorted(DTYPES))}"
                )
            tensor: Tensor = self._shards[shard].get_tensor(stored)
        except SafetensorError as e:
            raise ModelError(f"{self.folder / shard}: tensor `{stored}` cannot be read: {e}") from e
        self._unused.discard(name)
        if self.progress is not None:
            self.progress(self._total - len(self._unused), self._total)
        return tensor.to(device=self.device, dtype=dtype or self.dtype)

    def finish(self) -> None:
        """Raise `ModelError` if a tensor was left over: it would have changed the maths."""
        if self._unused:
            shard, stored = self._where[min(self._unused)]
            raise ModelError(
                f"{self.folder / shard}: tensor `{stored}` has no place in this model ({len(self._unused)} such)"
            )

    def _inventory(self) -> dict[str, str]:
        """Name in the files -> shard, every shard opened and held against the index."""
        if not (self.folder / INDEX).exists():
            if not (self.folder / SINGLE).exists():
                raise ModelError(f"{self.folder}: holds neither {SINGLE} nor {INDEX}")
            return dict.fromkeys(self._open(SINGLE), SINGLE)
        index = read_json(self.folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(s, str) for s in index.values()):
            raise ModelError(f"{self.folder / INDEX}: key `weight_map` must map tensor names to file names")
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


class Take:
    """`Weights.take` below a name prefix, so that a module names its own tensors only."""

    def __init__(self, weights: Weights, prefix: str = "") -> None:
        self._weights, self._prefix = weights, prefix

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self._weights.take(self._prefix + name, *shape, dtype=dtype)

    def empty(self, *shape: int) -> Tensor:
        """Memory where the tensors go, to stack several into one."""
        return torch.empty(shape, dtype=self._weights.dtype, device=self._weights.device)

    def under(self, prefix: str) -> Self:
        return type(self)(self._weights, f"{self._prefix}{prefix}.")
