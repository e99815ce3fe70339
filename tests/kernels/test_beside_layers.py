"""Kernels of a round beside layers: views that they take, and those that they refuse because they write them."""

from __future__ import annotations

import pytest
import torch

from draftwood.kernels.case import make_case
from draftwood.kernels.registry import load
from draftwood.kernels.run_case import cases_of, torch_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

WRITTEN = {
    "keep_features": ("ring", "first", "count"),
    "advance": ("root", "prefix_len", "max_new", "context_left", "live"),
}


def inputs_of(kernel, **axes):
    case = make_case(kernel, cases_of(kernel).DEFAULTS, **axes)
    return torch_inputs(case, cases_of(kernel).make(case), DEVICE)


def stepped(x):
    """The same numbers, every other row of a larger tensor."""
    return torch.stack((x, torch.zeros_like(x)), 1)[:, 0]


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_one_path_for_all_requests(impl):
    inputs = inputs_of("path_features", K=2, B=3, T=5, S=4, d=9, dtype="float32")
    path = inputs["path"][:1].expand(3, -1)
    function = load("path_features", impl)
    got, want = function(inputs["taps"], path), function(inputs["taps"], path.contiguous())
    assert got.shape == (3, 4, 18)
    assert torch.equal(got, want)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_what_is_read_may_be_a_part_of_something(impl):
    sizes = {"B": 4, "R": 3, "F": 7, "dtype": "float32"}
    plain, views = inputs_of("keep_features", **sizes), inputs_of("keep_features", **sizes)
    views |= {name: stepped(views[name]) for name in ("features", "position")}
    for inputs in (plain, views):
        load("keep_features", impl)(**inputs)
    assert all(torch.equal(plain[name], views[name]) for name in WRITTEN["keep_features"])


@pytest.mark.parametrize(("kernel", "name"), [(k, n) for k in WRITTEN for n in WRITTEN[k]])
def test_what_is_written_must_be_contiguous(kernel, name):
    pytest.importorskip("triton")
    axes = {"R": 3, "F": 7, "dtype": "float32"} if kernel == "keep_features" else {"D": 2, "T": 5}
    inputs = inputs_of(kernel, B=4, **axes)
    with pytest.raises(ValueError, match=f"`{name}`: must be contiguous"):
        load(kernel, "triton")(**{**inputs, name: stepped(inputs[name])})
