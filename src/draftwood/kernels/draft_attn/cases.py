"""Cases of draft_attn: paged contexts of grouped-query heads in pools whose every unused number is poison."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftwood.kernels.case import Axis, Case, compare_close, make_case, require
from draftwood.kernels.poison import live_positions, poison, scattered_pages
from draftwood.kernels.rounding import ITEM_SIZE, normal

KERNEL = "draft_attn"
FLOATS = ("q", "k_pages", "v_pages", "block_k", "block_v")
CACHE = "cold"
DEFAULTS: dict[str, Axis] = {
    "B": 1,
    "S": 8,
    "Hq": 64,
    "Hkv": 8,
    "hd": 128,
    "context": 4096,
    "page": 64,
    "causal": 0,
    "window": 0,  # 0: none
    "ragged": 0,  # 1: context lengths differ from row to row
    "dtype": "bfloat16",
}

# rtol, atol. 16-bit outputs are rounded, and so may the softmax weights be.
TOLERANCE = {
    "float64": (1e-12, 1e-12),
    "float32": (1e-5, 1e-5),
    "bfloat16": (2**-7, 8e-3),
    "float16": (2**-10, 1e-3),
}


def small() -> list[Case]:
    def case(**axes: Any) -> Case:
        narrow = {"S": 4, "Hq": 4, "Hkv": 2, "hd": 16, "context": 40, "page": 16, "dtype": "float32"}
        return make_case(KERNEL, DEFAULTS, **{**narrow, **axes})

    return [
        *(case(context=context) for context in (0, 1, 15, 16, 17, 63, 64, 65, 300)),
        *(case(causal=causal, window=window) for causal in (0, 1) for window in (0, 1, 3, 17, 1000)),
        *(
            case(B=9, page=page, context=300, ragged=1, causal=causal, window=window, dtype=dtype)
            for page, causal, window, dtype in (
                (16, 0, 0, "float32"),
                (32, 1, 0, "float64"),
                (64, 0, 20, "float32"),
                (16, 1, 33, "float64"),
                (64, 0, 0, "bfloat16"),
                (16, 1, 33, "bfloat16"),
                (32, 0, 5, "float16"),
            )
        ),
        case(B=2, Hq=2, Hkv=2, S=1),
        case(B=2, Hq=8, Hkv=1, S=16, causal=1, window=6),
        case(Hq=64, Hkv=8, hd=128, S=8, page=64, context=130, dtype="bfloat16"),
    ]


def bench() -> list[Case]:
    return [make_case(KERNEL, DEFAULTS, B=B, context=context) for context in (4096, 65536) for B in (1, 8)]


def make(case: Case) -> dict[str, Any]:
    """Inputs in which everything the kernel must not look at is NaN, infinite, huge or an absurd index."""
    rng = case.rng
    B, S, Hkv, hd, page, dtype = (case[a] for a in ("B", "S", "Hkv", "hd", "page", "dtype"))
    context_len = _context_len(case)
    page_table, pool = scattered_pages(rng, context_len * 0, -(-context_len // page))
    dead = ~live_positions(page_table, context_len, pool, page)

    def pages() -> Any:
        numbers = normal(rng, (pool, page, Hkv, hd), dtype)
        numbers[dead] = poison(rng, hd, dtype)
        return numbers

    return {
        "q": normal(rng, (B, S, case["Hq"], hd), dtype),
        "k_pages": pages(),
        "v_pages": pages(),
        "page_table": page_table,
        "context_len": context_len,
        "block_k": normal(rng, (B, S, Hkv, hd), dtype),
        "block_v": normal(rng, (B, S, Hkv, hd), dtype),
        "scale": 1.5 / hd**0.5,  # scores of deviation 1.5: neither uniform weights nor a single one
        "causal": bool(case["causal"]),
        "window": case["window"] or None,
    }


def check(case: Case, inputs: dict[str, Any]) -> None:
    q, k_pages, table, lengths = (inputs[k] for k in ("q", "k_pages", "page_table", "context_len"))
    require(q.ndim == 4, f"`q`: expected [B, S, Hq, hd], got {q.shape}")
    B, S, Hq, hd = q.shape
    require(
        k_pages.ndim == 4 and k_pages.shape[3] == hd,
        f"`k_pages`: expected [n_pages, page, Hkv, {hd}], got {k_pages.shape}",
    )
    n_pages, page, Hkv = k_pages.shape[:3]
    require(Hq % Hkv == 0, f"`q`: heads must be a multiple of the {Hkv} key heads, got {Hq}")
    block = (B, S, Hkv, hd)
    expected = {"v_pages": k_pages.shape, "block_k": block, "block_v": block, "context_len": (B,)}
    for name, shape in expected.items():
        require(inputs[name].shape == shape, f"`{name}`: expected {shape}, got {inputs[name].shape}")
    require(table.ndim == 2 and len(table) == B, f"`page_table`: expected [{B}, M], got {table.shape}")
    for name in ("page_table", "context_len"):
        require(inputs[name].dtype == np.int32, f"`{name}`: expected int32, got {inputs[name].dtype}")
    window = inputs["window"]
    require(window is None or window >= 1, f"`window`: must be None or at least 1, got {window}")
    for b, length in enumerate(lengths.tolist()):
        most = table.shape[1] * page
        require(0 <= length <= most, f"`context_len` row {b}: must be in 0..{most}, got {length}")
        used = table[b, : -(-length // page)]
        bad = used[(used < 0) | (used >= n_pages)]
        require(not len(bad), f"`page_table` row {b}: page must be in 0..{n_pages - 1}, got {bad[:1]}")


def flops(case: Case) -> int:
    """Every slot against the context and the block, but no more than a window can show it."""
    return int(4 * case["S"] * case["Hq"] * case["hd"] * _keys(case).sum())


def bytes_moved(case: Case) -> int:
    """Keys and values once, q and the output."""
    kv = 2 * case["Hkv"] * case["hd"] * int(_keys(case).sum())
    q = case["B"] * case["S"] * case["Hq"] * case["hd"]
    return int(ITEM_SIZE[case["dtype"]] * (kv + 2 * q))


def compare(case: Case, got: Any, want: Any) -> None:
    rtol, atol = TOLERANCE[case["dtype"]]
    compare_close("out", got, want, rtol, atol)


def _context_len(case: Case) -> np.ndarray:
    lengths = np.full(case["B"], case["context"], np.int32)
    if case["ragged"]:
        lengths[:] = np.minimum(
            np.resize((case["context"], 0, 1, 15, 16, 17, 63, 64, 65), case["B"]), lengths
        )
    return lengths


def _keys(case: Case) -> np.ndarray:
    """[B], keys of context and block that some slot sees."""
    before = case["window"] - 1 if case["window"] else case["context"]
    return np.asarray(np.minimum(_context_len(case), before).astype(np.int64) + case["S"])
