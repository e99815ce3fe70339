"""`tree_build` against searches written independently, and its edges."""

from __future__ import annotations

from dataclasses import fields
from heapq import heappop, heappush
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.kernels.tree_build import tree_build
from draftwood.kernels.tree_build.cases import candidates
from draftwood.tree import DraftTree, Status

F32 = np.float32
EDGES = (1, 2, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130)


def both(root, lp, ids, budget, min_score=None, slots=None):
    """The reference's tree, after checking that it is sound and that torch gives the same bits."""
    arrays = {
        "root": np.asarray(root, np.int32),
        "lp": np.asarray(lp, F32),
        "ids": np.asarray(ids, np.int32),
        "budget": np.asarray(budget, np.int32),
        "min_score": np.full(len(root), -np.inf, F32) if min_score is None else np.asarray(min_score, F32),
    }
    slots = max(1, int(np.max(budget))) if slots is None else slots
    tree = tree_build(**arrays, slots=slots)
    assert_same(tree_build(**{k: torch.from_numpy(v) for k, v in arrays.items()}, slots=slots).numpy(), tree)
    return tree


def assert_same(got: DraftTree, want: DraftTree):
    for f in fields(DraftTree):
        a, b = getattr(got, f.name), getattr(want, f.name)
        assert a.dtype == b.dtype, f.name
        np.testing.assert_array_equal(a, b, err_msg=f.name)


def row(tree: DraftTree, b: int) -> DraftTree:
    return DraftTree(*(getattr(tree, f.name)[b : b + 1] for f in fields(DraftTree)))


def best_first(lp, ids, budget, min_score):
    """(token, parent, score) per slot, by a heap over rank tuples in the manner of DDTree."""
    D, K = lp.shape
    nodes, slot_of = [], {(): 0}
    score_of = {(): F32(0)}
    heap: list = []

    def push(ranks):
        if len(ranks) <= D and ranks[-1] < K:
            score = F32(score_of[ranks[:-1]] + lp[len(ranks) - 1, ranks[-1]])
            heappush(heap, (-float(score), slot_of[ranks[:-1]], ranks[-1], ranks, score))

    push((0,))
    while heap and len(nodes) + 1 < budget:
        _, parent, rank, ranks, score = heappop(heap)
        if score == -np.inf or score < min_score:
            break
        nodes.append((int(ids[len(ranks) - 1, rank]), parent, float(score)))
        slot_of[ranks], score_of[ranks] = len(nodes), score
        push((*ranks[:-1], rank + 1))
        push((*ranks, 0))
    return nodes


