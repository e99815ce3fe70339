"""On a GPU: all implementations, at real sizes, on data that is new in every run, and inside CUDA graphs.

`-m sanitizer` selects few and small cases, for `compute-sanitizer`, which slows kernels down by ten to a hundred times.
"""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch

from draftwood.kernels.case import make_case
from draftwood.kernels.chip import chip_of
from draftwood.kernels.registry import KERNELS, exists, load
from draftwood.kernels.run_case import (
    cases_of,
    outputs,
    poisoned_memory,
    refused,
    run,
    to_numpy,
    torch_inputs,
    verify,
)
from draftwood.kernels.verify_attn import for_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FULL_VOCABULARY = 163840

LARGE = {
    "topk_logprobs": [
        *(
            {"B": 2, "V": FULL_VOCABULARY, "coupled": coupled, "values": values}
            for coupled in (0, 1)
            for values in ("normal", "ties", "holes")
        ),
        *({"B": 3, "D": 15, "V": FULL_VOCABULARY, "coupled": c, "dtype": "bfloat16"} for c in (0, 1)),
        *({"B": 2, "D": 3, "V": V, "k": k} for V in (9999, 32000, FULL_VOCABULARY) for k in (1, 7, 64, 300)),
        *({"B": 2, "D": 3, "V": 9999, "k": k, "coupled": 1} for k in (1, 5, 64, 256, 300)),
    ],
    "tree_build": [
        *({"B": 5, "T": T, "values": values} for T in range(1, 131) for values in ("random", "ties")),
        *({"B": 64, "D": 15, "K": K, "T": T} for K in (1, 7, 64) for T in (64, 128, 256)),
        *({"B": 64, "D": 15, "K": 64, "T": 128, "values": v} for v in ("chain", "thin", "floor", "faulty")),
    ],
    "sample": [
        *(
            {"B": 12, "T": 3, "V": V, "rows": "mixed", "values": values}
            for V in (4095, 4097, FULL_VOCABULARY)
            for values in ("normal", "ties", "holes")
        ),
        *({"B": 2, "T": 8, "V": FULL_VOCABULARY, "rows": rows} for rows in ("top_k", "top_p", "all")),
        {"B": 6, "T": 4, "V": FULL_VOCABULARY, "rows": "mixed", "extras": "all", "tree": 1},
        {"B": 6, "T": 130, "V": 700, "rows": "mixed", "extras": "all", "values": "ties", "tree": 1},
    ],
    "tree_accept": [
        *(
            {"B": 16, "T": T, "D": 15, "tree": tree, "limits": "near"}
            for T in range(1, 131)
            for tree in ("random", "garbage")
        ),
        *({"B": 8, "T": 128, "S": S, "D": 31, "hit": 1.0} for S in (0, 1, 7, 8, 9, 40)),
    ],
    "commit_kv": [
        *(
            {"B": 8, "T": T, "page": page, "ragged": 1, "skip": skip}
            for T in (8, 64, 130)
            for page in (16, 64)
            for skip in (0, 1)
        ),
        {"L": 3, "B": 2, "C": 5000, "page": 16, "dtype": "float32"},
    ],
    "verify_attn": [
        *(
            {"B": 4, "T": T, "H": 2, "R": 64, "P": 16, "prefix": 130, "ragged": 1, "dtype": "float32"}
            for T in range(1, 131)
        ),
        *(
            {"B": 4, "T": T, "H": H, "page": page, "prefix": 130, "ragged": 1}
            for T, H in ((9, 1), (33, 8), (65, 16), (9, 64), (3, 128), (130, 8))
            for page in (16, 32, 64)
        ),
        *(
            {"B": 14, "T": 9, "H": 8, "prefix": 65536, "ragged": 1, "dtype": dtype}
            for dtype in ("bfloat16", "float16", "float32")
        ),
        *(
            {"B": 3, "T": 33, "H": 8, "R": R, "P": P, "prefix": 200, "ragged": 1}
            for R, P in ((128, 16), (500, 30), (1024, 64), (64, 0), (40, 8))
        ),
        *({"B": 2, "T": 40, "H": 64, "prefix": 1000, "tree": tree} for tree in ("chain", "star", "random")),
        {"B": 8, "T": 33, "H": 64, "prefix": 4096},
        *(
            {
                "B": B,
                "T": T,
                "H": H,
                "prefix": prefix,
            }  # whole tiles, tiles of 2 or 3, of 4, and of 17 programs
            for B, T, H, prefix in ((1, 65, 64, 30), (8, 9, 64, 1100), (4, 9, 64, 1024), (1, 9, 8, 1024))
        ),
        *(
            {"B": B, "T": T, "H": H, "prefix": prefix}  # clusters of every size, tiles of 16 and of 32 rows
            for B, T, H, prefix in (
                *((1, 8, 8, 64 * blocks) for blocks in (0, 2, 5, 16, 40)),
                *((1, 32, 8, 64 * blocks) for blocks in (3, 17, 40)),
                *((B, 32, 8, 1000) for B in (3, 4)),
            )
        ),
    ],
    "draft_attn": [
        *(
            {"B": 9, "S": S, "Hq": Hq, "Hkv": Hkv, "hd": hd, "page": page, "context": 300, "ragged": 1}
            for S, Hq, Hkv, hd in ((8, 64, 8, 128), (1, 8, 8, 64), (16, 32, 1, 80), (7, 12, 4, 256))
            for page in (16, 32, 64)
        ),
        *(
            {"B": 9, "context": 4097, "ragged": 1, "window": window, "causal": causal, "dtype": dtype}
            for window in (0, 1, 65, 2048)
            for causal in (0, 1)
            for dtype in ("bfloat16", "float32")
        ),
        *({"B": B, "context": 65536, "dtype": dtype} for B, dtype in ((2, "bfloat16"), (1, "float16"))),
    ],
    "moe": [
        *({"N": N, "dtype": dtype} for N, dtype in ((1, "bfloat16"), (33, "float16"), (8, "float32"))),
        *({"N": N, "E": 384, "d": 512, "I": 256} for N in (1, 17, 64, 300)),
        *({"N": N, "E": 256, "d": 256, "I": 128, "n_group": 8, "topk_group": 4} for N in (3, 129)),
        *({"N": N, "E": 32, "d": 128, "I": 64, "ties": 1} for N in (2, 40)),
        *({"N": N, "E": 8, "top_k": 2, "d": 200, "I": 72} for N in (5, 1000)),
    ],
    "moe_int4": [
        *({"N": N, "E": 16, "I": I} for N, I in ((1, 256), (1, 2048), (9, 512))),
        *({"N": N, "E": 384, "d": 512} for N in (1, 17, 300, 600, 1200)),  # tiles of 8, 16, 32 and 64 pairs
        *(
            {"N": N, "E": 8, "top_k": 2, "d": 160, "I": 96, "dtype": dtype}
            for N in (1, 5, 200)
            for dtype in ("bfloat16", "float16", "float32")
        ),
        {"N": 129, "E": 256, "d": 256, "I": 128, "n_group": 8, "topk_group": 4},
        {"N": 40, "E": 32, "d": 128, "I": 64, "ties": 1},
    ],
    "linear": [
        *({"N": N, "dtype": d} for N in (1, 33) for d in ("bfloat16", "float16", "float32")),
        *({"N": N, "K": 2048, "M": FULL_VOCABULARY} for N in (1, 65)),
        *({"G": 64, "N": N, "K": 128, "M": 512} for N in (1, 130)),
        *(
            {"N": 130, "K": K, "M": M, "dtype": d}
            for K, M in ((257, 131), (64, 1))
            for d in ("bfloat16", "float32")
        ),
    ],
    "add_rms_norm": [
        *(
            {"N": N, "d": d, "addends": addends}
            for N in (1, 130)
            for d in (384, 7168)
            for addends in (0, 1, 2)
        ),
        *({"N": 9, "d": d, "dtype": dtype} for d in (1, 1001) for dtype in ("float64", "float32", "float16")),
        {"N": 70000, "d": 64},
    ],
    "mla_inputs": [
        *({"N": N, "H": H} for N in (1, 33, 130) for H in (8, 64)),
        {"N": 33, "H": 8, "R": 128, "P": 16},
        *({"N": 9, "H": 3, "R": 500, "P": 30, "dtype": d} for d in ("float64", "float32", "float16")),
    ],
    "silu_mul": [
        *({"N": N, "I": I} for N in (1, 130) for I in (224, 2048, 18432)),
        *({"N": 9, "I": 1001, "values": "large", "dtype": d} for d in ("float64", "float32", "float16")),
    ],
    "qk_norm_rope": [
        *({"L": L, "N": N, "Hq": Hq} for L, Hq in ((1, 64), (6, 0)) for N in (1, 8, 130)),
        *({"N": 9, "Hq": 8, "Hkv": 4, "hd": hd} for hd in (48, 80, 256)),
        *({"N": 9, "hd": 30, "dtype": d} for d in ("float64", "float32", "float16")),
    ],
    "rotary": [
        {"N": N, "dim": dim, "last": 2**24, "amplitude": 1.3, "dtype": dtype}
        for N, dim in ((1, 64), (130, 16), (4096, 128))
        for dtype in ("float32", "float64")
    ]
    + [{"N": 96, "B": 3, "dim": 64}],
    "embed": [{"N": N, "block": block, "d": d} for N, block in ((1, 8), (130, 1)) for d in (384, 7168)],
    "path_features": [{"B": B, "K": K, "d": d} for B, K in ((1, 4), (9, 6)) for d in (384, 7168)],
    "keep_features": [{"B": B, "F": F} for B, F in ((1, 4 * 384), (9, 6 * 7168))],
    "advance": [{"B": B, "T": T} for B, T in ((1, 32), (33, 130))],
}


