"""Cases of linear: widths that fill no tile, one row and many, single and grouped weights."""

from __future__ import annotations

from typing import Any

from draftwood.kernels.case import Axis, Case, compare_close, make_case, require
from draftwood.kernels.rounding import ITEM_SIZE, normal

KERNEL = "linear"
FLOATS = ("x", "weight")
CACHE = "cold"
DEFAULTS: dict[str, Axis] = {"G": 0, "N": 1, "K": 7168, "M": 2112, "dtype": "bfloat16"}  # G = 0: no groups

# rtol, atol; 16-bit outputs are rounded once.
TOLERANCE = {
    "float64": (1e-12, 1e-12),
    "float32": (1e-5, 1e-5),
    "bfloat16": (2**-7, 1e-3),
    "float16": (2**-10, 1e-3),
}


def small() -> list[Case]:
    def case(**axes: Any) -> Case:
        return make_case(KERNEL, DEFAULTS, **{"K": 40, "M": 24, "dtype": "float32", **axes})

    return [
        *(case(N=N, dtype=dtype) for N in (1, 35) for dtype in TOLERANCE),
        *(case(G=3, N=N, dtype=dtype) for N in (1, 18) for dtype in ("float32", "bfloat16")),
        case(N=5, K=257, M=131),
        case(N=3, K=1, M=7),
        case(N=2, K=33, M=1),
        case(G=1, N=1, K=1, M=1),
    ]


def bench() -> list[Case]:
    return [
        *(make_case(KERNEL, DEFAULTS, N=N) for N in (1, 32)),
        make_case(KERNEL, DEFAULTS, G=8, N=32, K=128, M=512),  # W_UK of one rank of eight
    ]


def make(case: Case) -> dict[str, Any]:
    rng, groups = case.rng, (case["G"],) if case["G"] else ()
    N, K, M, dtype = (case[axis] for axis in ("N", "K", "M", "dtype"))
    return {
        "x": normal(rng, (*groups, N, K), dtype),
        "weight": normal(rng, (*groups, M, K), dtype, std=K**-0.5),
    }


def check(case: Case, inputs: dict[str, Any]) -> None:
    x, weight = inputs["x"], inputs["weight"]
    require(x.ndim in (2, 3) and 0 not in x.shape, f"`x`: expected [N, K] or [G, N, K], got {x.shape}")
    expected = (*x.shape[:-2], case["M"], x.shape[-1])
    require(weight.shape == expected, f"`weight`: expected {expected}, got {weight.shape}")


def flops(case: Case) -> int:
    return int(2 * max(1, case["G"]) * case["N"] * case["K"] * case["M"])


def bytes_moved(case: Case) -> int:
    N, K, M = case["N"], case["K"], case["M"]
    return int(ITEM_SIZE[case["dtype"]] * max(1, case["G"]) * (N * K + M * K + N * M))


def compare(case: Case, got: Any, want: Any) -> None:
    rtol, atol = TOLERANCE[case["dtype"]]
    compare_close("out", got, want, rtol, atol)
