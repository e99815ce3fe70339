"""Cases of verify_attn: paged prefixes and draft trees in a pool whose every unused number is poison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from draftwood.kernels.case import Axis, Case, compare_close, make_case, require
from draftwood.kernels.poison import live_positions, poison, scattered_pages
from draftwood.kernels.rounding import ITEM_SIZE, normal
from draftwood.kernels.specialised import Use
from draftwood.kernels.verify_attn import PAGE_SIZES, for_layers
from draftwood.tree import from_parents, n_words

KERNEL = "verify_attn"
FLOATS = ("q", "pages", "tree_kv")
CACHE = "cold"
DEFAULTS: dict[str, Axis] = {
    "B": 1,
    "T": 33,
    "H": 64,
    "prefix": 4096,
    "page": 64,
    "R": 512,
    "P": 64,
    "tree": "random",  # random, chain or star
    "ragged": 0,  # 1: lengths and slot counts differ from row to row, and rows share their first page
    "dtype": "bfloat16",
}

# Of o, then of lse: rtol and atol. 16-bit outputs are rounded, and so may the softmax weights be.
TOLERANCE = {
    "float64": ((1e-12, 1e-12), (1e-12, 1e-12)),
    "float32": ((1e-5, 1e-5), (1e-5, 1e-5)),
    "bfloat16": ((2**-7, 8e-3), (1e-4, 1e-3)),
    "float16": ((2**-10, 1e-3), (1e-4, 1e-3)),
}

RAGGED_PREFIX = (130, 0, 1, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097, 300, 65536)


def small() -> list[Case]:
    def case(**axes: Any) -> Case:
        narrow = {"H": 2, "R": 16, "P": 8, "page": 16, "prefix": 40, "dtype": "float32"}
        return make_case(KERNEL, DEFAULTS, **{**narrow, **axes})

    word_edges = [
        case(T=T, tree=tree)
        for T, tree in (
            (1, "chain"),
            (2, "star"),
            (3, "random"),
            (31, "random"),
            (32, "chain"),
            (33, "random"),
        )
    ] + [case(T=T, H=1) for T in (63, 64, 65, 127, 128, 129, 130)]
    prefixes = [case(T=9, prefix=prefix) for prefix in (0, 1, 15, 16, 17, 63, 64, 65, 130)]
    ragged = [
        case(B=9, T=T, H=H, page=page, prefix=130, ragged=1, dtype=dtype)
        for T, H, page, dtype in (
            (1, 8, 16, "float32"),
            (17, 2, 64, "float32"),
            (33, 1, 32, "float64"),
            (65, 2, 16, "float64"),
            (33, 8, 64, "bfloat16"),
            (66, 2, 16, "bfloat16"),
            (16, 8, 32, "float16"),
        )
    ]
    widths = [
        case(B=2, T=9, H=8, R=512, P=64, page=64, prefix=130, dtype=dtype)
        for dtype in ("float32", "bfloat16")
    ] + [case(B=2, T=5, H=1, R=32, P=4, dtype=dtype) for dtype in ("float64", "float16")]
    return word_edges + prefixes + ragged + widths


def bench() -> list[Case]:
    shapes = (
        (8, 33, 64, 4096),
        (1, 33, 64, 16384),
        (8, 33, 8, 4096),
        (32, 17, 8, 4096),
        (32, 16, 8, 4096),
        (1, 129, 64, 4096),
        (8, 9, 64, 4096),
        (1, 33, 64, 1024),
        (1, 33, 64, 256),
        (1, 17, 64, 1024),
        (1, 9, 64, 1024),
        (1, 33, 8, 1024),
        (1, 9, 8, 256),
        (1, 33, 8, 16384),
    )
    return [make_case(KERNEL, DEFAULTS, B=B, T=T, H=H, prefix=prefix) for B, T, H, prefix in shapes]


def use(case: Case, capability: int) -> Use:
    return Use(capability, case["dtype"], case["R"], case["P"], case["page"])


def shared(
    function: Callable[..., Any], inputs: dict[str, Any]
) -> Callable[[dict[str, Any]], Callable[[], Any]]:
    """What all layers of a pass share, prepared; of a layer's inputs, its call."""
    table, lengths = inputs["page_table"], inputs["prefix_len"]
    page = inputs["pages"].shape[1]
    layer = for_layers(function, table, lengths, inputs["ancestors"], inputs["n_slots"], page)

    def call_of(inputs: dict[str, Any]) -> Callable[[], Any]:
        own = {k: inputs[k] for k in ("q", "pages", "tree_kv", "scale", "value_dim")}
        return lambda: layer(**own)

    return call_of


