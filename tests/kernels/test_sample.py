"""`sample`: the exact law, the order of its steps, ties, slices, and independence of tree, batch and slot."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from draftwood.kernels.case import make_case
from draftwood.kernels.noise.ref import gumbel
from draftwood.kernels.run_case import to_torch
from draftwood.kernels.sample import SampleParams, cases, ref, sample, torch_impl
from draftwood.tree import Status, from_parents

F32 = np.float32


def params(B, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, **extras):
    with np.errstate(divide="ignore"):
        log_min_p = np.full(B, np.log(min_p), F32)
    return SampleParams(
        np.full(B, temperature, F32), np.full(B, top_k, np.int32), np.full(B, top_p, F32), log_min_p, **extras
    )


def both(logits, p, seed=None, position=None, tree=None):
    """The reference's choice and status, after checking that torch gives the same."""
    logits = np.asarray(logits, F32)
    B, T, _ = logits.shape
    seed = np.arange(B, dtype=np.int64) if seed is None else seed
    position = np.tile(np.arange(1, T + 1, dtype=np.int32), (B, 1)) if position is None else position
    want = sample(logits, p, seed, position, tree)
    got = sample(*(to_torch(a, "cpu") for a in (logits, p, seed, position, tree)))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.numpy(), b)
        assert b.dtype == np.int32
        assert a.dtype == torch.int32
    return want


LOGITS = np.log([0.05, 0.3, 0.2, 0.2, 0.15, 0.1])


def exact_law(temperature, top_k, top_p, min_p):
    """Probability of each of the six tokens, by the textbook definition of each filter."""
    p = np.exp(LOGITS / temperature)
    order = sorted(range(6), key=lambda v: (-LOGITS[v].astype(F32), v))
    if top_k:
        order = order[:top_k]
    mass = p[order] / p[order].sum()
    before = np.cumsum(mass) - mass
    order = [v for v, m, b in zip(order, mass, before, strict=True) if b < top_p and m >= min_p * mass[0]]
    law = np.zeros(6)
    law[order] = p[order] / p[order].sum()
    return law


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.0},
        {"top_k": 3},  # ends inside the tie of tokens 2 and 3
        {"top_k": 2},
        {"top_p": 0.6},
        {"top_p": 0.75, "temperature": 1.5},
        {"min_p": 0.4},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.6, "temperature": 0.9},
    ],
)
def test_law_over_seeds(filters):
    n = 100_000
    filters = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    logits = torch.tensor(LOGITS, dtype=torch.float32).expand(n, 1, 6)
    position = torch.full((n, 1), 3, dtype=torch.int32)
    choice, status = sample(logits, to_torch(params(n, **filters), "cpu"), torch.arange(n), position)
    assert not status.any()
    observed = np.bincount(choice.numpy().ravel(), minlength=6)
    law = exact_law(**filters)
    assert observed[law == 0].sum() == 0
    kept = law > 0
    assert stats.chisquare(observed[kept], law[kept] * n).pvalue > 1e-4


def test_reference_and_torch_agree_over_seeds():
    n = 300
    for filters in ({}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.4}):
        both(np.broadcast_to(LOGITS, (n, 1, 6)), params(n, **filters))


def test_greedy_takes_the_first_of_equals():
    rng = np.random.default_rng(0)
    for V in (1, 7, 64, 1000, 4099):
        logits = rng.integers(0, 2, (1, 50, V)).astype(F32)
        choice, _ = both(logits, params(1, temperature=0.0))
        assert choice[0].tolist() == [row.tolist().index(row.max()) for row in logits[0]]


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 30.0, 1e3, 1e6, 1e12, 1e30])
def test_unfiltered_choice_is_the_largest_perturbed_value(scale):
    """The pruning of candidates must not lose a winner or a tie, whatever the size of the logits."""
    rng = np.random.default_rng(1)
    logits = (rng.normal(0, 1, (2, 8, 3001)) * scale).astype(F32)
    position = rng.integers(0, 2**31 - 1, (2, 8)).astype(np.int32)
    seed = np.array([-1, 2**40])
    choice, _ = both(logits, params(2), seed, position)
    for b in range(2):
        perturbed = logits[b] + gumbel(seed[b], position[b, :, None], np.arange(3001))
        np.testing.assert_array_equal(choice[b], perturbed.argmax(-1))


