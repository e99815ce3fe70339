"""Child and sibling links: every tree survives the way there and back, and everything else is refused by name."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood import tree_links
from draftwood.kernels.tree_accept.cases import random_tree
from draftwood.tree import TreeError
from draftwood.tree_links import from_links, to_links

TOKENS = [50, 1, 2, 3, 4]
#                 0 -> 1, 2;  1 -> 3, 4
FIRST_CHILD = [1, 3, -1, -1, -1]
NEXT_SIBLING = [-1, 2, -1, 4, -1]


@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 33, 64, 65, 130]),
    st.sampled_from(["random", "chain", "star"]),
)
@settings(max_examples=60, deadline=None)
def test_round_trip(seed, T, shape):
    tree = random_tree(np.random.default_rng(seed), 2, T, 9, shape)
    first_child, next_sibling = to_links(tree)
    back = from_links(tree.tokens, first_child, next_sibling, tree.n_slots, tree.scores)
    for name in ("tokens", "parents", "depths", "scores", "ancestors", "n_slots", "status"):
        np.testing.assert_array_equal(getattr(back, name), getattr(tree, name), err_msg=name)


def test_links_of_a_known_tree():
    tree = from_links([TOKENS], [FIRST_CHILD], [NEXT_SIBLING], [5])
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1]]
    first_child, next_sibling = to_links(tree)
    assert first_child.tolist() == [FIRST_CHILD]
    assert next_sibling.tolist() == [NEXT_SIBLING]
    assert first_child.dtype == next_sibling.dtype == np.int32


def test_sibling_order_is_free_and_padding_unread():
    first_child = [[2, 3, -1, -1, -1, 77]]
    next_sibling = [[-1, -1, 1, 4, -1, -9]]
    tree = from_links([[*TOKENS, 999]], first_child, next_sibling, [5])
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, -1]]
    assert tree.tokens[0, 5] == 0


@pytest.mark.parametrize(
    ("link", "at", "value", "slot", "rule"),
    [
        ("first_child", 1, 1, 1, "must come after its parent"),  # self-loop
        ("next_sibling", 2, 2, 2, "reached twice"),  # self-loop
        ("next_sibling", 4, 3, 4, "reached twice"),  # two-cycle of siblings
        ("first_child", 3, 1, 3, "must come after its parent"),  # two-cycle of parent and child
        ("next_sibling", 4, 1, 4, "must come after its parent"),  # cycle through two levels
        ("first_child", 4, 0, 4, "must come after its parent"),  # cycle through the root
        ("first_child", 2, 3, 2, "reached twice"),  # shared child
        ("first_child", 1, 5, 1, "must be -1 or in 0..4, got 5"),
        ("first_child", 1, -2, 1, "must be -1 or in 0..4, got -2"),
        ("next_sibling", 1, 2**31 - 1, 1, "must be -1 or in 0..4"),
        ("next_sibling", 2, -(2**31), 2, "must be -1 or in 0..4"),
        ("first_child", 1, -1, 3, "no link reaches this live slot"),
        ("next_sibling", 1, -1, 2, "no link reaches this live slot"),
        ("next_sibling", 0, 1, 0, "the root must have no sibling, got 1"),
        ("tokens", 4, 3, 4, "token 3 appears twice among the children of slot 1"),
        ("tokens", 2, -1, 2, "token must be in"),
        ("scores", 2, np.nan, 2, "score"),
        ("n_slots", (), 6, 0, "n_slots must be in 1..5, got 6"),
        ("n_slots", (), 0, 0, "n_slots must be in 1..5, got 0"),
        ("n_slots", (), 4, 3, "must be -1 or in 0..3, got 4"),
    ],
)
def test_malformed_links_name_row_and_slot(link, at, value, slot, rule):
    inputs = {
        "tokens": np.array([TOKENS] * 2, np.int32),
        "first_child": np.array([FIRST_CHILD] * 2, np.int32),
        "next_sibling": np.array([NEXT_SIBLING] * 2, np.int32),
        "n_slots": np.array([5, 5], np.int32),
        "scores": np.zeros((2, 5), np.float32),
    }
    from_links(**inputs)
    inputs[link][(1, *at) if isinstance(at, tuple) else (1, at)] = value
    with pytest.raises(TreeError) as error:
        from_links(**inputs)
    assert (error.value.row, error.value.slot) == (1, slot)
    assert rule in error.value.rule


@pytest.mark.parametrize("length", [2, 7, 64, 1000])
def test_long_cycles(length):
    """A chain whose last slot points back to its first."""
    slots = np.arange(length + 1)
    first_child = np.append(slots[1:], 1)[None]
    with pytest.raises(TreeError, match=f"row 0, slot {length}: first_child 1 must come after its parent"):
        from_links(slots[None], first_child, np.full((1, length + 1), -1), [length + 1])
    next_sibling = np.where(slots == 0, -1, np.append(slots[1:], 1))[None]
    star = np.where(slots == 0, 1, -1)[None]
    with pytest.raises(TreeError, match=f"row 0, slot {length}: next_sibling 1 is reached twice"):
        from_links(slots[None], star, next_sibling, [length + 1])


@pytest.mark.parametrize("name", ["first_child", "next_sibling", "scores", "n_slots"])
def test_wrong_shapes_are_named(name):
    shapes = {"first_child": (2, 3), "next_sibling": (2, 3), "scores": (2, 3), "n_slots": (2,)}
    shapes[name] = (3,)
    arrays = {n: np.zeros(shape, np.int32) for n, shape in shapes.items()}
    with pytest.raises(ValueError, match=name):
        from_links(np.zeros((2, 3), np.int32), **arrays)


def test_to_links_refuses_an_unsound_tree():
    tree = from_links([TOKENS], [FIRST_CHILD], [NEXT_SIBLING], [5])
    tree.parents[0, 4] = 99
    with pytest.raises(TreeError, match="row 0, slot 4"):
        to_links(tree)


class CountingList(list):
    """Counts single reads."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


