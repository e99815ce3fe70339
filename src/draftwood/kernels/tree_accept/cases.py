"""Cases of `tree_accept`, and random trees."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from draftwood.kernels.case import Case, compare_exact, make_case, require
from draftwood.kernels.tree_accept import Limits
from draftwood.tree import DraftTree, Status, from_parents

KERNEL = "tree_accept"
DEFAULTS: dict[str, int | float | str] = {
    "B": 1,
    "D": 7,
    "T": 32,
    "S": 2,
    "tree": "random",  # random, chain, star; garbage: arbitrary bits in every field
    "hit": 0.9,  # chance that a slot chooses the token of one of its children
    "limits": "far",  # near: small max_new and context_left
}
FLOATS: tuple[str, ...] = ()
CACHE = "warm"
_VOCAB = 50


def small() -> list[Case]:
    out = [
        make_case(KERNEL, DEFAULTS, B=5, T=T, tree=tree, limits=limits)
        for T in (1, 31, 32, 33, 64, 65, 128, 130)
        for tree in ("random", "chain", "star")
        for limits in ("far", "near")
    ]
    out += [
        make_case(KERNEL, DEFAULTS, seed, B=40, T=T, tree="garbage", limits="near")
        for T in (1, 8, 64, 65)
        for seed in (0, 1)
    ]
    out += [make_case(KERNEL, DEFAULTS, B=4, D=D, S=S, hit=1.0) for D in (0, 3, 31) for S in (0, 1)]
    return out


def bench() -> list[Case]:
    return [make_case(KERNEL, DEFAULTS, B=B, T=T) for B in (1, 8) for T in (8, 32, 64, 128)]


def make(case: Case) -> dict[str, Any]:
    rng, (B, T) = case.rng, (case["B"], case["T"])
    if case["tree"] == "garbage":
        tree = garbage_tree(rng, B, T)
        choice = rng.integers(-2, 4, (B, T)).astype(np.int32)
    else:
        tree = random_tree(rng, B, T, case["D"], case["tree"])
        choice = choices(rng, tree, case["hit"])
        choice[rng.random((B, T)) < 0.03] = -1
    far = case["limits"] == "far"
    return {
        "tree": tree,
        "choice": choice,
        "limits": Limits(
            stop_ids=rng.integers(-1, _VOCAB, (B, case["S"])).astype(np.int32),
            max_new=(np.full(B, 1000) if far else rng.integers(1, 6, B)).astype(np.int32),
            context_left=(np.full(B, 1000) if far else rng.integers(1, 6, B)).astype(np.int32),
        ),
        "max_depth": case["D"],
    }


def random_tree(rng: np.random.Generator, B: int, T: int, D: int, shape: str = "random") -> DraftTree:
    """Sound trees of at most T slots (row 0 as many as it can) and depth at most D; `shape` as in `DEFAULTS`."""
    tokens, parents = np.zeros((B, T), np.int32), np.full((B, T), -1, np.int32)
    n_slots = np.ones(B, np.int32)
    for b in range(B):
        tokens[b, 0] = rng.integers(_VOCAB)
        wanted = T if b == 0 else int(rng.integers(1, T + 1))
        depths, n_children = [0], [0]
        for i in range(1, wanted):
            open_slots = [s for s in range(i) if depths[s] < D and n_children[s] < _VOCAB]
            if not open_slots:
                break
            pick = {"chain": open_slots[-1], "star": open_slots[0]}.get(shape, int(rng.choice(open_slots)))
            parents[b, i] = pick
            taken = set(tokens[b, :i][parents[b, :i] == pick].tolist())
            tokens[b, i] = rng.choice([v for v in range(_VOCAB) if v not in taken])
            depths.append(depths[pick] + 1)
            n_children.append(0)
            n_children[pick] += 1
            n_slots[b] = i + 1
    scores = -np.cumsum(rng.random((B, T)), 1).astype(np.float32)
    scores[:, 0] = 0.0
    return from_parents(tokens, parents, n_slots, scores)


def garbage_tree(rng: np.random.Generator, B: int, T: int) -> DraftTree:
    """Any bits in any field, with enough plausible ones that some slots are accepted."""
    tree = random_tree(rng, B, T, T)
    wild = rng.random((B, T)) < 0.3
    any_i32 = rng.integers(-(2**31), 2**31, (B, T)).astype(np.int32)
    any_i64 = rng.integers(-(2**63), 2**63, tree.ancestors.shape, dtype=np.int64)
    close = rng.integers(-2, T + 2, (B, T)).astype(np.int32)
    return replace(
        tree,
        tokens=(tree.tokens % 4).astype(np.int32),
        parents=np.where(wild, np.where(rng.random((B, T)) < 0.5, any_i32, close), tree.parents),
        ancestors=np.where(
            rng.random((B, T, 1)) < 0.3, any_i64 & rng.integers(0, 8, any_i64.shape), tree.ancestors
        ),
        n_slots=np.where(rng.random(B) < 0.3, any_i32[:, 0], rng.integers(-1, T + 3, B)).astype(np.int32),
        status=np.where(rng.random(B) < 0.2, Status.BAD_PARENT, Status.SOUND).astype(np.int32),
    )


def choices(rng: np.random.Generator, tree: DraftTree, hit: float) -> np.ndarray:
    """[B, T] i32: at each slot the token of one of its children with probability `hit`, else any token."""
    choice = rng.integers(0, _VOCAB, (tree.B, tree.T)).astype(np.int32)
    for b in range(tree.B):
        for i in range(1, int(tree.n_slots[b])):
            if rng.random() < hit:
                choice[b, tree.parents[b, i]] = tree.tokens[b, i]
    return choice


def check(case: Case, inputs: dict[str, Any]) -> None:
    tree, limits, B = inputs["tree"], inputs["limits"], case["B"]
    if case["tree"] != "garbage":
        tree.check()
    require(inputs["choice"].shape == (B, case["T"]), "`choice`: expected [B, T]")
    require(limits.stop_ids.shape == (B, case["S"]), "`stop_ids`: expected [B, S]")
    require((limits.max_new >= 1).all(), "`max_new`: must be at least 1")
    require((limits.context_left >= 1).all(), "`context_left`: must be at least 1")


def flops(case: Case) -> int:
    """One comparison and one bit test per slot and word."""
    return int(case["B"] * case["T"] * (1 + -(-case["T"] // 64)))


def bytes_moved(case: Case) -> int:
    words = -(-case["T"] // 64)
    return int(case["B"] * (case["T"] * (12 + 8 * words) + 4 * case["S"] + 4 * (case["D"] + 1) + 28))


def compare(case: Case, got: Any, want: Any) -> None:
    for f in fields(want):
        compare_exact(f.name, getattr(got, f.name), getattr(want, f.name))
