"""Which bucket budget "auto" picks for replayed rounds, from costs and scores given by hand."""

from __future__ import annotations

import numpy as np
import pytest

from draftwood.engine.buckets import MOST_ROWS, BucketController


def scores(*tokens_by_slots: tuple[int, float], rows: int = 1) -> np.ndarray:
    """[rows, T] scores whose slots up to n promise so many drafted tokens, for each (n, tokens)."""
    chances, before, promised = [1.0], 1, 0.0
    for n, tokens in tokens_by_slots:
        chances += [(tokens - promised) / (n - before)] * (n - before)
        before, promised = n, tokens
    return np.log(np.tile(chances, (rows, 1)))


EASY = ((8, 3.0), (16, 3.6), (32, 4.0), (64, 4.2))
HARD = ((8, 0.1), (16, 0.15), (32, 0.18), (64, 0.2))


def play(
    controller: BucketController, batch: int, cost, text, rounds: int, accepts: float = 1.0
) -> list[int]:
    picks = []
    for _ in range(rounds):
        n = controller.pick(batch)
        picks.append(n)
        s = scores(*text, rows=batch)[:, :n]
        promised = np.exp(s)[:, 1:].sum(1)
        controller.observe(batch, n, cost(batch, n), np.exp(s), list(accepts * promised))
    return picks


def flat(batch: int, n: int) -> float:
    return 1.0 + 0.0005 * batch * n + 0.2 * (n > 1)


def test_small_batches_take_larger_trees():
    for batch, want in ((1, 64), (32, 16), (128, 8)):
        picks = play(BucketController(flat, 64), batch, flat, EASY, 60)
        assert max(set(picks[10:]), key=picks[10:].count) == want
    assert play(BucketController(flat, 16), 1, flat, EASY, 30)[-1] == 16  # never more than allowed


def test_hopeless_text_is_decoded_plainly():
    controller = BucketController(flat, 64)
    picks = play(controller, 1, flat, HARD, 400)
    drafted = [n for n in picks if n > 1]
    assert picks.count(1) > 350
    lost = sum(flat(1, n) - flat(1, 1) for n in drafted)
    assert lost / 400 < 0.02
    assert play(controller, 1, flat, EASY, 200)[-50:].count(1) == 0  # and found out when it changes


def test_acceptance_corrects_the_scores():
    boastful = BucketController(flat, 64)
    play(boastful, 1, flat, EASY, 100, accepts=0.25)
    assert boastful.calibration.value == pytest.approx(0.25, abs=0.05)
    honest = BucketController(flat, 64)
    play(honest, 1, flat, EASY, 100)
    assert honest.calibration.value == pytest.approx(1.0, abs=0.01)


def test_costs_follow_what_rounds_take():
    """Trees of 64 turn out dearer than measured at the start."""
    controller = BucketController(flat, 64)

    def dear(batch: int, n: int) -> float:
        return flat(batch, n) + 3.0 * (n == 64)

    picks = play(controller, 1, dear, EASY, 200)
    assert picks[-100:].count(64) < 20


def test_rounds_are_capped():
    measured = []

    def measure(batch: int, n: int) -> float:
        measured.append(batch * n)
        return flat(batch, n)

    controller = BucketController(measure, 128)
    for batch in (1, 64, 4096):
        picks = play(controller, batch, flat, ((128, 4.0),), 20)
        assert max(picks) * batch <= MOST_ROWS or max(picks) == 1
    assert max(measured) <= 4096


def test_a_largest_tree_that_is_no_bucket_is_one():
    for largest, want in ((5, [1, 5]), (48, [1, 8, 16, 32, 48])):
        controller = BucketController(flat, largest)
        assert list(controller.slots) == want
        assert max(play(controller, 1, flat, EASY, 30)) == largest


def test_plain_only():
    assert play(BucketController(flat, 1), 4, flat, EASY, 5) == [1] * 5


def test_costs_are_measured_for_every_width_that_rounds_are_recorded_for():
    widths, asked = [16], []

    def measure(batch, slots):
        asked.append((widths[-1], batch, slots))
        return flat(batch, slots) * widths[-1]

    controller = BucketController(measure, 8, lambda: widths[-1])
    for width in (16, 64, 16):
        widths.append(width)
        controller.pick(2)
    assert asked == [(16, 2, 1), (16, 2, 8), (64, 2, 1), (64, 2, 8)]
