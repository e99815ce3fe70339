"""Cases of rotary: positions from none to all that fit, on both sides of every quarter turn."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftwood.kernels.case import Axis, Case, compare_close, make_case, require

KERNEL = "rotary"
FLOATS = ()
CACHE = "warm"
DEFAULTS: dict[str, Axis] = {
    "N": 32,
    "B": 0,  # rows that begin at positions of their own; 0 for none
    "dim": 64,
    "last": 65536,
    "amplitude": 1.0,
    "theta": 5e4,
    "dtype": "float32",
}

FP32 = 1e-7  # absolute


def small() -> list[Case]:
    def case(**axes: Any) -> Case:
        return make_case(KERNEL, DEFAULTS, **{"N": 40, "dim": 10, **axes})

    return [
        *(case(last=last, dtype=dtype) for last in (9, 2**20) for dtype in ("float64", "float32")),
        case(N=1, dim=2, last=0),
        case(N=70, dim=64, amplitude=1.25),
        case(N=3, dim=130, amplitude=0.9, dtype="float64"),
        *(case(N=15, B=3, dtype=dtype) for dtype in ("float64", "float32")),
    ]


def bench() -> list[Case]:
    return [make_case(KERNEL, DEFAULTS, B=1)]


def make(case: Case) -> dict[str, Any]:
    N, B = case["N"], case["B"]
    half = case["theta"] ** -(np.arange(0, case["dim"], 2) / case["dim"])
    positions = case.rng.integers(case["last"] + 1, size=N)
    positions[: case["last"] + 1][:10] = np.arange(10)[: min(N, case["last"] + 1)]
    start = positions.reshape(B, -1)[:, 0] if B else None
    if B:
        positions = case.rng.integers(9, size=(B, N // B))
    return {
        "positions": positions.astype(np.int32),
        "start": None if start is None else start.astype(np.int32),
        "frequencies": np.concatenate((-half, half)),
        "amplitude": case["amplitude"],
        "double": case["dtype"] == "float64",
    }


def check(case: Case, inputs: dict[str, Any]) -> None:
    positions, frequencies = inputs["positions"], inputs["frequencies"]
    N, B = case["N"], case["B"]
    want = (B, N // B) if B else (N,)
    require(positions.shape == want, f"`positions`: expected {want}, got {positions.shape}")
    require(
        not B or inputs["start"].shape == (B,),
        f"`start`: expected [{B}], of every row where its positions begin",
    )
    require(positions.min() >= 0, f"`positions`: expected none below 0, got {positions.min()}")
    require(len(frequencies) == case["dim"], f"`frequencies`: expected {case['dim']}, got {len(frequencies)}")


def flops(case: Case) -> int:
    return int(2 * case["N"] * case["dim"])


def bytes_moved(case: Case) -> int:
    """Both tables written, positions and frequencies read."""
    item = 8 if case["dtype"] == "float64" else 4
    return int(2 * item * case["N"] * case["dim"] + 4 * case["N"] + 8 * case["dim"])


def compare(case: Case, got: Any, want: Any) -> None:
    """In fp64 as well as an angle is known."""
    atol = FP32 if case["dtype"] == "float32" else 2**-52 * (13 + case["last"])
    for name, g, w in zip(("cos", "sin"), got, want, strict=True):
        compare_close(name, g, w, 0.0, atol * max(1.0, case["amplitude"]))
