"""Cases of `sample`."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftwood.kernels.case import Case, compare_exact, make_case, require
from draftwood.kernels.sample.params import SampleParams
from draftwood.kernels.tree_accept.cases import random_tree

KERNEL = "sample"
DEFAULTS: dict[str, int | float | str] = {
    "B": 1,
    "T": 32,
    "V": 2048,
    "rows": "greedy",  # greedy, plain (temperature only), top_k, top_p, min_p, all (the three together), mixed
    "p": 0.0,  # top_p of rows that have one; 0: one of several, 0 among them
    "extras": "none",  # none, penalties, bias, mask, all
    "values": "normal",  # ties: few distinct values; holes: NaN, infinities and a row of nothing else
    "tree": 0,  # 1: a random tree per row, else every slot is live
    "told": 0,  # 1: with `unfiltered`, as the engine gives it where no row has a filter
}
FLOATS: tuple[str, ...] = ()
CACHE = "warm"  # the LM head has just written them
_ROWS = ("greedy", "plain", "top_k", "top_p", "min_p", "all")


def small() -> list[Case]:
    odd = {"B": 3, "T": 5, "V": 331}
    out = [
        make_case(KERNEL, DEFAULTS, **odd, rows=rows, values=v) for rows in _ROWS for v in ("normal", "ties")
    ]
    out += [make_case(KERNEL, DEFAULTS, **odd, rows=rows, values="holes", tree=1) for rows in _ROWS]
    for extras in ("penalties", "bias", "mask", "all"):
        out += [
            make_case(KERNEL, DEFAULTS, B=7, T=T, V=97, rows="mixed", extras=extras, values=values, tree=tree)
            for T, tree in ((4, 0), (9, 1), (65, 1))
            for values in ("normal", "ties", "holes")
        ]
    out += [
        make_case(KERNEL, DEFAULTS, **odd, rows=rows, values=values, tree=1, extras="all", told=1)
        for rows in ("greedy", "plain")
        for values in ("normal", "ties", "holes")
    ]
    out += [make_case(KERNEL, DEFAULTS, B=6, T=1, V=1, rows="mixed")]
    out += [make_case(KERNEL, DEFAULTS, T=8, rows=rows) for rows in _ROWS]
    return out


def bench() -> list[Case]:
    return [
        make_case(
            KERNEL, DEFAULTS, B=B, T=T, V=163840, rows=rows, p=0.95, told=int(rows in ("greedy", "plain"))
        )
        for B, T, kinds in (
            (1, 32, ("greedy", "plain", "top_p", "all")),
            *((B, T, ("greedy", "plain", "top_p")) for B, T in ((1, 1), (1, 64), (8, 1), (8, 32), (8, 64))),
        )
        for rows in kinds
    ]


def make(case: Case) -> dict[str, Any]:
    rng, (B, T, V) = case.rng, (case["B"], case["T"], case["V"])
    logits = rng.normal(0.0, 3.0, (B, T, V)).astype(np.float32)
    if case["values"] == "ties":
        logits = np.round(logits / 3.0)
    if case["values"] == "holes":
        kind = rng.random((B, T, V))
        logits[kind < 0.8] = np.nan
        logits[(kind > 0.85) & (kind < 0.87)] = np.inf
        logits[kind > 0.95] = -np.inf
        logits[:, T // 2] = np.nan
    return {
        "logits": logits,
        "params": _params(case, rng),
        "seed": rng.integers(-(2**63), 2**63, B, dtype=np.int64),
        "position": rng.integers(0, 2**20, (B, T)).astype(np.int32),
        "tree": random_tree(rng, B, T, 7) if case["tree"] else None,
    }


def _params(case: Case, rng: np.random.Generator) -> SampleParams:
    B, T, V = case["B"], case["T"], case["V"]
    kinds = np.array([_ROWS[b % len(_ROWS)] if case["rows"] == "mixed" else case["rows"] for b in range(B)])
    every = kinds == "all"
    shares = np.full(B, case["p"]) if case["p"] > 0 else rng.choice([0.0, 0.5, 0.9, 0.99], B)
    f32 = np.float32
    extras: dict[str, np.ndarray] = {}
    if case["extras"] in ("penalties", "all"):
        extras |= {
            "repetition": rng.choice([1.0, 1.3, 0.8], B).astype(f32),
            "presence": rng.choice([0.0, 0.5, -0.5], B).astype(f32),
            "frequency": rng.choice([0.0, 0.7], B).astype(f32),
            "prompt_seen": rng.random((B, V)) < 0.2,
            "counts": (rng.random((B, V)) < 0.2).astype(np.int32)
            * rng.integers(1, 5, (B, V)).astype(np.int32),
        }
    if case["extras"] in ("bias", "all"):
        M = min(5, V)
        ids = rng.permuted(np.broadcast_to(np.arange(V), (B, V)), axis=1)[:, :M]
        values = rng.choice([-np.inf, -100.0, 2.0, 5.0], (B, M))
        extras |= {
            "bias_ids": np.where(rng.random((B, M)) < 0.3, -1, ids).astype(np.int32),
            "bias_values": values.astype(f32),
        }
    if case["extras"] in ("mask", "all"):
        words = rng.integers(-(2**31), 2**31, (B, T, -(-V // 32)))
        extras["mask_bits"] = np.where(rng.random((B, T, 1)) < 0.1, 0, words).astype(np.int32)
    if case["told"]:
        extras["unfiltered"] = np.ones(B, bool)
    return SampleParams(
        temperature=np.where(kinds == "greedy", 0.0, rng.uniform(0.5, 2.0, B)).astype(f32),
        top_k=np.where(every | (kinds == "top_k"), rng.integers(1, 50, B), 0).astype(np.int32),
        top_p=np.where(every | (kinds == "top_p"), shares, 1.0).astype(f32),
        log_min_p=np.where(every | (kinds == "min_p"), np.log(rng.uniform(0.01, 1.0, B)), -np.inf).astype(
            f32
        ),
        **extras,
    )


def check(case: Case, inputs: dict[str, Any]) -> None:
    B, T, V, params = case["B"], case["T"], case["V"], inputs["params"]
    require(inputs["logits"].shape == (B, T, V), "`logits`: expected [B, T, V]")
    require(inputs["logits"].dtype == np.float32, "`logits`: expected float32")
    require(inputs["seed"].shape == (B,) and inputs["seed"].dtype == np.int64, "`seed`: expected [B] int64")
    require(inputs["position"].shape == (B, T), "`position`: expected [B, T]")
    require((params.temperature >= 0).all(), "`temperature`: must not be negative")
    require(((params.top_p >= 0) & (params.top_p <= 1)).all(), "`top_p`: expected 0..1")
    require((params.log_min_p <= 0).all(), "`log_min_p`: must not be positive")
    require(not case["told"] or case["rows"] in ("greedy", "plain"), "`told`: 1 only without filters")
    penalties = [getattr(params, n) for n in ("repetition", "presence", "frequency", "prompt_seen", "counts")]
    require(len({p is None for p in penalties}) == 1, "penalties: all five arrays or none")
    if inputs["tree"] is not None:
        inputs["tree"].check()


def flops(case: Case) -> int:
    """One comparison per logit, and one multiply-add per logit at a temperature."""
    return int(case["B"] * case["T"] * case["V"]) * (1 if case["rows"] == "greedy" else 3)


def bytes_moved(case: Case) -> int:
    """The logits and, with extras, what they read once; choices, seeds and positions."""
    B, T, V = case["B"], case["T"], case["V"]
    extras = {"penalties": B * V * 5, "mask": B * T * V // 8, "all": B * V * 5 + B * T * V // 8}
    return int(B * T * (V * 4 + 8) + B * 12 + extras.get(case["extras"], 0))


def compare(case: Case, got: Any, want: Any) -> None:
    compare_exact("choice", got[0], want[0])
    compare_exact("status", got[1], want[1])
