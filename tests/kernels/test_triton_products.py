"""verify_attn, draft_attn and moe in Triton: every way to cut the work, what must not matter, and inputs out of range."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftwood.kernels.case import make_case
from draftwood.kernels.chip import Chip
from draftwood.kernels.compile_case import CAPABILITIES, SHARED_LIMIT
from draftwood.kernels.draft_attn import triton_impl as draft_impl
from draftwood.kernels.moe import triton_impl as moe_impl
from draftwood.kernels.moe.ref import route
from draftwood.kernels.run_case import cases_of, run, torch_inputs, verify
from draftwood.kernels.verify_attn import triton_impl as verify_impl
from draftwood.kernels.verify_attn.tiles import Tiles, choose_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def verify_case(**axes):
    narrow = {"B": 3, "T": 9, "H": 3, "R": 16, "P": 8, "page": 16, "prefix": 70, "dtype": "float32"}
    return make_case("verify_attn", cases_of("verify_attn").DEFAULTS, **{**narrow, **axes})


def draft_case(**axes):
    narrow = {"B": 3, "S": 4, "Hq": 4, "Hkv": 2, "hd": 16, "context": 70, "page": 16, "dtype": "float32"}
    return make_case("draft_attn", cases_of("draft_attn").DEFAULTS, **{**narrow, **axes})


def moe_case(**axes):
    narrow = {"N": 9, "E": 8, "top_k": 2, "d": 32, "I": 16, "dtype": "float32"}
    return make_case("moe", cases_of("moe").DEFAULTS, **{**narrow, **axes})


@pytest.mark.parametrize("programs", [1, 2, 13, 60])
def test_any_number_of_programs_gives_the_same(programs, monkeypatch):
    monkeypatch.setattr(verify_impl, "chip_of", lambda _: Chip(80, programs))
    monkeypatch.setattr(draft_impl, "chip_of", lambda _: Chip(80, programs))
    verify(verify_case(ragged=1), "triton", DEVICE)
    verify(draft_case(ragged=1), "triton", DEVICE)


@pytest.mark.parametrize("shape", [(64, 64, 8, 2), (32, 64, 8, 2), (16, 32, 8, 1)])
@pytest.mark.parametrize("page", [16, 64])
def test_tiles_of_every_chip(shape, page, monkeypatch):
    monkeypatch.setattr(verify_impl, "choose_tiles", lambda *_: Tiles(*shape, 16, 16))
    verify(verify_case(T=13, H=5, page=page, prefix=130, ragged=1), "triton", DEVICE)


def test_tiles_of_larger_mixtures(monkeypatch):
    monkeypatch.setattr(moe_impl, "choose_tile", lambda *_: moe_impl.Tile(64, 64, 32, 4, 2))
    verify(moe_case(N=70, E=3, top_k=2), "triton", DEVICE)


@pytest.mark.parametrize(("R", "P"), [(16, 0), (1, 0), (9, 5), (33, 1)])
def test_odd_widths(R, P):
    verify(verify_case(B=1, R=R, P=P), "triton", DEVICE)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("widths", [(512, 64), (128, 16), (1024, 64), (16, 0)])
def test_chosen_tiles_fit(capability, widths):
    chip = Chip(capability, 100)
    for item_size in (2, 4):
        for rows in (1, 16, 17, 33, 4000):
            tiles = choose_tiles(chip, item_size, 8, rows, 4096, *widths)
            assert tiles.shared(item_size, chip) <= SHARED_LIMIT[capability]
    with pytest.raises(ValueError, match=r"no tile of latents 16384 \+ 64 wide fits"):
        choose_tiles(chip, 2, 1, 64, 64, 16384, 64)


@pytest.mark.parametrize(("case", "name"), [(verify_case(ragged=1), "pages"), (draft_case(), "k_pages")])
def test_nan_reaches_its_own_request_only(case, name):
    inputs = cases_of(case.kernel).make(case)
    clean = run(case, inputs, "triton", DEVICE)
    inputs[name][inputs["page_table"][0, 1], 3] = np.nan
    spoilt = run(case, inputs, "triton", DEVICE)
    for was, now in zip(*(o if isinstance(o, tuple) else (o,) for o in (clean, spoilt)), strict=True):
        assert np.isnan(now[0]).any()
        np.testing.assert_array_equal(now[1:], was[1:])


def test_strided_inputs_of_verify_attn():
    case = verify_case(ragged=1)
    inputs = torch_inputs(case, cases_of("verify_attn").make(case), DEVICE)
    layers = torch.full((3, *inputs["pages"].shape), torch.nan, device=DEVICE)
    layers[1] = inputs["pages"]
    strided = {
        "pages": layers[1],
        "q": inputs["q"].transpose(1, 2).contiguous().transpose(1, 2),
        "tree_kv": torch.stack([inputs["tree_kv"]] * 2, 2)[:, :, 0],
        "page_table": inputs["page_table"].T.contiguous().T,
    }
    want = verify_impl.verify_attn(**inputs)
    got = verify_impl.verify_attn(**{**inputs, **strided})
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="`pages`: the keys of a page must be contiguous"):
        verify_impl.verify_attn(**{**inputs, "pages": layers[1].transpose(0, 1).contiguous().transpose(0, 1)})


def test_strided_inputs_of_draft_attn():
    case = draft_case(ragged=1, window=7)
    inputs = torch_inputs(case, cases_of("draft_attn").make(case), DEVICE)
    both = torch.stack([inputs["k_pages"], inputs["v_pages"]], 2)
    block = torch.cat([inputs["q"], inputs["block_k"], inputs["block_v"]], 2)
    heads = inputs["q"].shape[2], *2 * inputs["block_k"].shape[2:3]
    _, block_k, block_v = block.split(heads, 2)
    strided = {
        "k_pages": both[:, :, 0],
        "v_pages": both[:, :, 1],
        "block_k": block_k,
        "block_v": block_v,
        "q": inputs["q"].transpose(1, 2).contiguous().transpose(1, 2),
    }
    got, want = draft_impl.draft_attn(**{**inputs, **strided}), draft_impl.draft_attn(**inputs)
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match="`q`: the last axis must be contiguous"):
        draft_impl.draft_attn(**{**inputs, "q": inputs["q"].mT.contiguous().mT})


def test_lengths_and_pages_out_of_range_touch_their_own_row_only():
    for case, length in ((verify_case(), "prefix_len"), (draft_case(), "context_len")):
        inputs = cases_of(case.kernel).make(case)
        clean = run(case, inputs, "triton", DEVICE)
        for value in (-5, 2**31 - 1):
            inputs[length][1] = value
            inputs["page_table"][1, ::2] = value
            spoilt = run(case, inputs, "triton", DEVICE)
            for was, now in zip(*(o if isinstance(o, tuple) else (o,) for o in (clean, spoilt)), strict=True):
                np.testing.assert_allclose(now[::2], was[::2], rtol=1e-5, atol=1e-6)  # cut elsewhere


def test_route_agrees_with_its_definition():
    for case in (
        moe_case(E=16, top_k=4, n_group=4, topk_group=2),
        moe_case(ties=1, E=16, top_k=8),
        moe_case(E=5),
    ):
        inputs = cases_of("moe").make(case)
        options = {k: v for k, v in inputs.items() if not isinstance(v, np.ndarray)}
        arrays = [inputs[k] for k in ("x", "router", "bias")]
        want_weights, want_experts = route(*arrays, **options)
        weights, experts = moe_impl.route(*(torch.from_numpy(a).to(DEVICE) for a in arrays), **options)
        np.testing.assert_array_equal(experts.cpu(), want_experts)
        np.testing.assert_allclose(weights.cpu(), want_weights, rtol=2e-6)


def test_a_nan_token_spoils_itself_only():
    case = moe_case()
    inputs = cases_of("moe").make(case)
    clean = run(case, inputs, "triton", DEVICE)
    inputs["x"][4] = np.nan
    spoilt = run(case, inputs, "triton", DEVICE)
    others = np.arange(9) != 4
    np.testing.assert_array_equal(spoilt[others], clean[others])
    assert np.isnan(spoilt[4]).all()
