"""Cases of commit_kv: paths that cross pages, and entries that must be skipped."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftwood.kernels.case import Axis, Case, compare_exact, make_case, require
from draftwood.kernels.poison import ABSURD, scattered_pages
from draftwood.kernels.rounding import ITEM_SIZE, normal

KERNEL = "commit_kv"
FLOATS = ("pages", "tree_kv")
CACHE = "cold"
DEFAULTS: dict[str, Axis] = {
    "L": 61,
    "B": 1,
    "T": 33,
    "D": 7,
    "C": 576,
    "page": 64,
    "prefix": 4096,
    "ragged": 0,  # 1: prefix lengths and path lengths differ from row to row
    "skip": 0,  # 1: absurd slots, pages and path lengths among sound ones
    "dtype": "bfloat16",
}


def small() -> list[Case]:
    def case(**axes: Any) -> Case:
        narrow = {"L": 3, "C": 10, "page": 16, "prefix": 30, "dtype": "float32"}
        return make_case(KERNEL, DEFAULTS, **{**narrow, **axes})

    return [
        *(case(prefix=prefix) for prefix in (0, 1, 15, 16, 17)),
        *(case(B=7, page=page, prefix=130, ragged=1, dtype=t) for page in (16, 32, 64) for t in ITEM_SIZE),
        *(case(B=9, page=page, prefix=70, ragged=1, skip=1) for page in (1, 16, 64)),
        case(B=3, T=130, D=20),
        case(B=2, T=1, D=0),
        case(L=1, B=2, T=8, C=576, page=64, skip=1, dtype="bfloat16"),
    ]


def bench() -> list[Case]:
    return [make_case(KERNEL, DEFAULTS, B=B, T=T) for B, T in ((1, 33), (8, 33), (32, 17))]


def make(case: Case) -> dict[str, Any]:
    """Sound inputs first; `skip` then spoils some. Scratch slots off the path are NaN, unused page ids absurd."""
    rng = case.rng
    L, B, T, C, page = (case[a] for a in ("L", "B", "T", "C", "page"))
    prefix_len, n_path = _lengths(case)
    path = np.full((B, case["D"] + 1), -1, np.int32)
    tree_kv = np.full((L, B, T, C), np.nan, np.float64 if case["dtype"] == "float64" else np.float32)
    for b, n in enumerate(n_path):
        path[b, :n] = np.append(0, np.sort(rng.permutation(T - 1)[: n - 1]) + 1)[:n]
        tree_kv[:, b, path[b, :n]] = normal(rng, (L, n, C), case["dtype"])
    # only the pages to be written, so that the pool stays small
    table, pool = scattered_pages(rng, prefix_len // page, -(-(prefix_len + n_path) // page))
    if case["skip"]:
        path[rng.random(path.shape) < 0.3] = rng.choice([T, *ABSURD])
        table[rng.random(table.shape) < 0.2] = rng.choice([pool, *ABSURD])
        n_path = np.where(rng.random(B) < 0.4, rng.choice([case["D"] + 9, 2**31 - 1, -5], B), n_path)
        prefix_len = np.where(rng.random(B) < 0.2, rng.choice([2**31 - 1, -3], B), prefix_len)
    return {
        "pages": normal(rng, (L, pool, page, C), case["dtype"]),
        "tree_kv": tree_kv,
        "page_table": table,
        "prefix_len": prefix_len.astype(np.int32),
        "path": path,
        "n_path": n_path.astype(np.int32),
    }


def check(case: Case, inputs: dict[str, Any]) -> None:
    """Shapes, and that no two entries write to the same place; entries to be skipped are legal."""
    pages, tree_kv, table, path = (inputs[k] for k in ("pages", "tree_kv", "page_table", "path"))
    require(pages.ndim == 4, f"`pages`: expected [L, n_pages, page, C], got {pages.shape}")
    L, n_pages, page, C = pages.shape
    require(
        tree_kv.ndim == 4 and tree_kv.shape[::3] == (L, C),
        f"`tree_kv`: expected [{L}, B, T, {C}], got {tree_kv.shape}",
    )
    B, T = tree_kv.shape[1:3]
    for name, ndim in (("page_table", 2), ("path", 2), ("prefix_len", 1), ("n_path", 1)):
        array = inputs[name]
        require(
            array.ndim == ndim and len(array) == B and array.size > 0 and array.dtype == np.int32,
            f"`{name}`: expected {ndim}-d int32 with {B} rows, got {array.shape} {array.dtype}",
        )
    written: dict[tuple[int, int], int] = {}
    for b in range(B):
        for j in range(min(path.shape[1], int(inputs["n_path"][b]))):
            column, offset = divmod(int(inputs["prefix_len"][b]) + j, page)
            if 0 <= column < table.shape[1] and 0 <= table[b, column] < n_pages and 0 <= path[b, j] < T:
                place = (int(table[b, column]), offset)
                require(
                    place not in written,
                    f"`page_table` row {b}: writes page {place[0]} at {offset}, as row {written.get(place)} does",
                )
                written[place] = b


def flops(case: Case) -> int:
    return 0


def bytes_moved(case: Case) -> int:
    """Every accepted latent of every layer read and written once."""
    _, n_path = _lengths(case)
    return int(2 * ITEM_SIZE[case["dtype"]] * case["L"] * case["C"] * max(1, n_path.sum()))


def compare(case: Case, got: Any, want: Any) -> None:
    compare_exact("pages", got, want)


def _lengths(case: Case) -> tuple[np.ndarray, np.ndarray]:
    B, longest = case["B"], min(case["D"] + 1, case["T"])
    prefix_len, n_path = np.full(B, case["prefix"]), np.full(B, longest)
    if case["ragged"]:
        prefix_len[:] = np.minimum(
            np.resize((case["prefix"], 0, 1, 15, 16, 17, 63, 64, 65), B), case["prefix"]
        )
        n_path[:] = np.minimum(np.resize((longest, 1, 0, 2, 3), B), longest)
    return prefix_len, n_path