FIXED = {
    "verify_attn": [
        *(
            {"B": 4, "T": T, "H": 2, "R": 64, "P": 16, "prefix": 130, "ragged": 1, "dtype": "float32"}
            for T in (1, 64, 130)
        ),
        *(
            {"B": 4, "T": T, "H": H, "page": page, "prefix": 1500, "ragged": 1, "dtype": dtype}
            for T, H, page, dtype in (
                (9, 1, 16, "bfloat16"),
                (33, 8, 64, "float16"),
                (17, 64, 32, "bfloat16"),
                (5, 8, 64, "float32"),
            )
        ),
        {"B": 2, "T": 256, "H": 8, "prefix": 300, "tree": "chain"},
        {"B": 8, "T": 64, "H": 64, "prefix": 16384, "ragged": 1},
    ],
    "moe": [
        *({"N": N, "dtype": dtype} for N, dtype in ((1, "bfloat16"), (33, "float16"), (8, "float32"))),
        *({"N": N, "E": 384, "d": 512, "I": 256} for N in (1, 300)),
        {"N": 129, "E": 256, "d": 256, "I": 128, "n_group": 8, "topk_group": 4},
    ],
    "moe_int4": [
        *(
            {"N": N, "E": 64, "d": 512, "I": 256, "dtype": d}
            for N in (1, 33, 300)
            for d in ("bfloat16", "float32")
        ),
    ],
}
"""Of deterministic mode: in several splits and launches, and with more tokens than tiles are chosen for."""

