"""Cases of moe_int4: the routing of `moe`'s cases, random words, and scales of which some are zero or negative."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from draftwood.kernels.case import Axis, Case, compare_close, make_case, require
from draftwood.kernels.moe import cases as moe_cases
from draftwood.kernels.moe.cases import options, routing_inputs
from draftwood.kernels.moe.ref import route
from draftwood.kernels.moe_int4 import GROUP, PER_WORD
from draftwood.kernels.rounding import ITEM_SIZE, PERIOD, Repeated, round_to

KERNEL = "moe_int4"
FLOATS = ("x", "router", "gate_up_scale", "down_scale")
CACHE = "cold"
DEFAULTS: dict[str, Axis] = moe_cases.DEFAULTS | {"E": 384, "d": 7168, "I": 256}  # one of eight ranks of K2.6

# rtol, atol. 16-bit outputs are rounded, and so may the matrices be, and the activations between the two products.
TOLERANCE = moe_cases.TOLERANCE | {"bfloat16": (2**-7, 3e-2), "float16": (2**-10, 4e-3)}

SPREAD = math.sqrt(21.5)
"""Root mean square of -8..7."""


def small() -> list[Case]:
    def case(**axes: Any) -> Case:
        narrow = {"E": 8, "top_k": 2, "d": 64, "I": 32, "dtype": "float32"}
        return make_case(KERNEL, DEFAULTS, **{**narrow, **axes})

    return [
        *(case(N=N, dtype=dtype) for N in (1, 2, 32) for dtype in TOLERANCE),
        case(N=33, E=16, top_k=4, n_group=4, topk_group=2, d=96),
        case(N=17, norm=0, scaling=1.0, I=96, dtype="bfloat16"),
        case(N=3, E=1, top_k=1, d=32),
        case(N=9, E=5, top_k=5, dtype="float16"),
        case(N=130, E=64, top_k=8, d=160, I=64, dtype="bfloat16"),
        case(N=32, E=16, top_k=4, ties=1),
    ]


def bench() -> list[Case]:
    """On one of eight ranks, one of four, and all in one."""
    return [make_case(KERNEL, DEFAULTS, N=N, I=I) for I in (256, 512, 2048) for N in (1, 8, 32, 128)]


def make(case: Case) -> dict[str, Any]:
    rng = case.rng
    E, d, I = case["E"], case["d"], case["I"]
    x, router, bias = routing_inputs(case, rng)
    return {
        "x": x,
        "router": router,
        "bias": bias,
        "gate_up_packed": _words(rng, (E, 2 * I, d // PER_WORD)),
        "gate_up_scale": _scales(rng, (E, 2 * I, d // GROUP), case["dtype"], d**-0.5),
        "down_packed": _words(rng, (E, d, I // PER_WORD)),
        "down_scale": _scales(rng, (E, d, I // GROUP), case["dtype"], I**-0.5),
        **options(case),
    }


def check(case: Case, inputs: dict[str, Any]) -> None:
    """Like `moe`'s, on matrices of the unpacked shapes."""
    for name in ("gate_up", "down"):
        packed, scale = inputs[f"{name}_packed"], inputs[f"{name}_scale"]
        require(packed.ndim == 3, f"`{name}_packed`: expected three axes, got shape {packed.shape}")
        want = (*packed.shape[:2], packed.shape[2] * PER_WORD // GROUP)
        require(
            packed.shape[2] * PER_WORD % GROUP == 0 and scale.shape == want,
            f"`{name}_scale`: expected {want}, one for every {GROUP} numbers, got {scale.shape}",
        )
    unpacked = {name: np.empty(0) for name in ("gate_up", "down")}
    for name in unpacked:
        E, out, words = inputs[f"{name}_packed"].shape
        unpacked[name] = np.broadcast_to(np.float32(0), (E, out, words * PER_WORD))
    moe_cases.check(case, inputs | unpacked)


def flops(case: Case) -> int:
    return moe_cases.flops(case)


def bytes_moved(case: Case) -> int:
    """x, the router, the output, and words and scales of the distinct experts that this very case's tokens choose."""
    x, router, bias = routing_inputs(case, case.rng)
    _, experts = route(x, router, bias, **options(case))
    weights = len(np.unique(experts)) * 3 * case["d"] * case["I"]
    numbers = 2 * x.size + router.size + weights // GROUP
    return int(ITEM_SIZE[case["dtype"]] * numbers + weights // 2 + 4 * bias.size)


def compare(case: Case, got: Any, want: Any) -> None:
    rtol, atol = TOLERANCE[case["dtype"]]
    compare_close("out", got, want, rtol, atol)


def _words(rng: np.random.Generator, shape: Sequence[int]) -> Any:
    size = math.prod(shape)
    words = rng.integers(-(2**31), 2**31, min(size, PERIOD), np.int32)
    return Repeated(words, tuple(shape)) if size > PERIOD else words.reshape(shape)


def _scales(rng: np.random.Generator, shape: Sequence[int], dtype: str, std: float) -> Any:
    """For numbers of about this standard deviation."""
    size = math.prod(shape)
    drawn = rng.uniform(0.5, 1.3, min(size, PERIOD)) * (std / SPREAD)
    drawn[rng.random(len(drawn)) < 0.05] *= -1
    drawn[rng.random(len(drawn)) < 0.02] = 0
    scales = round_to(drawn, dtype)
    return Repeated(scales, tuple(shape)) if size > PERIOD else scales.reshape(shape)
