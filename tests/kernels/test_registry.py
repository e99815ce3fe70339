"""The implementation is chosen once, with a reason; one asked for by name is had or refused."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from draftwood.kernels import KERNELS, KernelUnavailableError, load_kernels, specialised
from draftwood.kernels.registry import choose, for_array, load
from draftwood.kernels.run_case import cases_of, torch_inputs
from draftwood.kernels.specialised import Use, refusal
from draftwood.kernels.verify_attn import verify_attn


def test_a_cpu_gets_torch_for_every_kernel():
    kernels = load_kernels("cpu")
    assert [c.kernel for c in kernels.choices] == list(KERNELS)
    assert {c.impl for c in kernels.choices} == {"torch"}
    assert all(getattr(kernels, c.kernel) is c.function for c in kernels.choices)


KIMI = Use(90, "bfloat16", 512, 64, 64)


def test_hopper_gets_its_own_attention_for_what_that_is_made_for(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(specialised, "_version", {"triton": "3.6"}.get)
    chosen = load_kernels("cuda", use=KIMI)
    assert chosen.choices[KERNELS.index("verify_attn")].impl == "gluon"
    assert (
        "hopper is cuda or gluon by shape, and cuda needs the package"
        in chosen.choices[KERNELS.index("verify_attn")].reason
    )
    assert chosen.verify_attn is load("verify_attn", "gluon")
    assert choose("verify_attn", "cuda", deterministic=True, use=KIMI).impl == "triton_fixed"
    assert choose("verify_attn", "cuda").impl == "triton"


def test_attention_by_shape_where_both_of_its_kernels_can_be_had(monkeypatch):
    monkeypatch.setattr(specialised, "_version", {"triton": "3.6", "cuda-bindings": "13.0"}.get)
    monkeypatch.setattr(specialised, "_missing_compiler", lambda: None)
    monkeypatch.setattr("draftwood.kernels.registry.load", lambda kernel, impl: impl)
    choice = choose("verify_attn", "cuda", use=KIMI)
    assert (choice.impl, choice.function) == ("hopper", "hopper")
    assert choice.reason.endswith("few tiles in CUDA C++, others in Gluon")
    assert choose("verify_attn", "cuda", "cuda", use=KIMI).impl == "cuda"


@pytest.mark.parametrize(
    ("version", "reason"),
    [(RuntimeError("libnvrtc.so not found"), "libnvrtc.so not found"), ((7, 0, 0), "7"), ((0, 13, 0), None)],
)
def test_bindings_without_their_compiler_are_not_enough(monkeypatch, version, reason):
    pytest.importorskip("triton")

    class Compiler:
        def nvrtcVersion(self):  # noqa: N802 - NVIDIA's name
            if isinstance(version, Exception):
                raise version
            return version

    monkeypatch.setattr(specialised, "_version", {"triton": "3.6", "cuda-bindings": "13.0"}.get)
    monkeypatch.setattr(specialised, "_missing_compiler", specialised._missing_compiler.__wrapped__)
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["cuda.bindings"].nvrtc = Compiler()
    refused = refusal("verify_attn", "cuda", KIMI)
    assert refused == (None if reason is None else f"needs NVRTC: {reason}")
    if reason is not None:
        choice = choose("verify_attn", "cuda", use=KIMI)
        assert choice.impl == "gluon"
        assert f"and cuda needs NVRTC: {reason}" in choice.reason


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (replace(KIMI, capability=100), "needs compute capability 9.0, this is 10.0"),
        (replace(KIMI, dtype="float32"), "takes bfloat16, not float32"),
        (replace(KIMI, value_dim=128, rope_dim=16), r"takes latents of 512 \+ 64, not 128 \+ 16"),
        (replace(KIMI, page=8), "takes pages of 16, 32 and 64, not 8"),
    ],
)
def test_other_uses_go_to_the_portable_kernel_and_it_is_said_why(use, reason, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(specialised, "_version", {"triton": "3.6", "cuda-bindings": "13.0"}.get)
    choice = choose("verify_attn", "cuda", use=use)
    assert choice.impl == "triton"
    assert re.search(f"hopper is cuda or gluon by shape, and cuda {reason}", choice.reason)
    assert re.search(f"gluon {reason}", choice.reason)
    with pytest.raises(KernelUnavailableError, match=f"implementation `gluon` {reason}"):
        choose("verify_attn", "cuda", "gluon", use=use)


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_made_of_torch_operations_is_not_recorded(deterministic):
    pytest.importorskip("triton")
    assert load_kernels("cuda", deterministic=deterministic).recordable
    for impl in ("torch_fixed",) if deterministic else ("torch", "torch_fixed"):
        assert not load_kernels("cuda", {"verify_attn": impl}, deterministic=deterministic).recordable


def test_attention_of_another_triton(monkeypatch):
    monkeypatch.setattr(specialised, "_version", {"triton": "3.8", "cuda-bindings": "13.0"}.get)
    monkeypatch.setattr(specialised, "_missing_compiler", lambda: None)
    assert "this is 3.8" in refusal("verify_attn", "gluon", KIMI)
    assert "gluon is written for Triton 3.6" in refusal("verify_attn", "hopper", KIMI)
    assert refusal("verify_attn", "cuda", KIMI) is None


def test_what_is_not_for_this_chip_refuses_a_direct_call():
    pytest.importorskip("triton")
    case = next(c for c in cases_of("verify_attn").small() if c["dtype"] == "bfloat16" and c["R"] == 512)
    inputs = torch_inputs(case, cases_of("verify_attn").make(case), "cpu")
    with pytest.raises(NotImplementedError, match=r"needs compute capability 9.0, this is 8.0"):
        verify_attn(**inputs, impl="gluon")


def test_asked_for_by_name():
    choice = next(c for c in load_kernels("cpu", {"moe": "torch"}).choices if c.kernel == "moe")
    assert choice.reason == "asked for by name"


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ({"attention": "torch"}, "unknown kernel `attention`"),
        ({"moe": "hip"}, "unknown implementation `hip` for kernel `moe`"),
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