def random_links(rng: np.random.Generator, B: int, T: int) -> dict[str, np.ndarray]:
    """One in ten valid, half valid but for an entry or two, the rest arbitrary."""
    slots = np.arange(T)
    parents = np.where(slots > 0, (rng.random((B, T)) * slots).astype(int), -1)
    n_slots = np.where(rng.random(B) < 0.9, rng.integers(1, T + 1, B), rng.integers(-1, T + 2, B))
    parents[slots >= n_slots[:, None]] = -1
    links = {name: np.full((B, T), -1) for name in ("first_child", "next_sibling")}
    for slot in range(T - 1, 0, -1):
        rows = np.flatnonzero(parents[:, slot] >= 0)
        links["next_sibling"][rows, slot] = links["first_child"][rows, parents[rows, slot]]
        links["first_child"][rows, parents[rows, slot]] = slot
    kind = rng.choice(["valid", "near", "wild"], B, p=[0.1, 0.5, 0.4])[:, None]
    for link in links.values():
        noise = rng.integers(-2, T + 2, (B, T))
        spoilt = (kind == "wild") | ((kind == "near") & (rng.random((B, T)) < 0.3))
        link[spoilt] = noise[spoilt]
    tokens = np.where(rng.random((B, 1)) < 0.9, slots + 5, rng.integers(0, 4, (B, T)))
    return {"tokens": tokens, **links, "n_slots": n_slots}


def test_a_hundred_thousand_random_links():
    B, T = 100_000, 5
    inputs = random_links(np.random.default_rng(0), B, T)
    errors, sound = [], 0
    for b in range(B):
        row = {name: value[b : b + 1] for name, value in inputs.items()}
        try:
            tree = from_links(**row)  # ends with check()
        except TreeError as error:
            errors.append((error.row, error.slot))
            continue
        sound += 1
        if sound % 5 == 0:
            again = from_links(tree.tokens, *to_links(tree), tree.n_slots)
            np.testing.assert_array_equal(again.parents, tree.parents)
            np.testing.assert_array_equal(again.ancestors, tree.ancestors)
    rows, slots = np.array(errors).T
    assert not rows.any()
    assert ((slots >= 0) & (slots < T)).all()
    assert B // 10 < sound < B // 2


def test_the_walk_is_bounded():
    T = 40
    inputs = random_links(np.random.default_rng(1), 2000, T)
    for first_child, next_sibling in zip(inputs["first_child"], inputs["next_sibling"], strict=True):
        first, following = CountingList(first_child.tolist()), CountingList(next_sibling.tolist())
        with suppress(TreeError):
            tree_links._parents(0, first, following)
        assert first.reads <= T
        assert following.reads <= T + 2
