"""Cases of silu_mul: widths that fill no tile, and gates so far from 0 that their exponentials overflow."""

from __future__ import annotations

from typing import Any

from draftwood.kernels.case import Axis, Case, compare_close, make_case, require
from draftwood.kernels.rounding import ITEM_SIZE, normal

KERNEL = "silu_mul"
FLOATS = ("gate_up",)
CACHE = "warm"
DEFAULTS: dict[str, Axis] = {"N": 1, "I": 2048, "values": "normal", "dtype": "bfloat16"}

# rtol, atol; 16-bit numbers are rounded twice.
TOLERANCE = {
    "float64": (1e-12, 1e-12),
    "float32": (1e-5, 1e-6),
    "bfloat16": (2**-6, 1e-6),
    "float16": (2**-9, 1e-6),
}


def small() -> list[Case]:
    def case(**axes: Any) -> Case:
        return make_case(KERNEL, DEFAULTS, **{"I": 40, "dtype": "float32", **axes})

    return [
        *(
            case(N=N, values=values, dtype=t)
            for N, values in ((3, "normal"), (2, "large"))
            for t in TOLERANCE
        ),
        *(case(N=2, I=I) for I in (1, 7, 1030)),
        case(N=35, I=224, dtype="bfloat16"),
    ]


def bench() -> list[Case]:
    return [make_case(KERNEL, DEFAULTS, N=32)]


def make(case: Case) -> dict[str, Any]:
    gate_up = normal(case.rng, (case["N"], 2 * case["I"]), case["dtype"])
    if case["values"] == "large":
        gate_up[:, : case["I"]] *= 256  # exact in every dtype
    return {"gate_up": gate_up}


def check(case: Case, inputs: dict[str, Any]) -> None:
    want, got = (case["N"], 2 * case["I"]), inputs["gate_up"].shape
    require(got == want, f"`gate_up`: expected {want}, got {got}")


def flops(case: Case) -> int:
    return int(5 * case["N"] * case["I"])


def bytes_moved(case: Case) -> int:
    return int(3 * ITEM_SIZE[case["dtype"]] * case["N"] * case["I"])


def compare(case: Case, got: Any, want: Any) -> None:
    compare_close("out", got, want, *TOLERANCE[case["dtype"]])
