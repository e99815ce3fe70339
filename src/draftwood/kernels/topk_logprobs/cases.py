"""Cases of `topk_logprobs`."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftwood.kernels.case import Case, compare_close, compare_exact, make_case, require

KERNEL = "topk_logprobs"
DEFAULTS: dict[str, int | float | str] = {
    "B": 1,
    "D": 7,
    "V": 2048,
    "k": 32,
    "coupled": 0,  # 1: noise-coupled, every other row at temperature 0; 2: with weights too, positions from a start
    "scaled": 0,  # 1: logits are scaled, by row and depth
    "values": "normal",  # ties: few distinct values; holes: NaN, infinities and a row of nothing else
    "dtype": "float32",
}
FLOATS = ("logits",)
CACHE = "warm"  # the LM head has just written them


def small() -> list[Case]:
    shapes: list[dict[str, Any]] = [
        {},
        {"B": 3, "D": 2, "V": 131, "k": 131},
        {"B": 2, "D": 1, "V": 1, "k": 1},
        {"B": 2, "D": 0, "V": 50, "k": 4},
        {"V": 1000, "k": 1},
    ]
    out = [make_case(KERNEL, DEFAULTS, **s, coupled=c) for s in shapes for c in (0, 1)]
    out += [
        make_case(KERNEL, DEFAULTS, B=3, D=4, V=300, k=40, coupled=coupled, values=values, dtype=dtype)
        for values in ("ties", "holes")
        for dtype in ("float32", "bfloat16", "float64")
        for coupled in (0, 1)
    ]
    out += [
        make_case(KERNEL, DEFAULTS, B=3, V=300, k=9, coupled=2, scaled=1, values=values, dtype=dtype)
        for values, dtype in (("normal", "float32"), ("holes", "bfloat16"), ("ties", "float64"))
    ]
    out += [
        make_case(KERNEL, DEFAULTS, B=2, D=2, V=131, k=131, coupled=2),
        make_case(KERNEL, DEFAULTS, B=1, D=1, V=600, k=130, coupled=2, scaled=1),
        make_case(KERNEL, DEFAULTS, B=2, V=300, k=300, scaled=1, values="ties"),
    ]
    return out


def bench() -> list[Case]:
    return [
        make_case(KERNEL, DEFAULTS, B=B, D=7, V=163840, k=32, coupled=coupled, dtype="bfloat16")
        for B in (1, 8)
        for coupled in (0, 1)
    ]


def make(case: Case) -> dict[str, Any]:
    rng, (B, D, V) = case.rng, (case["B"], case["D"], case["V"])
    logits = rng.normal(0.0, 4.0, (B, D, V))
    if case["values"] == "ties":
        logits = np.round(logits / 4.0)
    if case["values"] == "holes":
        kind = rng.random((B, D, V))
        logits[kind < 0.9] = np.nan
        logits[(kind > 0.95) & (kind < 0.97)] = np.inf
        logits[kind > 0.97] = -np.inf
        logits[:, D // 2] = np.nan
    inputs: dict[str, Any] = {"logits": _representable(logits, case["dtype"]), "k": case["k"]}
    if case["coupled"]:
        inputs["temperature"] = np.where(np.arange(B) % 2 == 0, rng.uniform(0.3, 1.5, B), 0.0).astype(
            np.float32
        )
        inputs["seed"] = rng.integers(-(2**63), 2**63, B, dtype=np.int64)
        inputs["position"] = rng.integers(0, 2**20, (B, D)).astype(np.int32)
    if case["coupled"] == 2:
        inputs["start"] = rng.integers(0, 2**20, B).astype(np.int32)
        inputs["position"] = inputs["position"][:1]
        inputs["weight"] = rng.uniform(0.1, 2.0, (B, D)).astype(np.float32)
    if case["scaled"]:
        inputs["scale"] = rng.uniform(0.1, 2.0, (B, D)).astype(np.float32)
    return inputs


def _representable(x: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest f64 or f32 array whose values the case's dtype holds exactly (bf16: cut off)."""
    if dtype == "float64":
        return x
    x = x.astype(np.float32)
    return x if dtype == "float32" else (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def check(case: Case, inputs: dict[str, Any]) -> None:
    logits, B, D = inputs["logits"], case["B"], case["D"]
    require(logits.shape == (B, D, case["V"]), f"`logits`: expected [B, D, V], got {logits.shape}")
    require(1 <= inputs["k"] <= case["V"], f"`k`: expected 1..{case['V']}, got {inputs['k']}")
    if "temperature" in inputs:
        require((inputs["temperature"] >= 0).all(), "`temperature`: must not be negative")
        require(inputs["seed"].dtype == np.int64, "`seed`: expected int64")
        rows = 1 if case["coupled"] == 2 else B
        require(inputs["position"].shape == (rows, D), f"`position`: expected [{rows}, D]")
        require((inputs["position"] >= 0).all(), "`position`: must not be negative")


def flops(case: Case) -> int:
    """One exponential and one comparison per logit."""
    return 2 * int(case["B"] * case["D"] * case["V"])


def bytes_moved(case: Case) -> int:
    size = {"float64": 8, "float32": 4}.get(case["dtype"], 2)
    return max(1, int(case["B"] * case["D"] * (case["V"] * size + case["k"] * 8)))


def compare(case: Case, got: Any, want: Any) -> None:
    compare_exact("ids", got[1], want[1])
    compare_close("lp", got[0], want[0], rtol=1e-6, atol=5e-6)
