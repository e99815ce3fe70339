"""The implementation is chosen once, with a reason; one asked for by name is had or refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftwood.kernels import KERNELS, KernelUnavailableError, load_kernels
from draftwood.kernels.registry import choose, for_array, load


def test_a_cpu_gets_torch_for_every_kernel():
    kernels = load_kernels("cpu")
    assert [c.kernel for c in kernels.choices] == list(KERNELS)
    assert {c.impl for c in kernels.choices} == {"torch"}
    assert all(getattr(kernels, c.kernel) is c.function for c in kernels.choices)


def test_asked_for_by_name():
    choice = next(c for c in load_kernels("cpu", {"moe": "torch"}).choices if c.kernel == "moe")
    assert choice.reason == "asked for by name"


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ({"attention": "torch"}, "unknown kernel `attention`"),
        ({"moe": "cuda"}, "unknown implementation `cuda` for kernel `moe`"),
        ({"moe": "ref"}, "the reference takes numpy arrays"),
    ],
)
def test_what_cannot_be_had_is_refused(requested, message):
    with pytest.raises(KernelUnavailableError, match=message):
        load_kernels("cpu", requested)


def test_a_module_that_fails_to_import_is_an_error_not_a_fallback(monkeypatch):
    def broken(name):
        raise ImportError("no driver")

    load.cache_clear()
    monkeypatch.setattr("draftwood.kernels.registry.import_module", broken)
    with pytest.raises(
        KernelUnavailableError, match="`topk_logprobs`, implementation `torch` cannot load: no driver"
    ):
        load_kernels("cpu")


def test_unknown_device():
    with pytest.raises(KernelUnavailableError, match="unknown device `tpu`"):
        choose("moe", "tpu")


def test_direct_calls_follow_the_array():
    assert for_array("moe", np.zeros(1)) is load("moe", "ref")
    assert for_array("moe", torch.zeros(1)) is load("moe", "torch")
