"""`tree_accept` against a walk over child dictionaries, and what ends a request."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.kernels.run_case import to_numpy, to_torch
from draftwood.kernels.tree_accept import Accepted, Done, Limits, tree_accept
from draftwood.kernels.tree_accept.cases import choices, garbage_tree, random_tree
from draftwood.tree import DraftTree, Status, from_parents, root_only

EDGES = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129)
FAR = 10**6


def limits(B, stop=(), max_new=FAR, context_left=FAR):
    return Limits(
        np.broadcast_to(np.array(stop, np.int32), (B, len(stop))).copy(),
        np.full(B, max_new, np.int32),
        np.full(B, context_left, np.int32),
    )


def both(tree, choice, bounds=None, max_depth=200) -> Accepted:
    """The reference's result, after checking that torch gives the same."""
    bounds = bounds or limits(tree.B)
    choice = np.asarray(choice, np.int32)
    want = tree_accept(tree, choice, bounds, max_depth=max_depth)
    inputs = (to_torch(value, "cpu") for value in (tree, choice, bounds))
    got = to_numpy(tree_accept(*inputs, max_depth=max_depth))
    for f in fields(Accepted):
        a, b = getattr(got, f.name), getattr(want, f.name)
        assert a.dtype == b.dtype == np.int32
        np.testing.assert_array_equal(a, b, err_msg=f.name)
    return want


def emitted(tree, accepted, b=0):
    n = accepted.n_path[b]
    return [*tree.tokens[b, accepted.path[b, 1:n]].tolist(), int(accepted.bonus[b])]


def walk(tree: DraftTree, choice, b: int) -> list[int]:
    """Accepted slots by following a dictionary of children."""
    children: dict[tuple[int, int], int] = {}
    for i in range(1, int(tree.n_slots[b])):
        children[int(tree.parents[b, i]), int(tree.tokens[b, i])] = i
    path = [0]
    while (following := children.get((path[-1], int(choice[b, path[-1]])))) is not None:
        path.append(following)
    return path


