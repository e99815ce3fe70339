"""Cases of moe, with and without group limits and ties; no token's experts hinge on rounding."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftwood.kernels.case import Axis, Case, CaseError, compare_close, make_case, require
from draftwood.kernels.moe.ref import route
from draftwood.kernels.rounding import ITEM_SIZE, normal

KERNEL = "moe"
FLOATS = ("x", "router", "gate_up", "down")
CACHE = "cold"
DEFAULTS: dict[str, Axis] = {
    "N": 1,
    "E": 64,
    "top_k": 8,
    "d": 2048,
    "I": 1408,
    "n_group": 1,
    "topk_group": 1,
    "norm": 1,
    "scaling": 2.827,
    "ties": 0,  # 1: many experts of a token have equal scores
    "dtype": "bfloat16",
}

# rtol, atol. 16-bit outputs are rounded, and so may the activations between the two products be.
TOLERANCE = {
    "float64": (1e-12, 1e-12),
    "float32": (1e-5, 1e-5),
    "bfloat16": (2**-7, 2e-2),  # rounding the activations alone costs up to 0.016, over 300 seeds of N=32
    "float16": (2**-10, 2e-3),
}

MARGIN = 1e-5
"""Scores closer than this, yet not equal, could be ordered either way by a correct implementation."""


def small() -> list[Case]:
    def case(**axes: Any) -> Case:
        narrow = {"E": 8, "top_k": 2, "d": 32, "I": 16, "dtype": "float32"}
        return make_case(KERNEL, DEFAULTS, **{**narrow, **axes})

    return [
        *(case(N=N, dtype=dtype) for N in (1, 2, 32) for dtype in TOLERANCE),
        *(case(N=33, E=16, top_k=4, n_group=4, topk_group=2, dtype=dtype) for dtype in TOLERANCE),
        case(N=5, E=64, top_k=8, n_group=8, topk_group=4),
        case(N=17, norm=0, scaling=1.0),
        case(N=9, E=5, top_k=5),
        case(N=7, E=3, top_k=1, d=20, I=12),
        case(N=3, E=1, top_k=1),
        case(N=3, I=1),
        case(N=1, E=1, top_k=1, d=1, I=1),
        case(N=130, E=64, top_k=8, d=64, I=48),
        case(N=130, E=64, top_k=8, d=64, I=48, dtype="bfloat16"),
        *(case(N=32, E=16, top_k=4, n_group=g, topk_group=min(g, 2), ties=1) for g in (1, 4)),
        case(N=16, E=32, top_k=8, ties=1, dtype="bfloat16"),
    ]


def bench() -> list[Case]:
    return [make_case(KERNEL, DEFAULTS, N=N) for N in (1, 8, 32, 128)]


def make(case: Case) -> dict[str, Any]:
    rng = case.rng
    d, I, dtype = case["d"], case["I"], case["dtype"]
    x, router, bias = routing_inputs(case, rng)
    return {
        "x": x,
        "router": router,
        "bias": bias,
        "gate_up": normal(rng, (case["E"], 2 * I, d), dtype, std=d**-0.5),
        "down": normal(rng, (case["E"], d, I), dtype, std=I**-0.5),
        **options(case),
    }


def check(case: Case, inputs: dict[str, Any]) -> None:
    x, router = inputs["x"], inputs["router"]
    require(x.ndim == 2 and len(x) > 0, f"`x`: expected [N, d] with N > 0, got {x.shape}")
    require(router.ndim == 2, f"`router`: expected [E, d], got {router.shape}")
    E, d = len(router), x.shape[1]
    I = inputs["down"].shape[-1]
    expected = {"router": (E, d), "bias": (E,), "gate_up": (E, 2 * I, d), "down": (E, d, I)}
    for name, shape in expected.items():
        require(inputs[name].shape == shape, f"`{name}`: expected {shape}, got {inputs[name].shape}")
    bad = np.flatnonzero(~np.isfinite(inputs["bias"]))
    require(not len(bad), f"`bias`: must be finite, is not for expert {bad[:1]}")
    n_group, topk_group = inputs["n_group"], inputs["topk_group"]
    require(n_group >= 1 and E % n_group == 0, f"`n_group`: must divide {E} experts, got {n_group}")
    require(n_group == 1 or 2 * n_group <= E, f"`n_group`: a group needs two experts, got {n_group} of {E}")
    require(1 <= topk_group <= n_group, f"`topk_group`: must be in 1..{n_group}, got {topk_group}")
    most = E // n_group * topk_group
    require(1 <= inputs["top_k"] <= most, f"`top_k`: must be in 1..{most}, got {inputs['top_k']}")


def flops(case: Case) -> int:
    """The router and each token's chosen experts."""
    N, d = case["N"], case["d"]
    return int(2 * N * d * case["E"] + 2 * N * case["top_k"] * 3 * d * case["I"])


def bytes_moved(case: Case) -> int:
    """x, the router, the output, and the weights of the distinct experts that this very case's tokens choose."""
    x, router, bias = routing_inputs(case, case.rng)
    _, experts = route(x, router, bias, **options(case))
    numbers = 2 * x.size + router.size + len(np.unique(experts)) * 3 * case["d"] * case["I"]
    return int(ITEM_SIZE[case["dtype"]] * numbers + 4 * bias.size)


def compare(case: Case, got: Any, want: Any) -> None:
    rtol, atol = TOLERANCE[case["dtype"]]
    compare_close("out", got, want, rtol, atol)


def options(case: Case) -> dict[str, Any]:
    return {
        "top_k": case["top_k"],
        "n_group": case["n_group"],
        "topk_group": case["topk_group"],
        "norm_topk_prob": bool(case["norm"]),
        "scaling": case["scaling"],
    }


def routing_inputs(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, router and bias, tokens redrawn until none is a close call."""
    E, d, dtype = case["E"], case["d"], case["dtype"]

    def tokens(n: int) -> Any:
        if case["ties"]:  # logits are exact multiples of 1/8 in any summation order
            return rng.integers(0, 2, (n, d)).astype(normal(rng, (), dtype).dtype)
        return normal(rng, (n, d), dtype)

    if case["ties"]:
        router, bias = tokens(E) / 8, np.zeros(E, np.float32)
    else:
        router, bias = normal(rng, (E, d), dtype, std=d**-0.5), normal(rng, (E,), "float32", std=0.1)
    x = tokens(case["N"])
    for _ in range(100):
        close = _close_calls(case, x, router, bias)
        if not close.any():
            return x, router, bias
        x[close] = tokens(int(close.sum()))
    raise CaseError(f"`x`: no draw of {case.id} without close calls in the routing")


def _close_calls(case: Case, x: np.ndarray, router: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """[N] bool: tokens with two neighbouring experts or groups nearer than `MARGIN`, exact ties excepted.

    Without groups, experts after the first that is not chosen do not count: among hundreds, some are always near.
    """
    biased = 1 / (1 + np.exp(-(x.astype(np.float64) @ router.T.astype(np.float64)))) + bias
    groups = np.sort(biased.reshape(len(x), case["n_group"], -1))[:, :, -2:].sum(-1)

    def close(values: np.ndarray) -> Any:
        gap = np.diff(np.sort(values))
        return np.any((gap > 0) & (gap < MARGIN), axis=-1)

    if case["n_group"] == 1:
        biased = np.sort(biased)[:, -case["top_k"] - 1 :]
    return np.asarray(close(biased) | close(groups))