@st.composite
def problems(draw):
    B, D, K = draw(st.integers(1, 3)), draw(st.integers(0, 6)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = draw(st.sampled_from(["random", "ties", "chain", "thin"]))
    lp, ids = candidates(rng, B, D, K, values)
    slots = draw(st.sampled_from(EDGES))
    budget = rng.integers(-1, slots + 3, B)
    floor = draw(st.sampled_from([-np.inf, -6.0, -2.0, 0.0]))
    return rng.integers(0, 99, B), lp, ids, budget, np.full(B, floor), slots


@given(problems())
@settings(max_examples=200, deadline=None)
def test_equals_heap_search(problem):
    root, lp, ids, budget, floor, slots = problem
    tree = both(root, lp, ids, budget, floor, slots)
    tree.check()
    for b in range(tree.B):
        want = best_first(lp[b], ids[b], min(max(budget[b], 1), slots), floor[b])
        n = int(tree.n_slots[b])
        slots_of_row = zip(tree.tokens[b, 1:n], tree.parents[b, 1:n], tree.scores[b, 1:n], strict=True)
        assert [(int(t), int(p), float(s)) for t, p, s in slots_of_row] == want
        assert (np.diff(tree.scores[b, :n]) <= 0).all()


def test_takes_the_best_of_all_nodes():
    """Exhaustive: the slots are the highest-scoring rank tuples there are."""
    D, K, N = 3, 4, 40
    lp, ids = candidates(np.random.default_rng(3), 1, D, K)
    tree = both([0], lp, ids, [N])
    everything = []
    for depth in range(1, D + 1):
        for ranks in product(range(K), repeat=depth):
            score = F32(0)
            for d, r in enumerate(ranks):
                score = F32(score + lp[0, d, r])
            everything.append(score)
    np.testing.assert_array_equal(tree.scores[0, 1:], np.sort(everything)[::-1][: N - 1])


@pytest.mark.parametrize("slots", EDGES)
def test_ancestors_unpack_to_the_parent_walk(slots):
    lp, ids = candidates(np.random.default_rng(slots), 3, 7, 32)
    tree = both([1, 2, 3], lp, ids, [slots, max(1, slots // 2), 1], slots=slots)
    for b in range(3):
        n = int(tree.n_slots[b])
        bits = np.unpackbits(tree.ancestors[b].view(np.uint8), axis=1, bitorder="little")[:, :slots]
        for i in range(slots):
            walk, j = set(), i
            while i < n and j != -1:
                walk.add(j)
                j = int(tree.parents[b, j])
            assert set(np.flatnonzero(bits[i])) == walk
            assert tree.depths[b, i] == max(len(walk) - 1, 0)
    if slots > 64:
        assert (tree.ancestors[0, 63:, 0] < 0).any(), "bit 63 is in use"


@pytest.mark.parametrize("budget", [-5, 0, 1])
def test_no_budget_means_root_only(budget):
    lp, ids = candidates(np.random.default_rng(0), 1, 3, 4)
    tree = both([17], lp, ids, [budget], slots=8)
    tree.check()
    assert tree.n_slots.tolist() == [1]
    assert tree.tokens[0].tolist() == [17] + [0] * 7


def test_budget_beyond_the_nodes_that_exist():
    lp, ids = candidates(np.random.default_rng(0), 1, 2, 3)
    assert both([1], lp, ids, [128]).n_slots.tolist() == [1 + 3 + 9]


def test_no_depths_and_one_token_vocabulary():
    assert both([4], np.zeros((1, 0, 3)), np.zeros((1, 0, 3)), [9]).n_slots.tolist() == [1]
    tree = both([0], np.zeros((1, 5, 1)), np.zeros((1, 5, 1)), [9])
    assert tree.n_slots.tolist() == [6]
    assert tree.parents[0, :6].tolist() == [-1, 0, 1, 2, 3, 4]


def test_width_one_is_the_chain():
    lp, ids = candidates(np.random.default_rng(1), 1, 7, 32)
    tree = both([1], lp[..., :1], ids[..., :1], [8])
    assert tree.parents[0].tolist() == [-1, 0, 1, 2, 3, 4, 5, 6]
    assert tree.tokens[0, 1:].tolist() == ids[0, :, 0].tolist()


def test_one_depth_is_the_star():
    lp, ids = candidates(np.random.default_rng(1), 1, 1, 32)
    tree = both([1], lp, ids, [33])
    assert tree.parents[0, 1:].tolist() == [0] * 32
    assert tree.tokens[0, 1:].tolist() == ids[0, 0].tolist()


def test_ties_prefer_the_smaller_parent_then_the_smaller_rank():
    tree = both([9], np.full((1, 2, 3), -1.0), [[[5, 6, 7], [5, 6, 7]]], [13])
    assert tree.parents[0, 1:].tolist() == [0, 0, 0] + [1] * 3 + [2] * 3 + [3] * 3
    certain = both([9], np.zeros((1, 2, 2)), [[[5, 6], [7, 8]]], [7])
    assert certain.parents[0, 1:].tolist() == [0, 0, 1, 1, 2, 2]


def test_same_token_under_different_parents_is_no_duplicate():
    tree = both([5], np.log(np.full((1, 3, 2), 0.5)), np.broadcast_to([5, 6], (1, 3, 2)), [15])
    tree.check()
    assert tree.n_slots.tolist() == [15]


@pytest.mark.parametrize(
    ("spoil", "status"),
    [
        (lambda lp, ids: lp.__setitem__((1, 2, 3), np.nan), Status.BAD_SCORE),
        (lambda lp, ids: lp.__setitem__((1, 4, 0), np.nan), Status.BAD_SCORE),
        (lambda lp, ids: lp.__setitem__((1, 0, 0), 1e-6), Status.BAD_SCORE),
        (lambda lp, ids: lp.__setitem__((1, 0, 0), np.inf), Status.BAD_SCORE),
        (lambda lp, ids: lp.__setitem__((1, 4, 5), lp[1, 4, 4] + 0.5), Status.BAD_SCORE),
        (lambda lp, ids: ids.__setitem__((1, 4, 5), ids[1, 4, 0]), Status.BAD_TOKEN),
        (lambda lp, ids: ids.__setitem__((1, 0, 0), -3), Status.BAD_TOKEN),
    ],
)
def test_an_unsound_row_is_root_only_and_leaves_its_neighbours_alone(spoil, status):
    lp, ids = candidates(np.random.default_rng(2), 3, 5, 6)
    sound = both([1, 2, 3], lp, ids, [30] * 3)
    spoil(lp, ids)
    tree = both([1, 2, 3], lp, ids, [30] * 3)
    assert tree.status.tolist() == [0, status, 0]
    assert tree.n_slots.tolist() == [30, 1, 30]
    for b in (0, 2):
        assert_same(row(tree, b), row(sound, b))
    with pytest.raises(ValueError, match=f"row 1, slot 0: status is {status.name}"):
        tree.check()


def test_impossible_candidates_are_never_taken_and_may_repeat():
    lp = np.array([[[-0.1, -np.inf, -np.inf], [-np.inf] * 3]])
    tree = both([1], lp, [[[4, 4, -1], [0, 0, 0]]], [10])
    tree.check()
    assert tree.n_slots.tolist() == [2]


def test_sums_below_fp32_are_impossible():
    lowest = np.finfo(F32).min
    tree = both([1], [[[-1.0, lowest], [lowest, lowest]]], [[[1, 2], [3, 4]]], [10])
    assert tree.n_slots.tolist() == [5]  # lowest + lowest is -inf, -1 + lowest rounds to lowest


def test_rows_do_not_depend_on_their_batch():
    rng = np.random.default_rng(4)
    lp, ids = candidates(rng, 3, 5, 8, "ties")
    budget = [5, 33, 64]
    together = both([1, 2, 3], lp, ids, budget)
    for b in range(3):
        alone = both([b + 1], lp[b : b + 1], ids[b : b + 1], [budget[b]], slots=64)
        assert_same(row(together, b), alone)


def test_a_smaller_budget_gives_a_prefix():
    lp, ids = candidates(np.random.default_rng(5), 1, 7, 16, "ties")
    large = both([1], lp, ids, [64])
    for n in (1, 2, 33, 63):
        assert_same(both([1], lp, ids, [n], slots=n), large.truncated(n))