@st.composite
def decided_trees(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    T, D = draw(st.sampled_from(EDGES)), draw(st.sampled_from([0, 1, 3, 7, 200]))
    tree = random_tree(rng, draw(st.integers(1, 3)), T, D, draw(st.sampled_from(["random", "chain", "star"])))
    return tree, choices(rng, tree, draw(st.sampled_from([0.0, 0.7, 1.0])))


@given(decided_trees())
@settings(max_examples=150, deadline=None)
def test_equals_the_walk_over_children(decided):
    tree, choice = decided
    accepted = both(tree, choice)
    for b in range(tree.B):
        path = walk(tree, choice, b)
        assert accepted.n_path[b] == len(path)
        assert accepted.path[b, : len(path)].tolist() == path
        assert (accepted.path[b, len(path) :] == -1).all()
        assert accepted.bonus[b] == choice[b, path[-1]]
        assert accepted.done[b] == Done.RUNNING


@given(decided_trees(), st.integers(0, 9))
@settings(max_examples=50, deadline=None)
def test_paths_are_cut_to_max_depth(decided, max_depth):
    tree, choice = decided
    accepted = both(tree, choice, max_depth=max_depth)
    for b in range(tree.B):
        path = walk(tree, choice, b)[: max_depth + 1]
        assert accepted.path[b, : accepted.n_path[b]].tolist() == path
        assert accepted.bonus[b] == choice[b, path[-1]]


@given(st.integers(0, 2**32), st.integers(1, 40))
@settings(max_examples=80, deadline=None)
def test_a_larger_tree_never_accepts_less(seed, keep):
    """Greedy law: choices depend on the text before them alone, so a tree accepts at least what any subtree does."""
    rng = np.random.default_rng(seed)
    large = random_tree(rng, 1, 40, 7)
    choice = choices(rng, large, 0.9)
    n, kept = int(large.n_slots[0]), [0]
    for i in range(1, n):  # an ancestor-closed subset, not just a prefix
        if int(large.parents[0, i]) in kept and len(kept) < keep and rng.random() < 0.8:
            kept.append(i)
    parents = [-1] + [kept.index(int(large.parents[0, i])) for i in kept[1:]]
    small = from_parents(large.tokens[:, kept], [parents], [len(kept)])
    few, many = both(small, choice[:, kept]), both(large, choice)
    assert few.n_path[0] <= many.n_path[0]
    assert emitted(large, many)[: few.n_path[0]] == emitted(small, few)


def chain(tokens):
    return from_parents([tokens], [np.arange(len(tokens)) - 1], [len(tokens)])


CHAIN = chain([90, 10, 11, 12, 13, 14, 15, 16])
TEXT = [10, 11, 12, 13, 14, 15, 16, 17]
"""What the target says after the root of CHAIN: all seven drafts, and the bonus."""


@pytest.mark.parametrize("max_new", range(1, 10))
@pytest.mark.parametrize("kind", ["max_new", "context_left"])
def test_limits_are_exact(max_new, kind):
    accepted = both(CHAIN, [TEXT], limits(1, **{kind: max_new}), max_depth=7)
    kept = min(max_new, 8)
    assert emitted(CHAIN, accepted) == TEXT[:kept]
    ended = Done.LENGTH if kind == "max_new" else Done.CONTEXT
    assert accepted.done[0] == (ended if max_new <= 8 else Done.RUNNING)
    assert accepted.path[0].tolist() == list(range(kept)) + [-1] * (8 - kept)


def test_length_wins_over_context_when_both_are_reached():
    assert both(CHAIN, [TEXT], limits(1, max_new=3, context_left=3)).done[0] == Done.LENGTH
    assert both(CHAIN, [TEXT], limits(1, max_new=4, context_left=3)).done[0] == Done.CONTEXT


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("cap", [1, 3, 5, 8, FAR])
def test_each_emitted_token_in_turn_as_stop(at, cap):
    accepted = both(CHAIN, [TEXT], limits(1, stop=(-1, TEXT[at], 999), max_new=cap))
    kept = min(at + 1, cap)
    assert emitted(CHAIN, accepted) == TEXT[:kept]
    # a stop token on the very last token allowed is a stop, not a length
    assert accepted.done[0] == (Done.STOP if at + 1 <= cap else Done.LENGTH)


def test_the_first_of_several_stops_counts():
    accepted = both(CHAIN, [TEXT], limits(1, stop=(15, 12, 13)))
    assert emitted(CHAIN, accepted) == TEXT[:3]
    assert accepted.done[0] == Done.STOP


def test_root_and_padding_are_no_stops():
    assert both(CHAIN, [TEXT], limits(1, stop=(90, -1))).done[0] == Done.RUNNING
    assert both(root_only([7]), [[-1]], limits(1, stop=(-1,))).done[0] == Done.FAILED


def test_limits_belong_to_their_rows():
    tree = DraftTree(*(np.repeat(getattr(CHAIN, f.name), 3, 0) for f in fields(DraftTree)))
    stop_ids = np.array([[-1], [12], [10]], np.int32)
    bounds = Limits(stop_ids, np.array([2, 9, 9], np.int32), np.array([9, 9, 9], np.int32))
    accepted = both(tree, [TEXT] * 3, bounds)
    assert accepted.n_path.tolist() == [2, 3, 1]
    assert accepted.done.tolist() == [Done.LENGTH, Done.STOP, Done.STOP]


def test_a_single_slot_is_plain_decoding():
    accepted = both(root_only([4, 5]), [[8], [9]], max_depth=0)
    assert accepted.path.tolist() == [[0], [0]]
    assert accepted.bonus.tolist() == [8, 9]


def test_bit_63():
    T = 70
    tree = chain(list(range(100, 100 + T)))
    assert tree.ancestors[0, 63, 0] < 0
    accepted = both(tree, [np.arange(101, 101 + T)], max_depth=T)
    assert accepted.n_path[0] == T


def test_adding_a_sibling_before_the_path_changes_only_slot_numbers():
    tree = from_parents([[1, 5, 2, 6, 3]], [[-1, 0, 0, 1, 2]], [5])
    accepted = both(tree, [[2, 0, 3, 0, 4]], max_depth=2)
    assert accepted.path.tolist() == [[0, 2, 4]]
    assert emitted(tree, accepted) == [2, 3, 4]


def test_an_unsound_row_is_root_only():
    accepted = both(replace(CHAIN, status=np.array([Status.BAD_PARENT], np.int32)), [TEXT])
    assert accepted.n_path.tolist() == [1]
    assert accepted.bonus.tolist() == [10]


@pytest.mark.parametrize("T", [8, 64, 65])
def test_padding_changes_nothing(T):
    rng = np.random.default_rng(T)
    exact = random_tree(rng, 1, 8, 7)
    choice = choices(rng, exact, 0.9)
    wide = from_parents(
        np.pad(exact.tokens, ((0, 0), (0, T - 8))), np.pad(exact.parents, ((0, 0), (0, T - 8))), exact.n_slots
    )
    garbage = {
        "tokens": rng.integers(-5, 50, (1, T)).astype(np.int32),
        "parents": rng.integers(-5, T + 5, (1, T)).astype(np.int32),
        "ancestors": rng.integers(-(2**63), 2**63, wide.ancestors.shape, dtype=np.int64),
    }
    past = np.arange(T) >= exact.n_slots[0]
    wide = replace(
        wide,
        **{
            name: np.where(past[None, :, None] if value.ndim == 3 else past, value, getattr(wide, name))
            for name, value in garbage.items()
        },
    )
    padded_choice = np.pad(choice, ((0, 0), (0, T - 8)), constant_values=-7)
    got, want = both(wide, padded_choice, max_depth=7), both(exact, choice, max_depth=7)
    for f in fields(Accepted):
        np.testing.assert_array_equal(getattr(got, f.name), getattr(want, f.name))


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 8, 64, 65]))
@settings(max_examples=100, deadline=None)
def test_any_bits_end_within_their_row(seed, T):
    """Absent parents, cycles, wild bits and counts: a result in range, and sound neighbours undisturbed."""
    rng = np.random.default_rng(seed)
    bad, good = garbage_tree(rng, 3, T), random_tree(rng, 3, T, 7)
    mixed = DraftTree(
        *(
            np.where(np.array([1, 0, 1]).reshape(-1, *[1] * (getattr(good, f.name).ndim - 1)), good_, bad_)
            for f in fields(DraftTree)
            for good_, bad_ in [(getattr(good, f.name), getattr(bad, f.name))]
        )
    )
    choice = rng.integers(-2, 4, (3, T)).astype(np.int32)
    accepted = both(mixed, choice, max_depth=5)
    assert ((accepted.n_path >= 1) & (accepted.n_path <= min(T, 6))).all()
    assert ((accepted.path >= -1) & (accepted.path < T)).all()
    assert (accepted.path[:, 0] == 0).all()
    alone = both(good, choice, max_depth=5)
    for f in fields(Accepted):
        a, b = getattr(accepted, f.name), getattr(alone, f.name)
        np.testing.assert_array_equal(a[[0, 2]], b[[0, 2]])


