"""draft_attn beyond agreement with the reference: an independent oracle, masks, and what must never matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from draftwood.kernels.case import CaseError, Mismatch, make_case
from draftwood.kernels.draft_attn import cases, draft_attn
from draftwood.kernels.run_case import run, torch_inputs, verify

IMPLS = pytest.mark.parametrize("impl", ["ref", "torch"])
MASKS = pytest.mark.parametrize(("causal", "window"), [(0, 0), (1, 0), (0, 5), (1, 5)])


def case(**axes):
    narrow = {"B": 2, "S": 6, "Hq": 4, "Hkv": 2, "hd": 16, "context": 37, "page": 16, "dtype": "float64"}
    return make_case("draft_attn", cases.DEFAULTS, **{**narrow, **axes})


@IMPLS
@MASKS
@pytest.mark.parametrize("context", [0, 1, 16, 37])
def test_equals_dense_grouped_query_attention(context, causal, window, impl):
    c = case(context=context, causal=causal, window=window)
    inputs = cases.make(c)
    out = run(c, inputs, impl)
    distance = np.arange(context + 6) - (context + np.arange(6))[:, None]
    hidden = (distance > 0) & bool(causal)
    if window:
        hidden |= (distance <= -window) | (distance >= window)
    for b in range(2):
        row = inputs["page_table"][b, : -(-context // 16)]
        k, v = (
            torch.from_numpy(
                np.concatenate(
                    [inputs[f"{x}_pages"][row].reshape(-1, 2, 16)[:context], inputs[f"block_{x}"][b]]
                )
            ).transpose(0, 1)
            for x in "kv"
        )
        q = torch.from_numpy(inputs["q"][b]).transpose(0, 1)
        want = scaled_dot_product_attention(
            q, k, v, torch.from_numpy(~hidden), scale=inputs["scale"], enable_gqa=True
        )
        np.testing.assert_allclose(out[b], want.transpose(0, 1), rtol=1e-11, atol=1e-12)


@IMPLS
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("context", [40, 64, 100])
def test_what_is_older_than_the_window_never_matters(context, causal, impl):
    c = case(context=context, causal=causal, window=9)
    inputs = cases.make(c)
    out = run(c, inputs, impl)
    for b in range(2):
        old = np.arange(context - 9 + 1)  # slot 0 sits at `context` and sees 8 keys before itself
        where = inputs["page_table"][b, old // 16], old % 16
        inputs["k_pages"][where] *= -3
        inputs["v_pages"][where] += 100
    np.testing.assert_allclose(run(c, inputs, impl), out, rtol=1e-12)
    inputs["v_pages"][inputs["page_table"][:, (context - 8) // 16], (context - 8) % 16] += 100
    changed = (run(c, inputs, impl) != out).any(axis=(2, 3))
    np.testing.assert_array_equal(changed, np.tile(np.arange(6) == 0, (2, 1)))


@IMPLS
def test_a_window_wider_than_everything_is_none(impl):
    inputs = cases.make(case())
    wide, none = ({**inputs, "window": window} for window in (1000, None))
    np.testing.assert_allclose(run(case(), wide, impl), run(case(), none, impl), rtol=1e-12)


@IMPLS
def test_slots_of_a_block_without_mask_commute(impl):
    inputs = cases.make(case())
    out = run(case(), inputs, impl)
    order = np.array([3, 0, 5, 1, 4, 2])
    moved = {name: inputs[name][:, order] for name in ("q", "block_k", "block_v")}
    np.testing.assert_allclose(run(case(), {**inputs, **moved}, impl), out[:, order], rtol=1e-11)


@IMPLS
@MASKS
def test_a_batch_of_unequal_requests_equals_each_alone(causal, window, impl):
    c = case(B=9, context=300, ragged=1, causal=causal, window=window)
    inputs = cases.make(c)
    out = run(c, inputs, impl)
    per_row = ("q", "page_table", "context_len", "block_k", "block_v")
    for b in range(9):
        alone = run(c, {**inputs, **{name: inputs[name][b : b + 1] for name in per_row}}, impl)
        np.testing.assert_allclose(out[b], alone[0], rtol=1e-11, atol=1e-12)


def test_nan_reaches_its_own_request_only():
    c = case(B=3, context=80, ragged=1)
    out = run(c, cases.make(c), "torch")
    for name in ("q", "block_k", "block_v", "k_pages", "v_pages"):
        inputs = cases.make(c)
        if name.endswith("pages"):
            inputs[name][inputs["page_table"][0, 1], 3] = np.nan
        else:
            inputs[name][0, 2] = np.nan
        with_nan = run(c, inputs, "torch")
        assert np.isnan(with_nan[0]).any()
        np.testing.assert_array_equal(with_nan[1:], out[1:])


def test_page_size_does_not_matter():
    c = case(context=130)
    inputs = cases.make(c)
    want = run(c, inputs, "ref")
    for page in (32, 64):
        n = -(-130 // page)
        table = c.rng.permutation(2 * n).reshape(2, n).astype(np.int32)
        resized = {"page_table": table}
        for name in ("k_pages", "v_pages"):
            resized[name] = np.full((2 * n, page, 2, 16), np.nan)
            for b in range(2):
                for p in range(130):
                    old = inputs[name][inputs["page_table"][b, p // 16], p % 16]
                    resized[name][table[b, p // page], p % page] = old
        cases.compare(c, run(c, {**inputs, **resized}, "torch"), want)


def test_strided_inputs_are_read_and_not_written():
    c = case(B=3, context=80, ragged=1, window=7)
    inputs = torch_inputs(c, cases.make(c), "cpu")
    both = torch.stack([inputs["k_pages"], inputs["v_pages"]], 2)
    before = both.clone()
    strided = {
        "k_pages": both[:, :, 0],
        "v_pages": both[:, :, 1],
        "q": inputs["q"].transpose(1, 2).contiguous().transpose(1, 2),
    }
    torch.testing.assert_close(draft_attn(**{**inputs, **strided}), draft_attn(**inputs))
    torch.testing.assert_close(both, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", cases.TOLERANCE)
@pytest.mark.parametrize("mistake", ["one key less", "causal", "window", "heads interleaved", "scale"])
def test_tolerances_catch_mistakes(mistake, dtype):
    c = case(dtype=dtype, context=60, window=20)
    inputs = cases.make(c)
    want = run(c, inputs, "ref")
    wrong = {
        "one key less": {"context_len": inputs["context_len"] - np.int32(1)},
        "causal": {"causal": True},
        "window": {"window": 21},
        "heads interleaved": {"q": inputs["q"][:, :, [0, 2, 1, 3]]},
        "scale": {"scale": inputs["scale"] * 1.05},
    }[mistake]
    with pytest.raises(Mismatch):
        cases.compare(c, run(c, {**inputs, **wrong}, "torch"), want)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("page_table", lambda a: a + 1000, "`page_table` row 0: page must be in"),
        ("context_len", lambda a: a + np.array([0, 999], np.int32), "`context_len` row 1: must be in"),
        ("block_v", lambda a: a[:, 1:], "`block_v`: expected"),
        ("v_pages", lambda a: a[1:], "`v_pages`: expected"),
        ("q", lambda a: a[:, :, :3], "`q`: heads must be a multiple of the 2"),
        ("window", lambda _: 0, "`window`: must be None or at least 1"),
    ],
)
def test_check_names_input_and_row(field, change, message):
    inputs = cases.make(case())
    cases.check(case(), inputs)
    with pytest.raises(CaseError, match=message):
        cases.check(case(), {**inputs, field: change(inputs[field])})


@settings(max_examples=40, deadline=None)
@given(
    axes=st.fixed_dictionaries(
        {
            "B": st.integers(1, 5),
            "S": st.integers(1, 9),
            "Hkv": st.integers(1, 3),
            "context": st.integers(0, 150),
            "page": st.sampled_from([16, 32, 64]),
            "causal": st.integers(0, 1),
            "window": st.integers(0, 90),
            "ragged": st.integers(0, 1),
            "dtype": st.sampled_from(["float32", "float64"]),
        }
    ),
    group=st.integers(1, 3),
    seed=st.integers(0, 10_000),
)
def test_any_case(axes, group, seed):
    axes = {**axes, "Hq": axes["Hkv"] * group, "hd": 8}
    verify(make_case("draft_attn", cases.DEFAULTS, seed=seed, **axes), "torch")


def test_work_model_of_a_shape_done_by_hand():
    c = make_case("draft_attn", cases.DEFAULTS, B=8, context=4096)
    assert cases.flops(c) == 8 * 8 * 64 * 4104 * 128 * 4
    assert cases.bytes_moved(c) == 2 * (2 * 8 * 4104 * 8 * 128 + 2 * 8 * 8 * 64 * 128)
    windowed = make_case("draft_attn", cases.DEFAULTS, context=4096, window=100)
    assert cases.bytes_moved(windowed) == 2 * (2 * 107 * 8 * 128 + 2 * 8 * 64 * 128)