@pytest.mark.parametrize("level", [0.0, -1e3, 1e6, 1e7])
def test_sums_that_round_to_the_same_value_tie(level):
    """Far from zero fp32 has few values near the top, so several tokens reach the largest sum."""
    logits = (level + np.random.default_rng(1).normal(0, 1, (1, 64, 800))).astype(F32)
    position = np.arange(64, dtype=np.int32)[None]
    perturbed = logits[0] + gumbel(np.int64(0), position[0, :, None], np.arange(800))
    if level > 0:
        assert ((perturbed == perturbed.max(-1, keepdims=True)).sum(-1) > 1).any()
    np.testing.assert_array_equal(both(logits, params(1), position=position)[0][0], perturbed.argmax(-1))


def test_filters_belong_to_rows():
    B = 400
    kinds = np.arange(B) % 4
    p = replace(
        params(B),
        top_k=np.array([1, 2, 5, 0], np.int32)[kinds],
        top_p=np.array([1.0, 1.0, 1.0, 0.01], F32)[kinds],
    )
    choice = both(np.broadcast_to(LOGITS, (B, 1, 6)), p)[0].ravel()
    allowed = [{1}, {1, 2}, {1, 2, 3, 4, 5}, {1}]
    for kind in range(4):
        assert set(choice[kinds == kind]) == allowed[kind]


def test_top_p_cuts_exactly():
    flat = np.zeros((200, 1, 4))
    assert set(both(flat, params(200, top_p=0.5))[0].ravel()) == {0, 1}
    assert set(both(flat, params(200, top_p=np.nextafter(F32(0.5), F32(1))))[0].ravel()) == {0, 1, 2}
    assert set(both(flat, params(200, top_p=0.0))[0].ravel()) == {0}
    assert set(both(flat, params(200, top_p=1.0))[0].ravel()) == {0, 1, 2, 3}


def test_filters_that_keep_almost_everything():
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 0.1, (2, 3, 3000))
    for filters in ({"top_p": 0.999}, {"top_k": 2999}, {"min_p": 1e-6}, {"top_k": 10**6}):
        both(logits, params(2, **filters))


def test_steps_come_in_order():
    """Each step alone would keep token 3 or choose otherwise; together, in order, they leave token 2."""
    logits = [[[5.0, 4.0, 3.0, 6.0]]]
    extras = {
        "repetition": np.full(1, 2.0, F32),
        "presence": np.zeros(1, F32),
        "frequency": np.zeros(1, F32),
        "prompt_seen": np.array([[True, False, False, False]]),  # 5 -> 2.5
        "counts": np.zeros((1, 4), np.int32),
        "bias_ids": np.array([[1, -1]], np.int32),
        "bias_values": np.array([[-2.0, 50.0]], F32),  # 4 -> 2
        "mask_bits": np.array([[[0b0111]]], np.int32),  # 6 leaves
    }
    assert both(logits, params(1, temperature=0.0, **extras))[0].item() == 2
    assert both(logits, params(1, top_k=1, **extras))[0].item() == 2


def test_penalties_by_hand():
    p = params(
        1,
        temperature=0.0,
        repetition=np.array([2.0], F32),
        presence=np.array([0.25], F32),
        frequency=np.array([0.5], F32),
        prompt_seen=np.array([[False, True, False, False]]),
        counts=np.array([[3, 0, 0, 1]], np.int32),
    )
    row = np.array([4.0, 4.0, -1.0, -1.0], F32)
    want = [4.0 / 2 - 1.5 - 0.25, 4.0 / 2, -1.0, -1.0 * 2 - 0.5 - 0.25]
    processed = torch_impl.processed(torch.from_numpy(row)[None, None], to_torch(p, "cpu"), None, 0)
    assert processed.ravel().tolist() == want
    # the same numbers through the public function: a bias that lifts token v to just above and just below 10
    lifted = replace(p, bias_ids=np.array([[0, 1, 2, 3]], np.int32))
    for v in range(4):
        for delta, choice in ((0.125, v), (-0.125, (v + 1) % 4)):
            bias = 10.0 - np.array(want)
            bias[v] += delta
            bias[[u for u in range(4) if u not in (v, (v + 1) % 4)]] -= 5.0
            assert both([[row]], replace(lifted, bias_values=bias[None].astype(F32)))[0].item() == choice


