"""Cases of mla_inputs: widths that fill no tile, one head and many; what is not to be written is NaN."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftwood.kernels.case import Axis, Case, compare_close, make_case, require
from draftwood.kernels.rounding import ITEM_SIZE, normal

KERNEL = "mla_inputs"
FLOATS = ("q_rope", "k_rope", "latent", "kv_norm", "q", "latents")
CACHE = "warm"
DEFAULTS: dict[str, Axis] = {"N": 1, "H": 64, "R": 512, "P": 64, "eps": 1e-6, "dtype": "bfloat16"}

# rtol, atol; 16-bit rotations are rounded once, normed numbers twice.
TOLERANCE = {
    "float64": (1e-12, 1e-12),
    "float32": (1e-5, 1e-5),
    "bfloat16": (2**-6, 2e-3),
    "float16": (2**-9, 2e-3),
}


def small() -> list[Case]:
    def case(**axes: Any) -> Case:
        return make_case(KERNEL, DEFAULTS, **{"H": 3, "R": 24, "P": 6, "dtype": "float32", **axes})

    return [
        *(case(N=N, dtype=dtype) for N in (1, 5) for dtype in TOLERANCE),
        case(N=2, H=1, R=1, P=2),
        case(N=3, H=8, R=128, P=16, dtype="bfloat16"),
        case(N=2, H=40, R=70, P=64),
    ]


def bench() -> list[Case]:
    return [make_case(KERNEL, DEFAULTS, N=N) for N in (1, 32)]


def make(case: Case) -> dict[str, Any]:
    rng = case.rng
    N, H, R, P, dtype = (case[axis] for axis in ("N", "H", "R", "P", "dtype"))
    table = np.float64 if dtype == "float64" else np.float32
    angle = rng.uniform(0, 2 * np.pi, (N, 1, P // 2))
    return {
        "q_rope": normal(rng, (N, H, P), dtype),
        "k_rope": normal(rng, (N, P), dtype),
        "latent": normal(rng, (N, R), dtype),
        "cos": np.tile(np.cos(angle), 2).astype(table),
        "sin": np.concatenate((-np.sin(angle), np.sin(angle)), -1).astype(table),
        "kv_norm": normal(rng, (R,), dtype, std=0.5),
        "eps": case["eps"],
        "q": np.full((N, H, R + P), np.nan, table),
        "latents": np.full((N, R + P), np.nan, table),
    }


def check(case: Case, inputs: dict[str, Any]) -> None:
    N, H, R, P = (case[axis] for axis in ("N", "H", "R", "P"))
    require(P % 2 == 0, f"axis `P`: expected an even number, got {P}")
    shapes = {"q_rope": (N, H, P), "k_rope": (N, P), "latent": (N, R), "cos": (N, 1, P), "sin": (N, 1, P)}
    shapes |= {"kv_norm": (R,), "q": (N, H, R + P), "latents": (N, R + P)}
    for name, want in shapes.items():
        require(inputs[name].shape == want, f"`{name}`: expected {want}, got {inputs[name].shape}")


def flops(case: Case) -> int:
    return int(case["N"] * (3 * (case["H"] + 1) * case["P"] + 4 * case["R"]))


def bytes_moved(case: Case) -> int:
    """Ropes and latents read and written once, tables and weight read."""
    N, R, P, item = case["N"], case["R"], case["P"], ITEM_SIZE[case["dtype"]]
    return int(item * (2 * N * ((case["H"] + 1) * P + R) + R) + 2 * max(4, item) * N * P)


def compare(case: Case, got: Any, want: Any) -> None:
    for name, g, w in zip(("q", "latents"), got, want, strict=True):
        compare_close(name, g, w, *TOLERANCE[case["dtype"]])
