"""Cases of `keep_features`: empty, filling and full rings; widths that fill no tile."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftwood.kernels.case import Axis, Case, compare_exact, make_case, require
from draftwood.kernels.rounding import ITEM_SIZE, normal

KERNEL = "keep_features"
FLOATS = ("ring", "features")
CACHE = "warm"
DEFAULTS: dict[str, Axis] = {"B": 1, "R": 16, "F": 6 * 7168, "dtype": "bfloat16"}


def small() -> list[Case]:
    def case(**axes: Any) -> Case:
        return make_case(KERNEL, DEFAULTS, **{"B": 5, "R": 3, "F": 40, "dtype": "float32", **axes})

    return [*(case(dtype=dtype) for dtype in ITEM_SIZE), case(B=1, R=1, F=1), case(B=3, F=4100)]


def bench() -> list[Case]:
    return [make_case(KERNEL, DEFAULTS, B=B) for B in (1, 32)]


def make(case: Case) -> dict[str, Any]:
    rng, (B, R, F) = case.rng, (case["B"], case["R"], case["F"])
    return {
        "ring": normal(rng, (B, R, F), case["dtype"]),
        "first": rng.integers(0, 100, B).astype(np.int32),
        "count": rng.integers(0, 2 * R, B).astype(np.int32) * (np.arange(B) > 0).astype(np.int32),
        "features": normal(rng, (B, 1, F), case["dtype"]),
        "position": rng.integers(100, 200, B).astype(np.int32),
    }


def check(case: Case, inputs: dict[str, Any]) -> None:
    B, F = case["B"], case["F"]
    shapes = {
        "ring": (B, case["R"], F),
        "features": (B, 1, F),
        "first": (B,),
        "count": (B,),
        "position": (B,),
    }
    for name, want in shapes.items():
        require(inputs[name].shape == want, f"`{name}`: expected {want}, got {inputs[name].shape}")
    require((inputs["count"] >= 0).all(), "`count`: expected none below 0")


def flops(case: Case) -> int:
    return 0


def bytes_moved(case: Case) -> int:
    """Features read and written."""
    return int(2 * ITEM_SIZE[case["dtype"]] * case["B"] * case["F"])


def compare(case: Case, got: Any, want: Any) -> None:
    for name, g, w in zip(("ring", "first", "count"), got, want, strict=True):
        compare_exact(name, g, w)
