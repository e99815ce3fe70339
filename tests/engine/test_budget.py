"""What budget "auto" picks, from costs and scores given by hand: no model runs."""

from __future__ import annotations

import numpy as np
import pytest

from draftwood.engine.budget import FULL_EVERY, BudgetController, CostTable
from draftwood.tree import from_parents


def tree_of(scores) -> object:
    n = len(scores)
    return from_parents(
        np.arange(n)[None], np.array([[-1] + [0] * (n - 1)]), [n], np.array([scores], np.float32)
    )


def test_budget_takes_what_pays():
    flat = CostTable(lambda n: 1.0, (1, 2, 4, 8, 16))
    good = tree_of(np.log([1.0, 0.9, 0.8, 0.7, 0.1, 0.1, 0.1, 0.1]))
    assert BudgetController(flat, draft_seconds=[0.1]).pick(good, 1) == 8  # slots are free
    steep = CostTable(
        lambda n: 0.7 + 0.3 * n, (1, 2, 4, 8, 16)
    )  # a slot costs what plain decoding takes for 0.3 tokens
    assert BudgetController(steep, draft_seconds=[0.3]).pick(good, 1) == 4  # only the likely ones pay


def test_budget_stops_drafting_where_it_does_not_pay_and_probes_again():
    controller = BudgetController(CostTable(lambda n: 1.0 + 0.1 * n, (1, 2, 4, 8)), draft_seconds=[1.0])
    bad = tree_of(np.log([1.0, 0.01, 0.01, 0.01]))
    assert controller.wants_draft()
    assert controller.pick(bad, 1) == 2  # a probe still verifies a draft, or nothing could be learnt
    pauses = []
    for _ in range(4):
        pause = 0
        while not controller.wants_draft():
            pause += 1
        pauses.append(pause)
        controller.pick(bad, 1)
    assert pauses == [8, 16, 32, 64]
    controller.restart()
    assert controller.wants_draft()
    controller.pick(tree_of(np.log([1.0, 0.99, 0.98])), 1)
    assert controller.wants_draft()


def test_budget_learns_from_what_was_accepted():
    controller = BudgetController(CostTable(lambda n: 1.0, (1, 2, 4)), draft_seconds=[0.1])
    for _ in range(100):
        controller.observe_draft(2.0, 1, 1, {"draft": 0.1, "build": 0.1})
    assert controller.calibration.value == pytest.approx(0.5, abs=0.02)


def test_hopeless_text_costs_little():
    """Requests of 128 tokens that the drafter cannot foresee, where a draft costs most of a plain round."""
    controller = BudgetController(CostTable(lambda n: 0.9 + 0.1 * n, (1, 2, 4, 8)), draft_seconds=[0.6])
    hopeless = tree_of(np.log([1.0, 0.02, 0.02]))
    for _ in range(4):
        controller.restart()
        lost = 0.0
        for _ in range(128):
            if controller.wants_draft():
                lost += 0.6 + controller.cost(controller.pick(hopeless, 1)) - controller.cost(1)
        assert lost / 128 < 0.03


def test_one_poor_round_among_good_ones_is_no_reason_to_stop():
    controller = BudgetController(CostTable(lambda n: 1.0 + 0.1 * n, (1, 2, 4, 8)), draft_seconds=[0.5])
    good, bad = tree_of(np.log([1.0, 0.9, 0.9, 0.8])), tree_of(np.log([1.0, 0.1, 0.1, 0.1]))
    for tree in (good, good, bad, good, bad):
        controller.pick(tree, 1)
        assert controller.wants_draft()
    for _ in range(5):
        controller.pick(bad, 1)
    assert not controller.wants_draft()


def chain_of(scores) -> object:
    n = len(scores)
    return from_parents(
        np.arange(n)[None], np.arange(-1, n - 1)[None], [n], np.array([np.cumsum(scores)], np.float32)
    )


def test_depth_is_what_pays():
    cost = CostTable(lambda n: 1.0 + 0.02 * n, (1, 2, 4, 8))
    seconds = [0.1, 0.1, 0.1, 0.3]  # the fourth token needs another pass over the weights
    unsure, sure = np.log([1.0, 0.8, 0.6, 0.5, 0.2]), np.log([1.0, 0.99, 0.99, 0.99, 0.99])
    for scores, want in ((unsure, 3), (sure, 4)):
        controller = BudgetController(cost, seconds)
        depths = []
        for _ in range(FULL_EVERY + 1):
            depth, slots = controller.plan(5)
            assert depth < slots <= 5
            depths.append(depth)
            controller.pick(chain_of(scores[: depth + 1]), depth)
        assert depths[0] == depths[-1] == 4  # now and then all, or it would never learn that deeper pays
        assert set(depths[1:-1]) == {want}


def test_a_stalled_round_teaches_little():
    cost = CostTable(lambda n: float(n), (1, 2, 4, 8))
    cost.observe(4, 1000.0)
    assert cost(4) < 4.5
    controller = BudgetController(cost, draft_seconds=[1.0])
    controller.observe_draft(1.0, 1, 1, {"draft": 1000.0, "build": 0.0})
    assert controller.draft_seconds[0] < 1.2


def test_costs_learn_from_every_round():
    cost = CostTable(lambda n: float(n), (1, 2, 4, 8))
    assert [cost(n) for n in (1, 3, 8, 12)] == [1.0, 3.0, 8.0, 12.0]
    for _ in range(200):
        cost.observe(3, 6.0)  # a size between two measured ones
    assert cost(3) == pytest.approx(6.0, rel=0.01)
    assert cost(8) > 9.0  # part of it is overhead that all sizes share
