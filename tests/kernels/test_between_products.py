"""The kernels between products: parts of wider tensors, rows that stand alone, where they round, and what has a gradient."""

from __future__ import annotations

import pytest
import torch

from draftwood.kernels.registry import (
    BETWEEN_PRODUCTS,
    KernelUnavailableError,
    choose,
    load,
    load_kernels,
)
from draftwood.kernels.run_case import cases_of, torch_inputs
from draftwood.training.kernels import training_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WITH_ROWS = tuple(kernel for kernel in BETWEEN_PRODUCTS if kernel != "rotary")
OUTPUTS = ("q", "latents")


def inputs_of(kernel, dtype, N):
    """Of the last small case with N rows or more."""
    cases = cases_of(kernel)
    case = [c for c in cases.small() if c["dtype"] == dtype and c["N"] >= N][-1]
    return torch_inputs(case, cases.make(case), DEVICE)


def outputs(kernel, impl, inputs):
    out = load(kernel, impl)(**{k: v.clone() if k in OUTPUTS else v for k, v in inputs.items()})
    return [o.nan_to_num() for o in (out if isinstance(out, tuple) else (out,))]


def part_of_wider(tensor):
    """The same numbers, with others on both sides of each last axis: rows at odd addresses."""
    wide = torch.full(
        (*tensor.shape[:-1], tensor.shape[-1] + 5), 7.0, dtype=tensor.dtype, device=tensor.device
    )
    part = wide[..., 3:-2]
    return part.copy_(tensor)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("kernel", WITH_ROWS)
def test_parts_of_wider_tensors(kernel, impl):
    inputs = inputs_of(kernel, "float32", 2)
    rows = {"x", "a", "b", "gate_up", "q_rope", "k_rope", "latent"}
    parts = {k: part_of_wider(v) if k in rows else v for k, v in inputs.items()}
    for got, want in zip(outputs(kernel, impl, parts), outputs(kernel, impl, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    name = next(k for k in inputs if k in rows)
    if impl == "triton":
        with pytest.raises(ValueError, match=f"`{name}`: the last axis must be contiguous"):
            outputs(kernel, impl, inputs | {name: inputs[name].mT.contiguous().mT})


@pytest.mark.parametrize("impl", ["torch_fixed", "triton"])
@pytest.mark.parametrize("kernel", ["add_rms_norm", "mla_inputs", "silu_mul", "rotary"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_row_is_the_same_whatever_others_there_are(kernel, dtype, impl):
    whole = inputs_of(kernel, dtype, 2)
    if whole.get("start") is not None:  # a row's position is then told by two tensors
        absolute = whole["start"][:, None] + whole["positions"]
        whole |= {"positions": absolute.flatten(), "start": None}
    by_row = {"x", "a", "b", "gate_up", "q_rope", "k_rope", "latent", "cos", "sin", "positions", *OUTPUTS}
    N = max(len(v) for k, v in whole.items() if k in by_row and v is not None)
    for start, stop in ((0, N), (N - 1, N), (1, N)):
        rows = {k: v[start:stop] if k in by_row and v is not None else v for k, v in whole.items()}
        for got, want in zip(outputs(kernel, impl, rows), outputs(kernel, impl, whole), strict=True):
            assert torch.equal(got, want[start:stop])


@pytest.mark.parametrize("dtype", ["float32", "float16", *(["bfloat16"] if DEVICE == "cuda" else [])])
def test_sums_round_as_in_torch(dtype):
    inputs = inputs_of("add_rms_norm", dtype, 3)
    x, a, b = inputs["x"], *(torch.randn_like(inputs["x"]) for _ in range(2))
    for added, want in (((a, None), x + a), ((a, b), x + (a + b))):
        got, _ = load("add_rms_norm", "triton")(x, inputs["weight"], 1e-5, *added)
        assert torch.equal(got, want)


def test_angles_of_any_size_in_triton():
    """Up to the last position that 32 bits hold, in every quarter turn; a table in fp64 shows more than fp32 would."""
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 6, 65536, 10**6, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    frequencies = torch.tensor([-1.0, -1e-3, 1.0, 1e-3], dtype=torch.float64, device=DEVICE)
    got, want = (load("rotary", i)(positions, frequencies, 1.5, double=True) for i in ("triton", "torch"))
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g[:-2], w[:-2], rtol=0, atol=3e-11)
        torch.testing.assert_close(g, w, rtol=0, atol=1e-6)


def test_deterministic_mode_takes_what_computes_rows_by_themselves():
    pytest.importorskip("triton")
    for device, impl in (("cpu", "torch_fixed"), ("cuda", "triton")):
        chosen = {c.kernel: c for c in load_kernels(device, deterministic=True).choices}
        for kernel in ("add_rms_norm", "mla_inputs", "silu_mul", "rotary"):
            assert chosen[kernel].impl == impl
            assert chosen[kernel].reason.startswith("deterministic")
    with pytest.raises(
        KernelUnavailableError, match=r"`torch` is not deterministic; .*: triton, torch_fixed"
    ):
        choose("silu_mul", "cpu", "torch", deterministic=True)


def test_training_uses_what_has_a_gradient():
    pytest.importorskip("triton")
    chosen = {c.kernel: c.impl for c in training_kernels("cuda").choices}
    assert {chosen[kernel] for kernel in BETWEEN_PRODUCTS} == {"torch"}