PRODUCTS = ("verify_attn", "draft_attn", "moe", "moe_int4", "linear")
"""Offered in no float64."""

SANITIZED = {
    "topk_logprobs": [
        {"B": 2, "D": 2, "V": 9999, "k": 9, "coupled": 1, "values": "holes"},
        {"D": 1, "V": 131, "k": 131},
    ],
    "tree_build": [{"B": 6, "K": 16, "T": 65, "values": "faulty"}, {"B": 2, "D": 1, "K": 1, "T": 130}],
    "sample": [
        {"B": 6, "T": 3, "V": 4097, "rows": "mixed", "extras": "all", "tree": 1},
        {"B": 2, "T": 1, "V": 331, "rows": "top_p", "values": "ties"},
    ],
    "tree_accept": [{"B": 16, "T": T, "D": 15, "tree": "garbage", "limits": "near"} for T in (65, 130)],
    "commit_kv": [{"L": 3, "B": 8, "T": 65, "C": 40, "page": 16, "prefix": 200, "ragged": 1, "skip": 1}],
    "verify_attn": [
        {"B": 9, "T": 33, "H": 8, "page": 16, "prefix": 130, "ragged": 1},
        {"B": 9, "T": 9, "H": 2, "R": 40, "P": 8, "page": 64, "prefix": 130, "ragged": 1, "dtype": "float32"},
    ],
    "draft_attn": [{"B": 9, "page": 16, "context": 300, "ragged": 1, "window": 65}],
    "moe": [{"N": 9, "E": 16, "top_k": 4, "d": 200, "I": 72}, {"N": 1, "E": 1, "top_k": 1, "d": 1, "I": 1}],
    "moe_int4": [{"N": N, "E": 16, "top_k": 4, "d": 160, "I": 96} for N in (1, 9)],
    "linear": [{"N": 35, "K": 257, "M": 131}, {"G": 3, "N": 1, "K": 33, "M": 7, "dtype": "float32"}],
    "add_rms_norm": [{"N": 3, "d": 131}, {"N": 2, "d": 384, "addends": 0}],
    "mla_inputs": [{"N": 3, "H": 5, "R": 70, "P": 6}],
    "silu_mul": [{"N": 3, "I": 131}],
    "qk_norm_rope": [{"L": 2, "N": 3, "Hq": 3, "Hkv": 2, "hd": 6}, {"N": 3, "Hq": 0, "hd": 48}],
    "rotary": [{"N": 5, "dim": 10}, {"N": 6, "B": 2, "dim": 10}],
    "embed": [{"N": 3, "V": 7, "d": 131, "block": 3}],
    "path_features": [{"K": 2, "B": 2, "T": 5, "S": 3, "d": 131}],
    "keep_features": [{"B": 3, "R": 2, "F": 131}],
    "advance": [{"B": 3, "D": 2, "T": 33}],
}
"""Ragged edges and garbage, where a wrong mask would reach outside."""


