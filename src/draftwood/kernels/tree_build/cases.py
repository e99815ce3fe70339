"""Cases of `tree_build`, and the candidate lists that other tests build trees from."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from draftwood.kernels.case import Case, compare_exact, make_case, require

KERNEL = "tree_build"
DEFAULTS: dict[str, int | float | str] = {
    "B": 1,
    "D": 7,
    "K": 32,
    "T": 32,
    # random; ties: few distinct log-probs; chain: K candidates of which one is likely; thin: mostly -inf;
    # floor: a score floor that binds; faulty: each kind of unsound row, and sound ones between
    "values": "random",
}
FLOATS: tuple[str, ...] = ()
CACHE = "warm"


def small() -> list[Case]:
    shapes: list[dict[str, Any]] = [
        {},
        {"T": 1},
        {"D": 0, "K": 4, "T": 8},
        {"D": 1, "K": 40, "T": 33},
        {"D": 15, "K": 1, "T": 16},
        {"B": 3, "D": 2, "K": 3, "T": 128},  # more slots than nodes exist
        {"B": 2, "T": 65},
        {"B": 4, "D": 15, "K": 64, "T": 130},
    ]
    out = [make_case(KERNEL, DEFAULTS, **shape) for shape in shapes]
    for values in ("ties", "chain", "thin", "floor", "faulty"):
        out += [make_case(KERNEL, DEFAULTS, B=6, T=T, K=16, values=values) for T in (32, 64)]
    return out


def bench() -> list[Case]:
    return [make_case(KERNEL, DEFAULTS, B=B, T=T, K=min(T, 32)) for B in (1, 8) for T in (8, 32, 64, 128)]


def make(case: Case) -> dict[str, Any]:
    rng, (B, D, K, T) = case.rng, (case["B"], case["D"], case["K"], case["T"])
    values = case["values"]
    lp, ids = candidates(rng, B, D, K, values)
    inputs = {
        "root": rng.integers(0, 1000, B).astype(np.int32),
        "lp": lp,
        "ids": ids,
        "budget": np.where(np.arange(B) == 0, T, rng.integers(-1, T + 3, B)).astype(np.int32),
        "min_score": np.full(B, -4.0 if values == "floor" else -np.inf, np.float32),
        "slots": T,
    }
    if values == "faulty":
        _spoil(inputs)
    return inputs


def candidates(
    rng: np.random.Generator, B: int, D: int, K: int, values: str = "random"
) -> tuple[np.ndarray, np.ndarray]:
    """lp [B, D, K] f32 and ids [B, D, K] i32 as `topk_logprobs` would give; ids repeat across depths."""
    spread = 8.0 if values == "chain" else 1.0
    x = rng.gumbel(0.0, spread, (B, D, 2 * K))
    if values == "ties":
        x = np.round(x)
    lp = np.sort(x - np.log(np.exp(x).sum(-1, keepdims=True)), -1)[..., ::-1][..., :K].astype(np.float32)
    if values == "thin":
        lp[rng.random((B, D, 1)) * K < np.arange(K)] = -np.inf
    ids = rng.permuted(np.broadcast_to(np.arange(2 * K), (B, D, 2 * K)), axis=-1)[..., :K]
    return np.minimum(lp, 0.0), ids.astype(np.int32)


def _spoil(inputs: dict[str, Any]) -> None:
    """Row 0 stays sound; each further row breaks one rule."""
    lp, ids = inputs["lp"], inputs["ids"]
    lp[1, 2, 3] = np.nan
    lp[2, 0, 0] = 0.5
    lp[3, 1, 4] = lp[3, 1, 3] + 0.25
    ids[4, 3, 5] = ids[4, 3, 2]
    ids[5, 0, 1] = -1


def check(case: Case, inputs: dict[str, Any]) -> None:
    lp, ids, B = inputs["lp"], inputs["ids"], case["B"]
    shape = (B, case["D"], case["K"])
    require(lp.shape == shape and lp.dtype == np.float32, f"`lp`: expected {shape} float32")
    require(ids.shape == shape and ids.dtype == np.int32, f"`ids`: expected {shape} int32")
    require((inputs["root"] >= 0).all(), "`root`: must not be negative")
    require(inputs["slots"] >= 1, "`slots`: expected at least 1")
    for name in ("root", "budget", "min_score"):
        require(inputs[name].shape == (B,), f"`{name}`: expected [B]")


def flops(case: Case) -> int:
    """One addition for each child offered: two per slot taken."""
    return 2 * int(case["B"] * case["T"])


def bytes_moved(case: Case) -> int:
    words = -(-case["T"] // 64)
    return int(case["B"] * (case["D"] * case["K"] * 8 + case["T"] * (16 + 8 * words) + 20))


def compare(case: Case, got: Any, want: Any) -> None:
    for f in fields(want):
        compare_exact(f.name, getattr(got, f.name), getattr(want, f.name))