def test_penalties_follow_each_slots_own_path():
    #        0
    #      1   2     both branches then see the same logits but have different ancestors
    #      3   4
    tree = from_parents([[7, 1, 2, 5, 5]], [[-1, 0, 0, 1, 2]], [5])
    logits = np.zeros((1, 5, 8), F32)
    logits[..., [1, 2, 5, 7]] = [2.0, 1.9, 1.8, 1.7]
    off = np.zeros(1, F32)
    p = params(
        1,
        temperature=0.0,
        repetition=off + 1,
        presence=off + 5,
        frequency=off,
        prompt_seen=np.zeros((1, 8), bool),
        counts=np.zeros((1, 8), np.int32),
    )
    # the root's own token (7) is counted by `counts` alone
    assert both(logits, p, tree=tree)[0].tolist() == [[1, 2, 1, 2, 1]]
    counts = np.zeros((1, 8), np.int32)
    counts[0, [1, 2]] = 1
    assert both(logits, replace(p, counts=counts), tree=tree)[0].tolist() == [[5, 5, 5, 7, 7]]


def test_tree_tokens_outside_the_vocabulary_count_for_nothing():
    tree = from_parents([[0, 9, -4]], [[-1, 0, 1]], [3])
    one = np.ones(1, F32)
    counted = {"repetition": one, "presence": one, "frequency": one}
    p = params(1, prompt_seen=np.zeros((1, 3), bool), counts=np.zeros((1, 3), np.int32), **counted)
    logits = np.random.default_rng(0).normal(0, 1, (1, 3, 3))
    np.testing.assert_array_equal(both(logits, p, tree=tree)[0], both(logits, params(1))[0])