CAPABILITY = chip_of(torch.device("cuda")).capability if torch.cuda.is_available() else 90


EVERY_IMPL = ("triton", "gluon", "cuda", "hopper")


def served(cases, impls=EVERY_IMPL[:-1]):
    """Each case with the implementations made for GPUs that serve it here; `hopper` only chooses between two others."""
    return [
        (case, impl)
        for case in cases
        for impl in impls
        if exists(case.kernel, impl) and not refused(case, impl, CAPABILITY)
    ]


def cases_with(axes_of):
    return [
        make_case(kernel, cases_of(kernel).DEFAULTS, **axes) for kernel in axes_of for axes in axes_of[kernel]
    ]


def offered(case):
    return case.kernel not in PRODUCTS or dict(case.axes).get("dtype") != "float64"


def case_id(value):
    return value if isinstance(value, str) else value.id


@pytest.mark.parametrize("case", [c for kernel in KERNELS for c in cases_of(kernel).small()], ids=case_id)
def test_torch_on_the_gpu(case):
    verify(case, "torch", "cuda")


@pytest.mark.sanitizer
@pytest.mark.parametrize(("case", "impl"), served(cases_with(SANITIZED)), ids=case_id)
def test_edges(case, impl):
    verify(case, impl, "cuda")


@pytest.mark.parametrize(("case", "impl"), served(cases_with(LARGE)), ids=case_id)
def test_large_cases_on_new_data(case, impl):
    case = replace(case, seed=secrets.randbelow(2**31))
    print(case.id)
    verify(case, impl, "cuda")


@pytest.mark.parametrize(
    ("case", "impl"),
    served(
        cases_with({"verify_attn": [{"B": 3, "T": 9, "H": 8, "prefix": 200, "page": p} for p in (16, 64)]})
    ),
    ids=case_id,
)
def test_attention_of_what_is_out_of_range_or_nan_spoils_its_own_row_only(case, impl):
    inputs = cases_of(case.kernel).make(case)
    clean = run(case, inputs, impl, "cuda")
    spoilt = [{**inputs, "pages": np.array(inputs["pages"])}]
    spoilt[0]["pages"][inputs["page_table"][1, 1], 3] = np.nan
    for value in (-5, 2**31 - 1):
        table, lengths, slots = (np.array(inputs[k]) for k in ("page_table", "prefix_len", "n_slots"))
        table[1, ::2], lengths[1], slots[1] = value, value, value
        spoilt.append({**inputs, "page_table": table, "prefix_len": lengths, "n_slots": slots})
    for changed in spoilt:
        for was, now in zip(clean, run(case, changed, impl, "cuda"), strict=True):
            np.testing.assert_allclose(now[::2], was[::2], rtol=2**-7, atol=8e-3)  # cut elsewhere


