"""Cases of `path_features`: paths with their padding, widths that fill no tile."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftwood.kernels.case import Axis, Case, compare_exact, make_case, require
from draftwood.kernels.rounding import ITEM_SIZE, normal

KERNEL = "path_features"
FLOATS = ("taps",)
CACHE = "warm"
DEFAULTS: dict[str, Axis] = {"K": 6, "B": 1, "T": 32, "S": 8, "d": 7168, "dtype": "bfloat16"}


def small() -> list[Case]:
    def case(**axes: Any) -> Case:
        return make_case(
            KERNEL, DEFAULTS, **{"K": 3, "B": 2, "T": 9, "S": 4, "d": 40, "dtype": "float32", **axes}
        )

    return [
        *(case(dtype=dtype) for dtype in ITEM_SIZE),
        case(B=1, K=1, T=1, S=1, d=1),
        case(B=3, T=33, d=1030),
    ]


def bench() -> list[Case]:
    return [make_case(KERNEL, DEFAULTS, B=B) for B in (1, 8)]


def make(case: Case) -> dict[str, Any]:
    rng, (B, T, S) = case.rng, (case["B"], case["T"], case["S"])
    path = np.sort(rng.integers(0, T, (B, S)), 1)
    path[np.arange(S) >= rng.integers(1, S + 1, (B, 1))] = -1
    taps = normal(rng, (case["K"], B, T, case["d"]), case["dtype"])
    return {"taps": taps, "path": path.astype(np.int32)}


def check(case: Case, inputs: dict[str, Any]) -> None:
    shapes = {"taps": tuple(case[axis] for axis in ("K", "B", "T", "d")), "path": (case["B"], case["S"])}
    for name, want in shapes.items():
        require(inputs[name].shape == want, f"`{name}`: expected {want}, got {inputs[name].shape}")
    require(inputs["path"].max() < case["T"], f"`path`: expected slots below {case['T']}")


def flops(case: Case) -> int:
    return 0


def bytes_moved(case: Case) -> int:
    """Every row of the result read and written."""
    return int(2 * ITEM_SIZE[case["dtype"]] * case["K"] * case["B"] * case["S"] * case["d"])


def compare(case: Case, got: Any, want: Any) -> None:
    compare_exact("out", got, want)
