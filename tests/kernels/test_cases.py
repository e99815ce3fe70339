"""Every implementation of every kernel against the reference, over every small case."""

from __future__ import annotations

import pytest

from draftwood.kernels.registry import IMPLEMENTATIONS, KERNELS, exists
from draftwood.kernels.run_case import cases_of, verify

SMALL = [
    pytest.param(case, impl, id=f"{impl}-{case.id}")
    for kernel in KERNELS
    for impl in IMPLEMENTATIONS
    if impl != "ref" and exists(kernel, impl)
    for case in cases_of(kernel).small()
]


@pytest.mark.parametrize(("case", "impl"), SMALL)
def test_agrees_with_reference(case, impl):
    verify(case, impl)


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