def make(case: Case) -> dict[str, Any]:
    """Inputs in which everything the kernel must not look at is NaN, infinite, huge or an absurd index."""
    rng = case.rng
    B, T, H, page, dtype = (case[axis] for axis in ("B", "T", "H", "page", "dtype"))
    C = case["R"] + case["P"]
    prefix_len, n_slots = _lengths(case)
    page_table, pool = scattered_pages(rng, prefix_len * 0, -(-prefix_len // page))
    if case["ragged"]:
        page_table[prefix_len >= page, 0] = page_table[0, 0]
    pages = normal(rng, (pool, page, C), dtype)
    pages[~live_positions(page_table, prefix_len, pool, page)] = poison(rng, C, dtype)
    dead = np.arange(T) >= n_slots[:, None]  # [B, T]
    tree_kv = normal(rng, (B, T, C), dtype)
    tree_kv[dead] = poison(rng, C, dtype)
    q = normal(rng, (B, T, H, C), dtype)
    q[dead] = poison(rng, C, dtype)
    return {
        "q": q,
        "pages": pages,
        "page_table": page_table,
        "prefix_len": prefix_len,
        "tree_kv": tree_kv,
        "ancestors": _ancestors(rng, case["tree"], T, n_slots),
        "n_slots": n_slots,
        "scale": 1.5 / C**0.5,  # scores of deviation 1.5: neither uniform weights nor a single one
        "value_dim": case["R"],
    }


def check(case: Case, inputs: dict[str, Any]) -> None:
    q, pages, table = (inputs[k] for k in ("q", "pages", "page_table"))
    require(q.ndim == 4, f"`q`: expected [B, T, H, C], got shape {q.shape}")
    B, T, _, C = q.shape
    require(pages.ndim == 3 and pages.shape[2] == C, f"`pages`: expected [n, page, {C}], got {pages.shape}")
    n_pages, page = pages.shape[:2]
    require(page in PAGE_SIZES, f"`pages`: page size must be one of {PAGE_SIZES}, got {page}")
    require(table.ndim == 2 and len(table) == B, f"`page_table`: expected [{B}, M], got {table.shape}")
    expected = {"tree_kv": (B, T, C), "ancestors": (B, T, n_words(T)), "prefix_len": (B,), "n_slots": (B,)}
    for name, shape in expected.items():
        require(inputs[name].shape == shape, f"`{name}`: expected {shape}, got {inputs[name].shape}")
    for name, dtype in (("page_table", "int32"), ("prefix_len", "int32"), ("n_slots", "int32")):
        require(inputs[name].dtype == dtype, f"`{name}`: expected {dtype}, got {inputs[name].dtype}")
    require(
        inputs["ancestors"].dtype == "int64", f"`ancestors`: expected int64, got {inputs['ancestors'].dtype}"
    )
    require(0 < inputs["value_dim"] <= C, f"`value_dim`: must be in 1..{C}, got {inputs['value_dim']}")
    for b in range(B):
        prefix, n = int(inputs["prefix_len"][b]), int(inputs["n_slots"][b])
        most = table.shape[1] * page
        require(0 <= prefix <= most, f"`prefix_len` row {b}: must be in 0..{most}, got {prefix}")
        require(0 <= n <= T, f"`n_slots` row {b}: must be in 0..{T}, got {n}")
        used = table[b, : -(-prefix // page)]
        bad = used[(used < 0) | (used >= n_pages)]
        require(not len(bad), f"`page_table` row {b}: page must be in 0..{n_pages - 1}, got {bad[:1]}")


def flops(case: Case) -> int:
    """Every live slot against the prefix and the whole tree, which its ancestors are at most."""
    prefix_len, n_slots = (a.astype(np.int64) for a in _lengths(case))
    pairs = int((n_slots * (prefix_len + n_slots)).sum())
    return int(2 * case["H"] * (2 * case["R"] + case["P"]) * pairs)


def bytes_moved(case: Case) -> int:
    """Each row's latents once (shared pages once per row), q, o and lse."""
    prefix_len, n_slots = _lengths(case)
    R, C, size = case["R"], case["R"] + case["P"], ITEM_SIZE[case["dtype"]]
    latents = int(prefix_len.sum() + n_slots.sum()) * C
    rows = case["B"] * case["T"] * case["H"]
    return int(size * (latents + rows * (C + R)) + (8 if size == 8 else 4) * rows)


def compare(case: Case, got: Any, want: Any) -> None:
    for name, g, w, (rtol, atol) in zip(("o", "lse"), got, want, TOLERANCE[case["dtype"]], strict=True):
        compare_close(name, g, w, rtol, atol)


def _lengths(case: Case) -> tuple[np.ndarray, np.ndarray]:
    B, T, prefix = case["B"], case["T"], case["prefix"]
    prefix_len, n_slots = np.full(B, prefix, np.int32), np.full(B, T, np.int32)
    if case["ragged"]:
        prefix_len[:] = np.minimum(np.resize(RAGGED_PREFIX, B), prefix)
        n_slots[:] = np.minimum(np.resize((T, T // 2, 1, T - 1, 0, T, 17, 3), B), T)
    return prefix_len, n_slots


def _ancestors(rng: np.random.Generator, kind: str, T: int, n_slots: np.ndarray) -> np.ndarray:
    """Bits of trees of the given kind; all bits that must be ignored are set."""
    B = len(n_slots)
    before = np.arange(T) - 1
    parents = np.broadcast_to(np.minimum(before, 0) if kind == "star" else before, (B, T))
    if kind == "random":
        parents = np.where(
            rng.random((B, T)) < 0.4, before, rng.integers(0, np.maximum(np.arange(T), 1), (B, T))
        )
    tree = from_parents(np.zeros((B, T)), parents, np.maximum(n_slots, 1))
    bits = tree.ancestors.view(np.uint64).copy()
    for b, n in enumerate(n_slots.tolist()):
        for j in range(n, bits.shape[2] * 64):
            bits[b, :, j // 64] |= np.uint64(1) << np.uint64(j % 64)
        bits[b, n:] = ~np.uint64(0)
    return np.asarray(bits.view(np.int64))
