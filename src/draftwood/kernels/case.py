"""What every kernel's `cases.py` is made of, so that tests, benches and debug mode can treat all kernels alike.

A `cases.py` module offers:

    KERNEL: str                            the kernel's name
    DEFAULTS: dict[str, int | float | str] every axis with its default value ("dtype" where the kernel has one)
    FLOATS: tuple[str, ...]                inputs that are cast to the case's dtype
    CACHE: "cold" | "warm"                 how the kernel finds its inputs in L2 in real use
    small() -> list[Case]                  cases the reference can afford; the tests run all of them
    bench() -> list[Case]                  cases at Kimi K2.6 shapes
    make(case) -> dict[str, Any]           keyword arguments of the kernel: numpy arrays, DraftTree, scalars
    check(case, inputs) -> None            raises `CaseError` when an input breaks the contract
    flops(case), bytes_moved(case) -> int  unavoidable work; each input and output once
    compare(case, got, want) -> None       raises `Mismatch`; both already numpy. Exact unless the contract says not.

and, where a kernel has implementations that serve some uses only (see `specialised`):

    use(case, capability) -> Use

and, where a kernel's callers prepare what many of its calls share:

    shared(function, inputs) -> (() -> Any) the call as the engine makes it, prepared; this is what the suite times
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Axis = int | float | str


class CaseError(ValueError):
    """A generated or given input breaks the kernel's contract; names the input, the row and the rule."""


class Mismatch(AssertionError):  # noqa: N818 - reads as a result, not as a fault of the program
    """An implementation's output differs from the reference; names the output and the worst element."""


@dataclass(frozen=True)
class Case:
    """One input configuration of one kernel, fully determined by its axes and seed."""

    kernel: str
    axes: tuple[tuple[str, Axis], ...]
    seed: int = 0

    def __getitem__(self, axis: str) -> Any:
        for name, value in self.axes:
            if name == axis:
                return value
        raise KeyError(
            f"case of `{self.kernel}` has no axis `{axis}`; it has {', '.join(n for n, _ in self.axes)}"
        )

    @property
    def id(self) -> str:
        """Stable, readable: `verify_attn/B=8,T=33,H=64`."""
        return (
            f"{self.kernel}/"
            + ",".join(f"{k}={v}" for k, v in self.axes)
            + (f",seed={self.seed}" if self.seed else "")
        )

    @property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)


def make_case(kernel: str, defaults: Mapping[str, Axis], seed: int = 0, **axes: Axis) -> Case:
    """A case with `axes` over `defaults`. Raises `CaseError` for an axis the kernel does not have."""
    for name in axes:
        if name not in defaults:
            raise CaseError(f"kernel `{kernel}` has no axis `{name}`; it has: {', '.join(defaults)}")
    return Case(kernel, tuple((k, axes.get(k, v)) for k, v in defaults.items()), seed)


def require(ok: bool, message: str) -> None:
    if not ok:
        raise CaseError(message)


def compare_exact(name: str, got: np.ndarray, want: np.ndarray) -> None:
    """Same shape, same values; NaN equals NaN, and -0.0 equals 0.0. Raises `Mismatch` at the first difference."""
    if got.shape != want.shape:
        raise Mismatch(f"`{name}`: shape {got.shape}, expected {want.shape}")
    differs = got != want
    if got.dtype.kind == want.dtype.kind == "f":
        differs &= ~(np.isnan(got) & np.isnan(want))
    if differs.any():
        at = tuple(int(i) for i in np.argwhere(differs)[0])
        raise Mismatch(f"`{name}`{list(at)}: {got[at]}, expected {want[at]} ({int(differs.sum())} differ)")


def compare_close(name: str, got: np.ndarray, want: np.ndarray, rtol: float, atol: float) -> None:
    """Non-finite values must sit in the same places; finite ones within atol + rtol * |want|."""
    if got.shape != want.shape:
        raise Mismatch(f"`{name}`: shape {got.shape}, expected {want.shape}")
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    if not finite.all():  # masking takes longer than comparing
        compare_exact(f"{name} (non-finite)", np.where(finite, 0.0, got), np.where(finite, 0.0, want))
        got, want = np.where(finite, got, 0.0), np.where(finite, want, 0.0)
    error = np.abs(got - want)
    bad = ~(error <= atol + rtol * np.abs(want))  # NaN in `got` is bad
    if bad.any():
        at = tuple(
            int(i)
            for i in np.unravel_index(
                np.argmax(np.where(bad, np.nan_to_num(error, nan=np.inf), -1.0)), error.shape
            )
        )
        raise Mismatch(
            f"`{name}`{list(at)}: {got[at]}, expected {want[at]} (rtol {rtol}, atol {atol}; {int(bad.sum())} differ)"
        )
