"""Cases of `embed`: tokens alone and with a block, widths that fill no tile."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftwood.kernels.case import Axis, Case, compare_exact, make_case, require
from draftwood.kernels.rounding import ITEM_SIZE, normal

KERNEL = "embed"
FLOATS = ("table",)
CACHE = "cold"
DEFAULTS: dict[str, Axis] = {"N": 32, "V": 4096, "d": 7168, "block": 1, "dtype": "bfloat16"}


def small() -> list[Case]:
    def case(**axes: Any) -> Case:
        return make_case(KERNEL, DEFAULTS, **{"N": 5, "V": 11, "d": 40, "dtype": "float32", **axes})

    return [
        *(case(dtype=dtype, block=block) for dtype in ITEM_SIZE for block in (1, 3)),
        case(N=1, V=1, d=1),
        case(N=3, d=1030, block=8),
    ]


def bench() -> list[Case]:
    return [make_case(KERNEL, DEFAULTS, N=N, block=block) for N, block in ((32, 1), (1, 8))]


def make(case: Case) -> dict[str, Any]:
    rng, V = case.rng, case["V"]
    table = normal(rng, (V, case["d"]), case["dtype"])
    tokens = rng.integers(0, V, case["N"]).astype(np.int32)
    return {"tokens": tokens, "table": table, "block": case["block"], "filler": V // 2}


def check(case: Case, inputs: dict[str, Any]) -> None:
    tokens, V = inputs["tokens"], case["V"]
    require(((tokens >= 0) & (tokens < V)).all(), f"`tokens`: expected 0..{V - 1}")
    require(inputs["table"].shape == (V, case["d"]), f"`table`: expected [V, d], got {inputs['table'].shape}")


def flops(case: Case) -> int:
    return 0


def bytes_moved(case: Case) -> int:
    """Every row of the result read and written."""
    return int(2 * ITEM_SIZE[case["dtype"]] * case["N"] * case["block"] * case["d"])


def compare(case: Case, got: Any, want: Any) -> None:
    compare_exact("out", got, want)
