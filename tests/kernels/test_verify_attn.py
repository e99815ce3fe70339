"""verify_attn beyond agreement with the reference: what a tree mask must mean, and what must never matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.kernels.case import CaseError, Mismatch, make_case
from draftwood.kernels.run_case import run, torch_inputs, verify
from draftwood.kernels.verify_attn import cases, verify_attn
from draftwood.tree import from_parents

IMPLS = pytest.mark.parametrize("impl", ["ref", "torch"])


def case(**axes):
    narrow = {"T": 24, "H": 2, "R": 16, "P": 8, "page": 16, "prefix": 37, "dtype": "float64"}
    return make_case("verify_attn", cases.DEFAULTS, **{**narrow, **axes})


def random_parents(rng, T):
    return np.array([-1, *(int(rng.integers(max(0, i - 6), i)) for i in range(1, T))])


def ancestors_of(parents):
    T = len(parents)
    return from_parents(np.zeros((1, T)), parents[None], np.array([T])).ancestors


def chain(T):
    return ancestors_of(np.arange(T) - 1)


def take_slots(inputs, slots):
    """The same request with only these slots, in this order; their ancestors are left to the caller."""
    return {
        **inputs,
        "q": inputs["q"][:, slots],
        "tree_kv": inputs["tree_kv"][:, slots],
        "n_slots": np.array([len(slots)], np.int32),
    }


@IMPLS
def test_every_leaf_equals_its_own_path_as_a_chain(impl):
    c = case(T=70)
    parents = random_parents(c.rng, 70)
    inputs = {**cases.make(c), "ancestors": ancestors_of(parents)}
    o, lse = run(c, inputs, impl)
    leaves = set(range(70)) - set(parents.tolist())
    assert len(leaves) > 5
    for leaf in leaves:
        path = [leaf]
        while path[0] > 0:
            path.insert(0, int(parents[path[0]]))
        alone = {**take_slots(inputs, path), "ancestors": chain(len(path))}
        o_path, lse_path = run(c, alone, impl)
        np.testing.assert_allclose(o[:, path], o_path, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(lse[:, path], lse_path, rtol=1e-11)


@IMPLS
@pytest.mark.parametrize("T", [1, 2, 33, 63, 64, 65, 128, 130])
def test_a_chain_is_causal_attention(T, impl):
    c = case(T=T, tree="chain", H=3)
    inputs = cases.make(c)
    row = inputs["page_table"][0, : -(-c["prefix"] // c["page"])]
    prefix = inputs["pages"][row].reshape(-1, 24)[: c["prefix"]]
    keys = torch.from_numpy(np.concatenate([prefix, inputs["tree_kv"][0]]))
    causal = torch.ones(T, len(keys), dtype=torch.bool).tril(c["prefix"])
    want = torch.nn.functional.scaled_dot_product_attention(
        torch.from_numpy(inputs["q"][0]).transpose(0, 1), keys, keys[:, :16], causal, scale=inputs["scale"]
    )
    o, _ = run(c, inputs, impl)
    np.testing.assert_allclose(o[0], want.transpose(0, 1), rtol=1e-11, atol=1e-12)


@IMPLS
@pytest.mark.parametrize("hidden", [0, 62, 63, 64])
def test_hiding_one_ancestor_changes_just_the_slots_that_saw_it(hidden, impl):
    c = case(T=70, tree="chain")
    inputs = cases.make(c)
    o, lse = run(c, inputs, impl)
    bits = inputs["ancestors"].view(np.uint64)
    bits[:, :, hidden // 64] &= ~(np.uint64(1) << np.uint64(hidden % 64))
    o_without, lse_without = run(c, inputs, impl)
    np.testing.assert_allclose(o[:, :hidden], o_without[:, :hidden], rtol=1e-12)
    assert (lse_without[:, hidden:] < lse[:, hidden:]).all()
    assert (o_without[:, hidden:] != o[:, hidden:]).any(axis=(2, 3)).all()


@IMPLS
def test_reordering_siblings_only_permutes_rows(impl):
    c = case(T=40)
    parents = random_parents(c.rng, 40)
    inputs = {**cases.make(c), "ancestors": ancestors_of(parents)}
    order, ready = [], [0]  # another order in which parents precede their children
    while ready:
        order.append(ready.pop(int(c.rng.integers(len(ready)))))
        ready += np.flatnonzero(parents == order[-1]).tolist()
    assert order != sorted(order)
    new_slot = np.argsort(order)
    new_parents = np.array([-1, *(new_slot[parents[old]] for old in order[1:])])
    o, lse = run(c, inputs, impl)
    o_new, lse_new = run(c, {**take_slots(inputs, order), "ancestors": ancestors_of(new_parents)}, impl)
    np.testing.assert_allclose(o_new, o[:, order], rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(lse_new, lse[:, order], rtol=1e-11)


@pytest.mark.parametrize("T", [1, 3, 7, 9, 16, 17, 31, 33])
def test_every_row_has_its_own_answer(T):
    o, _ = run(case(T=T), cases.make(case(T=T)), "torch")
    assert len(np.unique(o.reshape(T * 2, -1), axis=0)) == T * 2


@pytest.mark.parametrize("T", [1, 2, 9])
@pytest.mark.parametrize("prefix", [63, 64, 65, 4096, 32768])
def test_lengths_far_and_near(T, prefix):
    verify(case(T=T, prefix=prefix, H=1, page=64, R=8, P=4), "torch")


@IMPLS
def test_a_batch_of_unequal_requests_equals_each_alone(impl):
    c = case(B=9, T=33, prefix=300, ragged=1)
    inputs = cases.make(c)
    o, lse = run(c, inputs, impl)
    for b in range(9):
        one = {k: v if k == "pages" or not hasattr(v, "shape") else v[b : b + 1] for k, v in inputs.items()}
        o_alone, lse_alone = run(c, one, impl)
        np.testing.assert_allclose(o[b], o_alone[0], rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(lse[b], lse_alone[0], rtol=1e-11)


def test_padded_buffers_full_of_poison_equal_exact_ones():
    c = case(B=2, T=9)
    inputs = cases.make(c)
    o, lse = run(c, inputs, "torch")
    wide = {k: np.full_like(inputs[k], np.nan, shape=(2, 65, *inputs[k].shape[2:])) for k in ("q", "tree_kv")}
    wide["ancestors"] = np.full((2, 65, 2), -1)
    for name, array in wide.items():
        array[:, :9, : inputs[name].shape[2]] = inputs[name]
    wide["page_table"] = np.full((2, 40), -7, np.int32)
    wide["page_table"][:, : inputs["page_table"].shape[1]] = inputs["page_table"]
    wide["pages"] = np.concatenate([inputs["pages"], np.full((30, 16, 24), np.nan)])
    o_wide, lse_wide = run(c, {**inputs, **wide}, "torch")
    np.testing.assert_array_equal(o_wide[:, :9], o)
    np.testing.assert_array_equal(lse_wide[:, :9], lse)
    assert (o_wide[:, 9:] == 0).all()
    assert np.isneginf(lse_wide[:, 9:]).all()


@pytest.mark.parametrize("ragged", [0, 1])
@pytest.mark.parametrize("where", ["pages", "tree_kv", "q"])
def test_nan_reaches_its_own_request_only(where, ragged):
    c = case(B=3, T=9, prefix=80, ragged=ragged)
    inputs = cases.make(c)
    o, lse = run(c, inputs, "torch")
    row = 0
    if where == "pages":
        inputs["pages"][inputs["page_table"][row, 4], 2] = np.nan  # the fifth page is not shared
    else:
        inputs[where][row, 3] = np.nan
    o_nan, lse_nan = run(c, inputs, "torch")
    assert np.isnan(o_nan[row]).any()
    np.testing.assert_array_equal(o_nan[1:], o[1:])
    np.testing.assert_array_equal(lse_nan[1:], lse[1:])
    assert np.isfinite(o_nan[1:]).all()


def test_nan_does_not_reach_inert_slots_of_its_request():
    c = case(B=2, T=9)
    inputs = {**cases.make(c), "n_slots": np.array([9, 4], np.int32)}
    inputs["tree_kv"][:, 0] = np.nan
    o, lse = run(c, inputs, "torch")
    assert (o[1, 4:] == 0).all()
    assert np.isneginf(lse[1, 4:]).all()


@IMPLS
def test_a_slot_that_sees_nothing_gives_zero(impl):
    c = case(T=5, prefix=0)
    inputs = cases.make(c)
    inputs["ancestors"][:, 2] = 0
    o, lse = run(c, inputs, impl)
    assert (o[0, 2] == 0).all()
    assert np.isneginf(lse[0, 2]).all()
    assert np.isfinite(lse[0, [0, 1, 3, 4]]).all()


def test_page_size_does_not_matter():
    c = case(B=2, T=9, prefix=130)
    inputs = cases.make(c)
    prefix = np.stack([inputs["pages"][inputs["page_table"][b, :9]].reshape(-1, 24)[:130] for b in range(2)])
    want = run(c, inputs, "ref")
    for page in (16, 32, 64):
        n = -(-130 // page)
        pool = np.full((2 * n + 1, page, 24), np.nan)
        table = c.rng.permutation(2 * n).reshape(2, n).astype(np.int32)
        for b in range(2):
            for p in range(130):
                pool[table[b, p // page], p % page] = prefix[b, p]
        cases.compare(c, run(c, {**inputs, "pages": pool, "page_table": table}, "torch"), want)


def test_where_a_key_lies_hardly_changes_a_bit():
    """Weights are rounded to 16 bits relative to a power of two, so all orders of blocks round them alike."""
    axes = {"H": 4, "R": 64, "P": 16, "prefix": 200, "dtype": "float16", "tree": "chain"}
    in_tree = case(T=24, **axes)
    inputs = cases.make(in_tree)
    o, _ = run(in_tree, inputs, "triton")
    prefix = inputs["pages"][inputs["page_table"][0, :13]].reshape(-1, 80)[:200]
    pages = np.zeros((14 * 16, 80), prefix.dtype)
    pages[:223] = np.concatenate([prefix, inputs["tree_kv"][0, :23]])
    alone = {
        **take_slots(inputs, [23]),
        "ancestors": chain(1),
        "pages": pages.reshape(14, 16, 80),
        "page_table": np.arange(14, dtype=np.int32)[None],
        "prefix_len": np.array([223], np.int32),
    }
    o_alone, _ = run(case(T=1, **axes | {"prefix": 223}), alone, "triton")
    assert (o[0, 23] == o_alone[0, 0]).mean() > 0.99


def test_strided_inputs():
    c = case(B=2, T=9, ragged=1)
    inputs = torch_inputs(c, cases.make(c), "cpu")
    want = verify_attn(**inputs)
    layers = torch.full((3, *inputs["pages"].shape), torch.nan, dtype=torch.float64)
    layers[1] = inputs["pages"]
    strided = {
        "pages": layers[1],
        "q": inputs["q"].transpose(1, 2).contiguous().transpose(1, 2),
        "tree_kv": torch.stack([inputs["tree_kv"]] * 2, 2)[:, :, 0],
        "page_table": inputs["page_table"].T.contiguous().T,
    }
    for got, w in zip(verify_attn(**{**inputs, **strided}), want, strict=True):
        torch.testing.assert_close(got, w)


def test_inputs_are_not_written():
    c = case(B=3, T=9, ragged=1)
    inputs = torch_inputs(c, cases.make(c), "cpu")
    before = {k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    verify_attn(**inputs)
    for name, tensor in before.items():
        torch.testing.assert_close(inputs[name], tensor, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", cases.TOLERANCE)
@pytest.mark.parametrize("mistake", ["one key less", "one key more", "sibling seen", "scale"])
def test_tolerances_catch_mistakes(mistake, dtype):
    c = case(B=2, T=9, tree="star", prefix=60, dtype=dtype, H=8)
    inputs = cases.make(c)
    inputs["pages"] = np.nan_to_num(inputs["pages"], nan=0.5, posinf=0.5, neginf=0.5)
    inputs["pages"] = np.clip(inputs["pages"], -4, 4)
    want = run(c, inputs, "ref")
    if mistake == "sibling seen":
        inputs["ancestors"] = inputs["ancestors"] | np.int64(2)
    elif mistake == "scale":
        inputs["scale"] *= 1.01
    else:
        inputs["prefix_len"] = inputs["prefix_len"] + np.int32(1 if mistake == "one key more" else -1)
    with pytest.raises(Mismatch):
        cases.compare(c, run(c, inputs, "torch"), want)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("page_table", lambda a: a - 1000, "`page_table` row 0: page must be in"),
        ("n_slots", lambda a: a + np.array([0, 1], np.int32), "`n_slots` row 1: must be in 0..9, got 10"),
        ("prefix_len", lambda a: a * 0 - 1, "`prefix_len` row 0"),
        ("prefix_len", lambda a: a + 1000, "`prefix_len` row 0"),
        ("tree_kv", lambda a: a[:, :-1], "`tree_kv`: expected"),
        ("ancestors", lambda a: a.astype(np.int32), "`ancestors`: expected int64"),
        ("pages", lambda a: a[:, :10], "`pages`: page size must be one of"),
        ("value_dim", lambda a: a + 100, "`value_dim`"),
    ],
)
def test_check_names_input_and_row(field, change, message):
    c = case(B=2, T=9)
    inputs = cases.make(c)
    cases.check(c, inputs)
    with pytest.raises(CaseError, match=message):
        cases.check(c, {**inputs, field: change(inputs[field])})


@settings(max_examples=40, deadline=None)
@given(
    axes=st.fixed_dictionaries(
        {
            "B": st.integers(1, 5),
            "T": st.integers(1, 70),
            "H": st.integers(1, 3),
            "prefix": st.integers(0, 90),
            "page": st.sampled_from([16, 32, 64]),
            "R": st.integers(1, 9),
            "P": st.integers(0, 5),
            "ragged": st.integers(0, 1),
            "tree": st.sampled_from(["random", "chain", "star"]),
            "dtype": st.sampled_from(["float32", "float64"]),
        }
    ),
    seed=st.integers(0, 10_000),
)
def test_any_case(axes, seed):
    verify(make_case("verify_attn", cases.DEFAULTS, seed=seed, **axes), "torch")


def test_work_model_of_a_shape_done_by_hand():
    c = make_case("verify_attn", cases.DEFAULTS, B=8, T=33, H=64, prefix=4096)
    assert cases.flops(c) == 8 * 33 * 64 * (4096 + 33) * 2 * 1088
    latents, q, o, lse = 8 * 4129 * 576 * 2, 8 * 33 * 64 * 576 * 2, 8 * 33 * 64 * 512 * 2, 8 * 33 * 64 * 4
    assert cases.bytes_moved(c) == latents + q + o + lse