@pytest.mark.parametrize("cluster", [1, 2, 3, 6, 9, 12])
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_attention_in_tiles_and_clusters_of_any_size(rows, cluster, monkeypatch):
    """Whatever the rule for few tiles chooses; more ranks than blocks of keys, and up to ten for each."""
    cases = cases_with(
        {
            "verify_attn": [
                {"B": 14, "T": 9, "H": 8, "prefix": 64 * 10 * cluster, "ragged": 1},
                {"B": 5, "T": 70, "H": 5, "prefix": 130, "page": 16, "ragged": 1},
                {"B": 1, "T": 33, "H": 64, "prefix": 0},
            ]
        }
    )
    if not served(cases[:1], ["cuda"]):
        pytest.skip("needs Hopper and the package cuda-bindings")
    from draftwood.kernels.verify_attn import cuda_impl, cuda_tile

    def tile_of(B, n, keys, device):
        return cuda_tile.Tile(rows, cluster, B * -(-n // rows), -(-keys // 64), True)

    monkeypatch.setattr(cuda_impl, "tile_of", tile_of)
    for case in cases:
        verify(case, "cuda", "cuda")


@pytest.mark.parametrize("case", cases_with(FIXED), ids=case_id)
def test_fixed_kernels_on_new_data(case):
    case = replace(case, seed=secrets.randbelow(2**31))
    print(case.id)
    verify(case, "triton_fixed", "cuda")


@pytest.mark.parametrize(
    ("case", "impl"),
    served(
        [
            *(c for kernel in LARGE for c in cases_of(kernel).small() if offered(c)),
            *cases_with({"verify_attn": [{"B": B, "T": 17, "H": 8, "prefix": 1000} for B in (1, 4)]}),
        ]
    ),
    ids=case_id,
)
def test_a_graph_replays_with_changed_contents(case, impl):
    replays([case], impl)


@pytest.mark.parametrize(
    ("case", "impl"),
    served(
        cases_with(
            {"verify_attn": [{"B": B, "T": 17, "H": 8, "prefix": 1000, "ragged": 1} for B in (1, 14)]}
        ),
        EVERY_IMPL,
    ),
    ids=case_id,
)
def test_layers_of_a_pass_take_turns_in_a_graph(case, impl):
    """They share what is prepared, and one's partial results are the next one's workspace."""
    inputs = torch_inputs(case, cases_of(case.kernel).make(case), "cuda")
    shared = [inputs[k] for k in ("page_table", "prefix_len", "ancestors", "n_slots")]
    queries = [inputs["q"] * factor for factor in (1, -1, 0.5)]

    def forward():
        layer = for_layers(load(case.kernel, impl), *shared, case["page"])
        own = [inputs[k] for k in ("pages", "tree_kv", "scale")]
        return [layer(q, *own, value_dim=inputs["value_dim"]) for q in queries]

    want = [load(case.kernel, "torch")(**{**inputs, "q": q}) for q in queries]
    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = forward()
    for _ in range(3):
        graph.replay()
        for out, (o, lse) in zip(outs, want, strict=True):
            cases_of(case.kernel).compare(case, to_numpy((out, lse)), to_numpy((o, lse)))


@pytest.mark.parametrize(
    ("case", "impl"),
    served(
        cases_with({"verify_attn": [{"B": B, "T": 17, "H": 8, "prefix": 1000} for B in (1, 64)]}), EVERY_IMPL
    ),
    ids=case_id,
)
def test_attention_in_a_thread_where_nothing_was_launched(case, impl):
    """Such a thread has no context yet, and memory that was freed before gives it none."""
    inputs = torch_inputs(case, cases_of(case.kernel).make(case), "cuda")
    want = to_numpy(load(case.kernel, impl)(**inputs))
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(load(case.kernel, impl), **inputs).result()
    cases_of(case.kernel).compare(case, to_numpy(got), want)


def test_all_kernels_in_one_graph():
    replays([next(filter(offered, cases_of(kernel).small())) for kernel in LARGE])


@pytest.mark.parametrize(
    "case", [c for kernel in FIXED for c in cases_of(kernel).small() if offered(c)], ids=case_id
)
def test_fixed_kernels_in_a_graph(case):
    replays([case], "triton_fixed")


@pytest.mark.parametrize("impl", ["torch", "torch_fixed"])
@pytest.mark.parametrize("N", [1, 40])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int4_experts_in_torch_in_a_graph(N, dtype, impl):
    """Both of its ways: pair by pair, and through all experts."""
    narrow = {"E": 16, "top_k": 4, "d": 96, "I": 64}
    replays([make_case("moe_int4", cases_of("moe_int4").DEFAULTS, N=N, dtype=dtype, **narrow)], impl)


def replays(cases, impl="triton"):
    """Captured on one input; so nothing waits for the device, and nothing it reads is fixed at capture."""
    changed = [replace(c, seed=secrets.randbelow(2**31)) for c in cases]
    print(*(c.id for c in changed))
    made = {c: cases_of(c.kernel).make(c) for c in (*cases, *changed)}
    static = [torch_inputs(c, made[c], "cuda") for c in cases]

    def call():
        return [load(c.kernel, impl)(**inputs) for c, inputs in zip(cases, static, strict=True)]

    call()  # compiles
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(warm_up):
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with poisoned_memory(), torch.cuda.graph(graph):
        outs = call()
    for contents in (changed, cases):
        for inputs, c in zip(static, contents, strict=True):
            for to, new in zip(tensors(inputs), tensors(torch_inputs(c, made[c], "cuda")), strict=True):
                to.copy_(new)
        graph.replay()
        for inputs, out, c in zip(static, outs, contents, strict=True):
            got = to_numpy(outputs(c.kernel, inputs, out))
            cases_of(c.kernel).compare(c, got, run(c, made[c], "ref"))


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from tensors(v)
    elif is_dataclass(value):
        for f in fields(value):
            yield from tensors(getattr(value, f.name))
