"""verify_attn's `flash_mla`: over a stand-in for FlashMLA on the CPU, and over the real one where that is installed."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from draftwood.cli import app
from draftwood.kernels import KernelUnavailableError, chip, specialised
from draftwood.kernels.case import make_case
from draftwood.kernels.chip import Chip
from draftwood.kernels.registry import by_name_only, choose, load
from draftwood.kernels.run_case import refused, run, to_numpy, torch_inputs, verify
from draftwood.kernels.specialised import Use, refusal
from draftwood.kernels.verify_attn import cases, for_layers
from support import flash_mla as stand_in

OURS = "draftwood.kernels.verify_attn.flash_mla_impl"
KIMI = Use(90, "bfloat16", 512, 64, 64)


@pytest.fixture
def install(monkeypatch):
    """Of a module for `flash_mla`: our implementation over it, which takes the CPU for a Hopper GPU."""

    def install(module):
        monkeypatch.setitem(sys.modules, "flash_mla", module)
        monkeypatch.setattr(specialised, "_version", lambda package: "1.0")
        monkeypatch.setattr(chip, "off_gpu", Chip(90, 132))
        forget()
        return importlib.import_module(OURS)

    def forget():
        sys.modules.pop(OURS, None)
        load.cache_clear()

    yield install
    forget()


@pytest.fixture(params=["object_form", "tensor_form"])
def ours(request, install):
    return install(getattr(stand_in, request.param)())


def case(**axes):
    return make_case("verify_attn", cases.DEFAULTS, **{"T": 9, "H": 2, "prefix": 130, **axes})


def served(cases):
    """On Hopper, were FlashMLA installed."""
    return [c for c in cases if (refused(c, "flash_mla", 90) or "needs the package").startswith("needs the")]


SMALL = served(
    [
        *cases.small(),
        *(case(B=9, T=T, ragged=1, dtype=d) for T, d in ((1, "bfloat16"), (17, "float16"), (66, "bfloat16"))),
        *(case(T=T, H=1, prefix=p) for T, p in ((1, 0), (5, 0), (33, 1), (3, 64), (2, 65))),
        *(case(tree=tree, dtype="float16") for tree in ("chain", "star")),
    ]
)


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.id)
def test_agrees_with_reference(case, ours):
    verify(case, "flash_mla")


def test_layers_share_one_schedule_and_inputs_may_have_strides(ours, monkeypatch):
    schedule, made = ours._schedule, []
    monkeypatch.setattr(ours, "_schedule", lambda *of: made.append(of) or schedule(*of))
    c = case(B=9, ragged=1)
    x = torch_inputs(c, cases.make(c), "cpu")
    x["page_table"] = x["page_table"].T.contiguous().T
    x["prefix_len"] = torch.stack([x["prefix_len"]] * 2, 1)[:, 0]
    layer = for_layers(
        ours.verify_attn, *(x[k] for k in ("page_table", "prefix_len", "ancestors", "n_slots")), 64
    )
    for factor in (1, -1, 0.5):
        q = (x["q"] * factor).mT.contiguous().mT
        o = layer(q, x["pages"], x["tree_kv"], x["scale"], value_dim=512)
        want = load("verify_attn", "torch")(**{**x, "q": q})
        cases.compare(c, to_numpy((o, want[1])), to_numpy(want))
    assert len(made) == 1


def test_nan_reaches_its_own_request_only(ours):
    c = case(B=3, T=5)
    inputs = {**cases.make(c), "n_slots": np.array([5, 5, 2], np.int32)}
    clean = run(c, inputs, "flash_mla")
    inputs["pages"][inputs["page_table"][0, 2], 0] = np.nan
    inputs["tree_kv"][2, 0] = np.nan
    o, lse = run(c, inputs, "flash_mla")
    assert np.isnan(o[0]).all()
    np.testing.assert_array_equal(o[1], clean[0][1])
    np.testing.assert_array_equal(lse[1], clean[1][1])
    assert (o[2, 2:] == 0).all()
    assert np.isneginf(lse[2, 2:]).all()


@pytest.mark.parametrize("difference", [0, 3, -3, 40, -40, 800, -800])
def test_merging_is_softmax_over_both(difference, ours):
    torch.manual_seed(0)
    scores, values = torch.randn(2, 3, 4, 9).double(), torch.randn(9, 5).double()
    scores[..., 4:] += difference
    parts = [
        (scores[..., keys].softmax(-1) @ values[keys], scores[..., keys].logsumexp(-1))
        for keys in (slice(4), slice(4, 9))
    ]
    blind = torch.tensor([[False, False, True], [True, False, False]])
    for part in parts[0]:
        part[blind] = torch.nan
    parts[1][0][1, 0], parts[1][1][1, 0] = 0, -torch.inf  # sees nothing at all
    parts[1][0][1, 1], parts[1][1][1, 1] = 0, -torch.inf  # sees the prefix only
    scores[..., :4][blind] = scores[1, :2, :, 4:] = -torch.inf
    o, lse = ours.merge(*parts, blind)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(o, scores.softmax(-1).nan_to_num(0) @ values, rtol=1e-12, atol=1e-12)


def other_metadata(cache_seqlens, num_heads_k):
    raise AssertionError


def other_decode(q, k_cache, sequence_lengths):
    raise AssertionError


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"get_mla_metadata": other_metadata}, r"found get_mla_metadata\(cache_seqlens, num_heads_k\)"),
        ({"flash_mla_with_kvcache": other_decode}, r"found .* flash_mla_with_kvcache\(q, k_cache, seq"),
    ],
)
def test_an_interface_that_is_not_known_is_refused(changed, said, install, monkeypatch):
    install(library := stand_in.object_form())
    vars(library).update(changed)
    sys.modules.pop(OURS)
    expected = (
        r"`flash_mla` cannot load: .*expected get_mla_metadata\(\*args, \*\*kwargs\) or \(cache_seqlens"
    )
    with pytest.raises(KernelUnavailableError, match=f"{expected}.*{said}"):
        load("verify_attn", "flash_mla")


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (replace(KIMI, capability=100), "needs compute capability 9.0, this is 10.0"),
        (replace(KIMI, dtype="float32"), "takes bfloat16 and float16, not float32"),
        (replace(KIMI, value_dim=128), "takes latents of 512 + 64, not 128 + 64"),
        (replace(KIMI, page=16), "takes pages of 64, not 16"),
    ],
)
def test_what_it_is_not_for_is_refused(use, why, install):
    ours = install(stand_in.object_form())
    assert refusal("verify_attn", "flash_mla", use) == why
    assert refusal("verify_attn", "flash_mla", replace(KIMI, dtype="float16")) is None
    with pytest.raises(KernelUnavailableError, match=f"`flash_mla` {re.escape(why)}"):
        choose("verify_attn", "cuda", "flash_mla", use=use)
    assert choose("verify_attn", "cuda", "flash_mla", use=KIMI).function is ours.verify_attn
    c = case(page=32)
    with pytest.raises(NotImplementedError, match="flash_mla takes pages of 64, not 32"):
        run(c, cases.make(c), "flash_mla")


@pytest.mark.skipif(find_spec("flash_mla") is not None, reason="flash_mla is installed")
def test_what_is_not_installed_is_said_to_be_missing(monkeypatch):
    with pytest.raises(KernelUnavailableError, match="cannot load: No module named 'flash_mla'"):
        load("verify_attn", "flash_mla")
    assert by_name_only("verify_attn") == ["cuda", "flash_mla"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(chip, "chip_of", lambda device: Chip(90, 132))
    said = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"}).stdout
    assert "verify_attn, by name only" in said
    assert "`flash_mla` needs the package flash_mla, built from deepseek-ai/FlashMLA" in said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.skipif(find_spec("flash_mla") is None, reason="flash_mla is not installed")
@pytest.mark.parametrize(
    "case",
    [*SMALL, case(B=14, H=8, prefix=65536, ragged=1), case(B=8, T=33, H=64, prefix=4096)],
    ids=lambda c: c.id,
)
def test_the_real_one_agrees_and_can_be_captured(case):
    verify(case, "flash_mla", "cuda")
    x = torch_inputs(case, cases.make(case), "cuda")
    own = [x[k] for k in ("q", "pages", "tree_kv", "scale")]
    shared = [x[k] for k in ("page_table", "prefix_len", "ancestors", "n_slots")]

    def forward():
        layer = for_layers(load("verify_attn", "flash_mla"), *shared, case["page"])
        return [layer(*own, value_dim=x["value_dim"]) for _ in range(2)]

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = forward()
    shared[1].sub_(1).clamp_(min=0)  # other contents
    graph.replay()
    want = to_numpy(load("verify_attn", "torch")(**x))
    for o in outs:
        cases.compare(case, (to_numpy(o), want[1]), want)
