"""commit_kv beyond agreement with the reference: what it writes, and above all what it does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.kernels.case import CaseError, Mismatch, make_case
from draftwood.kernels.commit_kv import cases, commit_kv
from draftwood.kernels.poison import ABSURD
from draftwood.kernels.run_case import run, torch_inputs, verify

IMPLS = pytest.mark.parametrize("impl", ["ref", "torch"])


def case(**axes):
    narrow = {"L": 3, "B": 3, "T": 20, "D": 6, "C": 10, "page": 16, "prefix": 30, "dtype": "float32"}
    return make_case("commit_kv", cases.DEFAULTS, **{**narrow, **axes})


@IMPLS
@pytest.mark.parametrize("page", [1, 16, 32, 64])
def test_page_size_does_not_matter(page, impl):
    c = case(page=page, prefix=62)
    inputs = cases.make(c)
    pages = run(c, inputs, impl)
    for b in range(3):
        for j in range(7):
            column, offset = divmod(62 + j, page)
            written = pages[:, inputs["page_table"][b, column], offset]
            np.testing.assert_array_equal(written, inputs["tree_kv"][:, b, inputs["path"][b, j]])


@IMPLS
def test_nothing_else_is_written(impl):
    c = case(B=5, prefix=62, ragged=1)
    inputs = cases.make(c)
    changed = (run(c, inputs, impl) != inputs["pages"]).any(-1)
    assert (changed.sum((1, 2)) == inputs["n_path"].sum()).all()


@IMPLS
@pytest.mark.parametrize(
    ("field", "bad"),
    [
        (field, bad)
        for field in ("path", "page_table", "prefix_len", "n_path")
        for bad in ABSURD
        if (field, bad) != ("prefix_len", -1)  # the second token's position is 0, a sound one
    ],
)
def test_absurd_entries_are_skipped(field, bad, impl):
    c = case(prefix=0)
    inputs = cases.make(c)
    sound = run(c, inputs, impl)
    inputs[field][1] = bad
    got = run(c, inputs, impl)
    if field == "n_path" and bad > 0:  # the path is as long as it can be
        np.testing.assert_array_equal(got, sound)
        return
    other = np.isin(np.arange(sound.shape[1]), inputs["page_table"][[0, 2], 0])
    np.testing.assert_array_equal(got[:, other], sound[:, other])
    np.testing.assert_array_equal(got[:, ~other], inputs["pages"][:, ~other])


@IMPLS
def test_one_absurd_slot_leaves_a_gap(impl):
    c = case(B=1, prefix=0)
    inputs = cases.make(c)
    sound = run(c, inputs, impl)
    inputs["path"][0, 3] = 20
    got = run(c, inputs, impl)
    page = inputs["page_table"][0, 0]
    differs = (got != sound).any(-1)
    assert differs[:, page, 3].all()
    assert differs.sum() == 3
    np.testing.assert_array_equal(got[:, page, 3], inputs["pages"][:, page, 3])


@IMPLS
@pytest.mark.parametrize("how", ["n_path", "page_table", "path"])
def test_with_nothing_to_commit_the_pages_stay_bit_for_bit(how, impl):
    c = case()
    inputs = cases.make(c)
    inputs["pages"][:] = np.array([0x7FC12345], np.uint32).view(np.float32)  # a NaN with a payload
    inputs[how][:] = 0 if how == "n_path" else -1
    got = run(c, inputs, impl)
    np.testing.assert_array_equal(got.view(np.uint32), inputs["pages"].view(np.uint32))


@IMPLS
def test_rows_may_swap_slots_freely(impl):
    c = case()
    inputs = cases.make(c)
    inputs["path"] = np.ascontiguousarray(inputs["path"][:, ::-1])
    pages = run(c, inputs, impl)
    for b in range(3):
        for j in range(7):
            column, offset = divmod(30 + j, 16)
            np.testing.assert_array_equal(
                pages[:, inputs["page_table"][b, column], offset],
                inputs["tree_kv"][:, b, inputs["path"][b, j]],
            )


def test_strided_pages_are_written_in_place():
    c = case()
    inputs = torch_inputs(c, cases.make(c), "cpu")
    wide = torch.zeros(3, *inputs["pages"].shape[1:3], 15)
    wide[..., 2:12] = inputs["pages"]
    commit_kv(**{**inputs, "pages": wide[..., 2:12]})
    commit_kv(**inputs)
    torch.testing.assert_close(wide[..., 2:12], inputs["pages"], rtol=0, atol=0)
    assert (wide[..., :2] == 0).all()
    assert (wide[..., 12:] == 0).all()


def test_compare_catches_one_wrong_number():
    c = case()
    pages = run(c, cases.make(c), "ref")
    wrong = pages.copy()
    wrong[2, 1, 5, 3] += 1
    with pytest.raises(Mismatch, match=r"`pages`\[2, 1, 5, 3\]"):
        cases.compare(c, wrong, pages)


def test_check_names_input_and_row():
    c = case(prefix=0)
    inputs = cases.make(c)
    cases.check(c, inputs)
    with pytest.raises(CaseError, match="`tree_kv`: expected"):
        cases.check(c, {**inputs, "tree_kv": inputs["tree_kv"][1:]})
    with pytest.raises(CaseError, match="`path`: expected 2-d int32 with 3 rows"):
        cases.check(c, {**inputs, "path": inputs["path"].astype(np.int64)})
    table = inputs["page_table"].copy()
    table[2] = table[0]
    with pytest.raises(CaseError, match=r"`page_table` row 2: writes page .* as row 0 does"):
        cases.check(c, {**inputs, "page_table": table})


@settings(max_examples=60, deadline=None)
@given(
    axes=st.fixed_dictionaries(
        {
            "L": st.integers(1, 3),
            "B": st.integers(1, 6),
            "T": st.integers(1, 70),
            "D": st.integers(0, 9),
            "C": st.integers(1, 5),
            "page": st.sampled_from([1, 16, 32, 64]),
            "prefix": st.integers(0, 130),
            "ragged": st.integers(0, 1),
            "skip": st.integers(0, 1),
            "dtype": st.sampled_from(["float32", "bfloat16"]),
        }
    ),
    seed=st.integers(0, 10_000),
)
def test_any_case(axes, seed):
    verify(make_case("commit_kv", cases.DEFAULTS, seed=seed, **axes), "torch")
