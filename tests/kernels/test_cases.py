"""Every implementation of every kernel against the reference, over every small case."""

from __future__ import annotations

import pytest
import torch

from draftwood.kernels.registry import IMPLEMENTATIONS, KERNELS, exists
from draftwood.kernels.run_case import cases_of, verify

PRODUCTS = ("verify_attn", "draft_attn", "moe", "moe_int4", "linear")
"""Kernels made of matrix products, which Triton offers in no float64."""


def dtype_of(case):
    return dict(case.axes).get("dtype")


INTERPRETED = {
    "topk_logprobs": lambda c: c["dtype"] == "float32" or (c["values"] == "holes" and not c["coupled"]),
    "tree_build": lambda c: c["T"] < 64 or c["values"] == "ties",
    "tree_accept": lambda c: c["T"] < 128,
    "verify_attn": lambda c: c["T"] not in (31, 32, 63, 127, 129) and c["prefix"] not in (16, 63),
    "draft_attn": lambda c: c["B"] == 1 or c["dtype"] == "float16" or c["page"] != 32,
    "moe_int4": lambda c: c["N"] < 32 or (c["N"] == 32 and c["dtype"] == "float32" and not c["ties"]),
    "sample": lambda c: (c["values"] != "normal" and c["T"] < 9) or (c["extras"] == "all" and c["T"] == 9),
}
"""Which cases Triton's interpreter, which takes a millisecond for what a GPU does in one cycle, runs: no kind is left out."""


FIXED = {
    "verify_attn": lambda c: c["T"] < 9 or (c["T"], c["B"]) == (9, 1),
    "moe": lambda c: c["N"] in (1, 5, 9) or (c["N"] == 33 and c["dtype"] == "float16"),
    "moe_int4": lambda c: c["N"] in (1, 3, 33),
}
"""The same for `triton_fixed`, whose slots share nothing and take longer."""


def affordable(case, impl):
    if not impl.startswith("triton") or torch.cuda.is_available():
        return True
    return (FIXED if impl == "triton_fixed" else INTERPRETED).get(case.kernel, lambda c: True)(case)


def offered(case, impl):
    if impl in ("gluon", "cuda", "hopper", "flash_mla"):  # Hopper's alone: test_gpu.py, test_flash_mla.py
        return False
    return not impl.startswith("triton") or case.kernel not in PRODUCTS or dtype_of(case) != "float64"


SMALL = [
    pytest.param(case, impl, id=f"{impl}-{case.id}")
    for kernel in KERNELS
    for impl in IMPLEMENTATIONS
    if impl != "ref" and exists(kernel, impl)
    for case in cases_of(kernel).small()
    if offered(case, impl) and affordable(case, impl)
]


@pytest.mark.parametrize(("case", "impl"), SMALL)
def test_agrees_with_reference(case, impl):
    on_gpu = impl.startswith("triton") and torch.cuda.is_available()
    if impl.startswith("triton") and not on_gpu and case.kernel in PRODUCTS and dtype_of(case) == "bfloat16":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 numbers")
    verify(case, impl, "cuda" if on_gpu else "cpu")


@pytest.mark.parametrize("kernel", [k for k in PRODUCTS if exists(k, "triton")])
def test_triton_refuses_float64_products(kernel):
    case = next(c for c in cases_of(kernel).small() if dtype_of(c) == "float64")
    with pytest.raises(TypeError, match="float64"):
        verify(case, "triton")


@pytest.mark.parametrize("kernel", KERNELS)
def test_bench_cases_have_work_models(kernel):
    cases = cases_of(kernel)
    bench = cases.bench()
    assert bench
    assert len({c.id for c in bench}) == len(bench)
    for case in [*cases.small(), *bench]:
        assert cases.bytes_moved(case) > 0
        assert cases.flops(case) >= 0
        assert cases.CACHE in ("cold", "warm")