@pytest.mark.parametrize("parents", [[-1, 2, 1, 1], [-1, 1, 2, 3], [-1, 9, -2, 2**31 - 1]])
def test_cycles_self_loops_and_absent_parents_finish(parents):
    tree = from_parents([[1, 2, 3, 4]], [[-1, 0, 1, 2]], [4])
    tree = replace(tree, parents=np.array([parents], np.int32))
    assert both(tree, [[2, 3, 4, 5]]).n_path[0] >= 1


@pytest.mark.parametrize("cap", [1, 3, 8, 9])
def test_a_path_that_ends_without_a_choice_fails_unless_cut_before(cap):
    text = [*TEXT[:7], -1]
    accepted = both(CHAIN, [text], limits(1, max_new=cap), max_depth=7)
    assert accepted.done[0] == (Done.LENGTH if cap < 8 else Done.FAILED)
    assert emitted(CHAIN, accepted) == text[: min(cap, 8)]
    stopped = both(CHAIN, [text], limits(1, stop=(TEXT[0],)), max_depth=7)
    assert stopped.done[0] == Done.STOP


def test_no_choice_off_the_path_is_no_failure():
    choice = [TEXT[0], 99, *[-1] * 6]
    accepted = both(CHAIN, [choice], max_depth=7)
    assert (accepted.done[0], emitted(CHAIN, accepted)) == (Done.RUNNING, [TEXT[0], 99])
