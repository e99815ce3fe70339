"""Cases of `advance`: rows that go on, that end, and that had ended."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftwood.kernels.case import Axis, Case, compare_exact, make_case, require
from draftwood.kernels.tree_accept import Accepted, Done
from draftwood.kernels.tree_accept.cases import random_tree

KERNEL = "advance"
FLOATS = ()
CACHE = "warm"
DEFAULTS: dict[str, Axis] = {"B": 1, "D": 7, "T": 32}
_WRITTEN = ("root", "prefix_len", "max_new", "context_left", "live")


def small() -> list[Case]:
    shapes = ({"B": 1, "D": 0, "T": 1}, {"B": 8}, {"B": 7, "D": 3, "T": 33}, {"B": 3, "D": 15, "T": 130})
    return [make_case(KERNEL, DEFAULTS, **shape) for shape in shapes]


def bench() -> list[Case]:
    return [make_case(KERNEL, DEFAULTS, B=B) for B in (1, 32)]


def make(case: Case) -> dict[str, Any]:
    rng, (B, D) = case.rng, (case["B"], case["D"])

    def numbers(low: int, high: int, *shape: int) -> np.ndarray:
        return rng.integers(low, high, (B, *shape)).astype(np.int32)

    done = np.where(rng.random(B) < 0.5, int(Done.RUNNING), numbers(0, len(Done))).astype(np.int32)
    bonus = np.where(done == Done.FAILED, -1, numbers(0, 50)).astype(np.int32)
    return {
        "root": numbers(0, 50),
        "prefix_len": numbers(0, 1000),
        "max_new": numbers(D + 1, 1000),
        "context_left": numbers(D + 1, 1000),
        "live": rng.random(B) < 0.7,
        "tree": random_tree(rng, B, case["T"], D),
        "accepted": Accepted(numbers(-1, 9, D + 1), numbers(-1, 50, D + 1), numbers(1, D + 2), bonus, done),
    }


def check(case: Case, inputs: dict[str, Any]) -> None:
    B = case["B"]
    for name in _WRITTEN:
        require(inputs[name].shape == (B,), f"`{name}`: expected [{B}], got {inputs[name].shape}")
    require(inputs["live"].dtype == bool, f"`live`: expected bool, got {inputs['live'].dtype}")


def flops(case: Case) -> int:
    return 4 * int(case["B"])


def bytes_moved(case: Case) -> int:
    """The table written, what it holds read, and the state read and written."""
    return int(4 * case["B"] * (2 * (2 + 2 * (case["D"] + 1) + 4 * case["T"]) + 10))


def compare(case: Case, got: Any, want: Any) -> None:
    for name, g, w in zip((*_WRITTEN, "table"), got, want, strict=True):
        compare_exact(name, g, w)
