"""`DraftTree`: its invariants hold for every sound tree, and `check` finds and names each one broken."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.kernels.tree_accept.cases import random_tree
from draftwood.tree import DraftTree, Status, TreeError, from_parents, n_words, root_only

EDGES = (1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130)


@st.composite
def trees(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    B, T, D = draw(st.integers(1, 3)), draw(st.sampled_from(EDGES)), draw(st.sampled_from([0, 1, 7, 200]))
    return random_tree(rng, B, T, D, draw(st.sampled_from(["random", "chain", "star"])))


def assert_same(got: DraftTree, want: DraftTree):
    for f in fields(DraftTree):
        np.testing.assert_array_equal(getattr(got, f.name), getattr(want, f.name), err_msg=f.name)


@given(trees())
@settings(max_examples=60, deadline=None)
def test_sound_trees_pass_and_depths_count_ancestors(tree):
    tree.check(vocab_size=50)
    bits = np.unpackbits(tree.ancestors.view(np.uint8), axis=-1, bitorder="little")[:, :, : tree.T]
    live = np.arange(tree.T) < tree.n_slots[:, None]
    np.testing.assert_array_equal(bits.sum(-1), np.where(live, tree.depths + 1, 0))
    packed = np.packbits(np.pad(bits, ((0, 0), (0, 0), (0, -tree.T % 64))), axis=-1, bitorder="little")
    np.testing.assert_array_equal(packed.view(np.int64), tree.ancestors)


@given(trees(), st.data())
@settings(max_examples=40, deadline=None)
def test_any_prefix_of_the_slots_is_a_tree(tree, data):
    T = data.draw(st.integers(1, tree.T))
    short = tree.truncated(T)
    short.check()
    assert short.ancestors.shape[2] == n_words(T)
    assert_same(tree.torch().truncated(T).numpy(), short)


@given(trees())
@settings(max_examples=20, deadline=None)
def test_torch_and_back(tree):
    there = tree.torch()
    assert all(isinstance(getattr(there, f.name), torch.Tensor) for f in fields(DraftTree))
    there.check()
    assert_same(there.numpy(), tree)
    assert (there.B, there.T) == (tree.B, tree.T)


@pytest.mark.parametrize("T", EDGES)
@pytest.mark.parametrize("shape", ["chain", "star"])
def test_full_chains_and_stars(T, shape):
    slots = np.arange(T)
    parents = slots - 1 if shape == "chain" else np.where(slots > 0, 0, -1)
    tree = from_parents(slots[None], parents[None], [T])
    tree.check()
    assert tree.depths[0, -1] == (T - 1 if shape == "chain" else min(T - 1, 1))


def test_bit_63_is_the_sign_bit():
    chain = from_parents(np.arange(65)[None], np.arange(65)[None] - 1, [65])
    chain.check()
    assert chain.ancestors[0, 63, 0] == -1
    assert chain.ancestors[0, 64].tolist() == [-1, 1]
    lost = chain.ancestors.copy()
    lost[0, 63, 0] = 2**63 - 1
    with pytest.raises(TreeError, match="row 0, slot 63: ancestors"):
        replace(chain, ancestors=lost).check()


def test_root_only_pads_to_any_bucket():
    for T in (1, 8, 16, 32, 64, 128):
        tree = root_only([5, 6], T)
        tree.check()
        assert tree.n_slots.tolist() == [1, 1]
        assert tree.tokens[:, 0].tolist() == [5, 6]


def two_trees() -> DraftTree:
    """Row 1: a root with children 1 and 2, of which 1 has 3 and 4; slots 5 to 7 are inert."""
    tokens = [[7, 1, 0, 0, 0, 0, 0, 0], [7, 3, 4, 3, 9, 0, 0, 0]]
    parents = [[-1, 0] + [-1] * 6, [-1, 0, 0, 1, 1, -1, -1, -1]]
    return from_parents(tokens, parents, [2, 5], np.linspace(0, -1, 8)[None].repeat(2, 0))


@pytest.mark.parametrize(
    ("field", "at", "value", "slot", "rule"),
    [
        ("tokens", 4, 3, 4, "token 3 appears twice among the children of slot 1"),
        ("tokens", 2, -1, 2, "token must be in 0..9, got -1"),
        ("tokens", 2, 10, 2, "token must be in 0..9, got 10"),
        ("tokens", 6, 1, 6, "inert"),
        ("parents", 0, 0, 0, "the root's parent must be -1, got 0"),
        ("parents", 3, 3, 3, "parent must be in 0..2, got 3"),
        ("parents", 3, 4, 3, "parent must be in 0..2, got 4"),
        ("parents", 3, -1, 3, "parent must be in 0..2, got -1"),
        ("parents", 3, 2**31 - 1, 3, "parent must be in 0..2"),
        ("parents", 4, 2, 4, "ancestors"),  # a legal parent, but not the one the other fields tell of
        ("parents", 5, 0, 5, "inert"),
        ("depths", 0, 1, 0, "depth must be 0, got 1"),
        ("depths", 4, 1, 4, "depth must be 2, got 1"),
        ("depths", 7, 1, 7, "inert"),
        ("scores", 2, np.nan, 2, "score"),
        ("scores", 2, 0.5, 2, "score"),
        ("scores", 5, 0.0, 5, "inert"),
        ("ancestors", (3, 0), 0b1001, 3, "ancestors"),
        ("ancestors", (3, 0), 0b1011 | -(2**63), 3, "ancestors"),
        ("ancestors", (0, 0), 0, 0, "ancestors"),
        ("ancestors", (7, 0), 1, 7, "inert"),
        ("n_slots", (), 0, 0, "n_slots must be in 1..8, got 0"),
        ("n_slots", (), 9, 0, "n_slots must be in 1..8, got 9"),
        ("n_slots", (), 4, 4, "inert"),
        ("n_slots", (), 6, 5, "parent must be in 0..4, got -1"),
        ("status", (), Status.BAD_SCORE, 0, "status is BAD_SCORE"),
    ],
)
def test_check_names_row_slot_and_rule(field, at, value, slot, rule):
    tree = two_trees()
    tree.check(vocab_size=10)
    index = (1, *at) if isinstance(at, tuple) else (1, at)
    getattr(tree, field)[index] = value
    with pytest.raises(TreeError) as error:
        tree.check(vocab_size=10)
    assert (error.value.row, error.value.slot) == (1, slot)
    assert rule in str(error.value)
    assert f"row 1, slot {slot}:" in str(error.value)


@pytest.mark.parametrize("field", [f.name for f in fields(DraftTree)])
def test_check_names_a_field_of_wrong_type(field):
    tree = two_trees()
    with pytest.raises(ValueError, match=f"`{field}`"):
        replace(tree, **{field: getattr(tree, field).astype(np.float16)}).check()
    if field != "tokens":
        with pytest.raises(ValueError, match=f"`{field}`"):
            replace(tree, **{field: getattr(tree, field)[:1]}).check()


def test_scores_need_not_descend():
    from_parents([[1, 2, 3]], [[-1, 0, 0]], [3], np.array([[0.0, -5.0, -1.0]])).check()


@pytest.mark.parametrize(
    ("parents", "n_slots", "slot"),
    [([-1, 1, 0], 3, 1), ([-1, 2, 1], 3, 1), ([-1, 0, -1], 3, 2), ([-1, 0, 0], 0, 0), ([-1, 0, 0], 4, 0)],
)
def test_from_parents_refuses(parents, n_slots, slot):
    with pytest.raises(TreeError, match=f"row 1, slot {slot}"):
        from_parents([[1, 2, 3]] * 2, [[-1, 0, 0], parents], [3, n_slots])


def test_from_parents_resets_inert_slots():
    tree = from_parents([[1, 2, 77, 78]], [[5, 0, 9, -9]], [2], np.array([[0.0, -1.0, np.nan, 3.0]]))
    tree.check()


@pytest.mark.parametrize("T", [0, 9, -1])
def test_truncated_refuses(T):
    with pytest.raises(ValueError, match=rf"T must be in 1\.\.8, got {T}"):
        two_trees().truncated(T)
