"""Cases of add_rms_norm: widths that fill no tile, none to two addends, sums that cancel to nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftwood.kernels.case import Axis, Case, compare_close, make_case, require
from draftwood.kernels.rounding import ITEM_SIZE, normal

KERNEL = "add_rms_norm"
FLOATS = ("x", "a", "b", "weight")
CACHE = "warm"
DEFAULTS: dict[str, Axis] = {
    "N": 1,
    "d": 7168,
    "addends": 2,
    "eps": 1e-5,
    "values": "normal",
    "dtype": "bfloat16",
}

# rtol, atol; 16-bit sums are rounded twice, and normed numbers twice more.
TOLERANCE = {
    "float64": (1e-12, 1e-12),
    "float32": (1e-5, 1e-5),
    "bfloat16": (2**-6, 2e-2),
    "float16": (2**-9, 3e-3),
}


def small() -> list[Case]:
    def case(**axes: Any) -> Case:
        return make_case(KERNEL, DEFAULTS, **{"d": 40, "dtype": "float32", **axes})

    return [
        *(case(N=3, addends=addends, dtype=dtype) for addends in (0, 1, 2) for dtype in TOLERANCE),
        *(case(N=2, d=d) for d in (1, 7, 64, 1030)),
        *(case(N=2, values="zero", dtype=dtype, eps=1e-6) for dtype in ("float64", "bfloat16")),
        case(N=35, d=384, dtype="bfloat16"),
    ]


def bench() -> list[Case]:
    return [make_case(KERNEL, DEFAULTS, N=N) for N in (1, 32)]


def make(case: Case) -> dict[str, Any]:
    rng, shape, dtype = case.rng, (case["N"], case["d"]), case["dtype"]
    x, *added = (normal(rng, shape, dtype) for _ in range(1 + case["addends"]))
    if case["values"] == "zero":  # then eps is all there is
        added[0], added[1] = -x, 0 * x
    a, b = (*added, None, None)[:2]
    return {"x": x, "weight": normal(rng, shape[1:], dtype, std=0.5), "eps": case["eps"], "a": a, "b": b}


def check(case: Case, inputs: dict[str, Any]) -> None:
    shape = (case["N"], case["d"])
    for name, want in (("x", shape), ("a", shape), ("b", shape), ("weight", shape[1:])):
        array = inputs[name]
        require(
            array is None or array.shape == want,
            f"`{name}`: expected {want}, got {getattr(array, 'shape', ())}",
        )
    require(inputs["a"] is not None or inputs["b"] is None, "`b`: expected only with `a`")


def flops(case: Case) -> int:
    return int((case["addends"] + 4) * case["N"] * case["d"])


def bytes_moved(case: Case) -> int:
    """x and addends read, sum and norm written; without addends there is no sum to write."""
    tensors = 2 + case["addends"] + (case["addends"] > 0)
    return int(ITEM_SIZE[case["dtype"]] * case["d"] * (tensors * case["N"] + 1))


def compare(case: Case, got: Any, want: Any) -> None:
    """A row that all but cancels is divided by less than 1, and what rounding did to its sum grows with it."""
    total, normed = want
    compare_close("sum", got[0], total, *TOLERANCE[case["dtype"]])
    rms = np.sqrt(np.mean(total.astype(np.float64) ** 2, -1, keepdims=True) + case["eps"])
    shrunk = np.minimum(rms, 1) if case["addends"] else 1.0
    compare_close("normed", got[1] * shrunk, normed * shrunk, *TOLERANCE[case["dtype"]])
