"""Random inputs that a narrow dtype holds exactly, so that reference and implementation see the same numbers.

Numpy has no bfloat16: values of 16-bit dtypes live in float32 arrays that are already rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ITEM_SIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per number of each dtype that a case may name."""


PERIOD = 16_777_213
"""Prime, so that no two pages or matrices are equal. Drawing more would take longer than the bench it is for."""


def round_to(array: np.ndarray, dtype: str) -> np.ndarray:
    """`array` rounded to nearest-even in `dtype` (a key of `ITEM_SIZE`), as float64 for float64, else as float32.

    Overflow gives infinity; NaN stays NaN. Raises `ValueError` for an unknown dtype.
    """
    if dtype == "float64":
        return array.astype(np.float64)
    if dtype == "float32":
        return array.astype(np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return array.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        rounded = np.array(array, np.float32, ndmin=1)
        bits = rounded.view(np.uint32)
        nan = np.isnan(rounded)  # adding to a NaN's bits could carry into the sign
        bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        bits &= np.uint32(0xFFFF0000)
        rounded[nan] = np.nan
        return rounded.reshape(np.shape(array))
    raise ValueError(f"unknown dtype `{dtype}`; known: {', '.join(ITEM_SIZE)}")


@dataclass
class Repeated:
    """A large array whose numbers are those of a block again and again, but for what was assigned to it since.

    Made whole where it is used, on the GPU if that is where: see `run_case.to_torch` and `run_case.whole`. Assignments are kept
    in order.
    """

    block: Any  # 1-d, numpy or a tensor
    shape: tuple[int, ...]
    assigned: tuple[tuple[Any, Any], ...] = ()  # bool mask over the leading axes, and what goes there

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __setitem__(self, mask: np.ndarray, numbers: np.ndarray) -> None:
        self.assigned += ((mask, numbers),)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        out = np.resize(self.block, self.shape)
        for mask, numbers in self.assigned:
            out[mask] = numbers
        return out if dtype is None else out.astype(dtype)


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: str, std: float = 1.0) -> Any:
    """Normal numbers rounded to `dtype`, drawn in float32 unless that is float64. More than `PERIOD` are a `Repeated`."""
    size = math.prod(shape)
    drawn = rng.standard_normal(min(size, PERIOD), np.float64 if dtype == "float64" else np.float32)
    numbers = round_to(drawn * drawn.dtype.type(std), dtype)
    return Repeated(numbers, tuple(shape)) if size > PERIOD else numbers.reshape(shape)
