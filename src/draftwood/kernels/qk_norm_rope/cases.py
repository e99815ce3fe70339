"""Cases of qk_norm_rope: queries and keys of one layer, keys alone of several; widths that fill no tile."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftwood.kernels.case import Axis, Case, compare_close, make_case, require
from draftwood.kernels.rounding import ITEM_SIZE, normal

KERNEL = "qk_norm_rope"
FLOATS = ("x", "q_norm", "k_norm")
CACHE = "warm"
DEFAULTS: dict[str, Axis] = {
    "L": 1,
    "N": 8,
    "Hq": 64,
    "Hkv": 8,
    "Hv": 0,
    "hd": 128,
    "eps": 1e-6,
    "dtype": "bfloat16",
}

# rtol, atol; 16-bit numbers are rounded three times, twice before two of them are added.
TOLERANCE = {
    "float64": (1e-12, 1e-12),
    "float32": (1e-5, 1e-5),
    "bfloat16": (2**-6, 2e-2),
    "float16": (2**-9, 3e-3),
}


def small() -> list[Case]:
    def case(**axes: Any) -> Case:
        return make_case(KERNEL, DEFAULTS, **{"N": 3, "Hq": 4, "Hkv": 2, "hd": 6, "dtype": "float32", **axes})

    return [
        *(case(L=L, Hq=Hq, dtype=dtype) for L, Hq in ((1, 4), (3, 0)) for dtype in TOLERANCE),
        case(N=1, Hq=1, Hkv=1, hd=2),
        case(Hq=8, Hkv=4, hd=48, dtype="bfloat16"),
        case(Hq=33, Hkv=3, hd=64),
        case(L=2, Hq=2, Hkv=1),
        *(case(L=2, Hq=Hq, Hv=2, dtype=dtype) for Hq, dtype in ((0, "bfloat16"), (3, "float32"))),
    ]


def bench() -> list[Case]:
    return [make_case(KERNEL, DEFAULTS), make_case(KERNEL, DEFAULTS, L=5, Hq=0, Hv=8)]


def make(case: Case) -> dict[str, Any]:
    rng, dtype = case.rng, case["dtype"]
    L, N, Hq, Hkv, hd = (case[axis] for axis in ("L", "N", "Hq", "Hkv", "hd"))
    table = np.float64 if dtype == "float64" else np.float32
    angle = rng.uniform(0, 2 * np.pi, (N, 1, hd // 2))
    return {
        "x": normal(rng, (L, N, Hq + Hkv + case["Hv"], hd), dtype),
        "q_norm": normal(rng, (hd,), dtype, std=0.5) if Hq else None,
        "k_norm": normal(rng, (L, hd), dtype, std=0.5),
        "cos": np.tile(np.cos(angle), 2).astype(table),
        "sin": np.concatenate((-np.sin(angle), np.sin(angle)), -1).astype(table),
        "eps": case["eps"],
        "n_q": Hq,
        "n_v": case["Hv"],
    }


def check(case: Case, inputs: dict[str, Any]) -> None:
    L, N, Hq, Hkv, hd = (case[axis] for axis in ("L", "N", "Hq", "Hkv", "hd"))
    require(hd % 2 == 0, f"axis `hd`: expected an even number, got {hd}")
    require(inputs["q_norm"] is not None or Hq == 0, "`q_norm`: expected where there are queries")
    shapes = {"x": (L, N, Hq + Hkv + case["Hv"], hd), "k_norm": (L, hd), "cos": (N, 1, hd), "sin": (N, 1, hd)}
    for name, want in shapes.items():
        require(inputs[name].shape == want, f"`{name}`: expected {want}, got {inputs[name].shape}")


def flops(case: Case) -> int:
    return int(7 * case["L"] * case["N"] * (case["Hq"] + case["Hkv"]) * case["hd"])


def bytes_moved(case: Case) -> int:
    """x read and written once, tables and weights read."""
    L, N, heads, hd, item = (
        case["L"],
        case["N"],
        case["Hq"] + case["Hkv"] + case["Hv"],
        case["hd"],
        ITEM_SIZE[case["dtype"]],
    )
    return int(item * hd * (2 * L * N * heads + L + (case["Hq"] > 0)) + 2 * max(4, item) * N * hd)


def compare(case: Case, got: Any, want: Any) -> None:
    compare_close("out", got, want, *TOLERANCE[case["dtype"]])