def test_masks_belong_to_slots():
    T, V = 3, 70
    allowed = [[69], [31, 32], list(range(70))]
    bits = np.zeros((1, T, 3), np.uint32)
    for t, tokens in enumerate(allowed):
        for v in tokens:
            bits[0, t, v // 32] |= np.uint32(1) << np.uint32(v % 32)
    logits = np.broadcast_to(np.arange(V, 0, -1.0), (1, T, V))
    p = params(1, temperature=0.0, mask_bits=bits.view(np.int32))
    assert both(logits, p)[0].tolist() == [[69, 31, 0]]
    for seed in range(20):
        choice = both(logits, replace(p, temperature=np.ones(1, F32)), np.array([seed]))[0][0]
        assert all(c in tokens for c, tokens in zip(choice, allowed, strict=True))


def test_a_row_without_candidate_sets_status():
    nan, inf = np.nan, np.inf
    dead = [nan, inf, -inf]
    logits = np.array([[[0.0, 1.0, nan], dead], [[0.0, 1.0, inf], [nan, -2.0, inf]]], F32)
    for temperature in (0.0, 1.0):
        for filters in ({}, {"top_k": 2}, {"top_p": 0.5}):
            choice, status = both(logits, params(2, temperature, **filters))
            assert status.tolist() == [1, 0]
            assert choice[0, 1] == -1
            assert choice[1, 1] == 1
    banned = params(1, bias_ids=np.array([[0]], np.int32), bias_values=np.array([[-inf]], F32))
    assert both([[[1.0]]], banned)[1].tolist() == [1]
    masked = params(1, mask_bits=np.zeros((1, 1, 1), np.int32))
    assert both([[[1.0]]], masked)[1].tolist() == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_steps_1_to_3_push_out_of_range_leaves(temperature):
    banned = {"bias_ids": np.array([[0]], np.int32), "bias_values": np.array([[np.inf]], F32)}
    assert both([[[1.0, 0.0]]], params(1, temperature, **banned))[0].item() == 1
    overflow = {"bias_ids": np.array([[0]], np.int32), "bias_values": np.array([[3e38]], F32)}
    assert both([[[3e38, 0.0]]], params(1, temperature, **overflow))[0].item() == 1


def test_padded_slots_choose_nothing_and_never_set_status():
    tree = from_parents(np.full((3, 4), 1), [[-1, 0, 1, 2]] * 3, [2, 4, 4])
    tree = replace(tree, status=np.array([0, 0, Status.BAD_PARENT], np.int32))
    logits = np.full((3, 4, 5), np.nan, F32)
    logits[..., 3] = 1.0
    logits[0, 2:] = np.nan
    logits[2, 1:] = np.nan
    for temperature in (0.0, 1.0):
        for top_k in (0, 2):
            choice, status = both(logits, params(3, temperature, top_k), tree=tree)
            assert choice.tolist() == [[3, 3, -1, -1], [3] * 4, [3, -1, -1, -1]]
            assert status.tolist() == [0, 0, 0]


MIXED = make_case("sample", cases.DEFAULTS, B=6, T=9, V=97, rows="mixed", extras="all", values="ties", tree=1)


def rows_of(value, index):
    """Rows `index` of an array, or of a dataclass of arrays, some of which may be absent."""
    if value is None or isinstance(value, np.ndarray):
        return value if value is None else value[index]
    return type(value)(**{f.name: rows_of(getattr(value, f.name), index) for f in fields(value)})


def test_a_row_does_not_depend_on_its_batch():
    inputs = cases.make(MIXED)
    whole = both(inputs["logits"], inputs["params"], inputs["seed"], inputs["position"], inputs["tree"])
    for index in ([0], [5, 2], [3, 3, 1]):
        part = {name: rows_of(value, index) for name, value in inputs.items()}
        got = both(part["logits"], part["params"], part["seed"], part["position"], part["tree"])
        for a, b in zip(got, whole, strict=True):
            np.testing.assert_array_equal(a, b[index])


@pytest.mark.parametrize("filters", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_a_slot_does_not_matter_but_its_position_does(filters):
    """The choice at a position is that of plain decoding there, wherever the tree holds it."""
    rng = np.random.default_rng(3)
    logits, position = rng.normal(0, 1, (1, 12, 200)), rng.permutation(12)[None].astype(np.int32)
    choice, _ = both(logits, params(1, **filters), position=position)
    order = rng.permutation(12)
    shuffled, _ = both(logits[:, order], params(1, **filters), position=position[:, order])
    np.testing.assert_array_equal(shuffled, choice[:, order])
    for t in range(12):
        plain, _ = both(logits[:, t : t + 1], params(1, **filters), position=position[:, t : t + 1])
        assert plain.item() == choice[0, t]
    same_logits = np.broadcast_to(logits[:, :1], logits.shape)
    assert len(set(both(same_logits, params(1, **filters), position=position)[0].ravel())) > 1


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_slices_merge_to_the_whole(data):
    V = data.draw(st.sampled_from([1, 5, 32, 97]))
    cuts = sorted(data.draw(st.sets(st.integers(1, V), max_size=4)) | {0, V})
    axes = {
        "rows": data.draw(st.sampled_from(["mixed", "top_k", "plain", "greedy"])),
        "extras": data.draw(st.sampled_from(["none", "all"])),
        "values": data.draw(st.sampled_from(["normal", "ties", "holes"])),
    }
    case = make_case("sample", cases.DEFAULTS, data.draw(st.integers(0, 999)), B=6, T=3, V=V, tree=1, **axes)
    inputs = cases.make(case)
    logits, rest = inputs["logits"], [inputs[name] for name in ("params", "seed", "position", "tree")]
    want = both(logits, *rest)
    for module, convert in ((ref, lambda a: a), (torch_impl, lambda a: to_torch(a, "cpu"))):
        arguments = [convert(a) for a in rest]
        parts = [module.partial(convert(logits[:, :, a:b]), *arguments, offset=a) for a, b in pairwise(cuts)]
        for got, expected in zip(module.merge(parts, *arguments), want, strict=True):
            np.testing.assert_array_equal(np.asarray(got), expected)
