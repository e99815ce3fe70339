"""The stated intervals cover, the verdicts err on the side of `unclear`, the rank test is scipy's."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from draftwood.bench import planner, stats

TIMINGS = 3
MOST_VISITS = 120


def gauss(rng):
    return lambda: 1 + 0.02 * rng.standard_normal(TIMINGS)


def skewed(rng):
    return lambda: 1 + 0.03 * rng.exponential(1, TIMINGS)


def spiky(rng):
    return lambda: 1 + 0.01 * rng.standard_normal(TIMINGS) + (rng.random(TIMINGS) < 0.1) * rng.exponential(1)


def per_visit(rng):
    """Each visit has its own clock state."""
    return lambda: 1 + 0.02 * rng.standard_normal() + 0.005 * rng.standard_normal(TIMINGS)


def per_visit_skewed(rng):
    return lambda: 1 + 0.02 * rng.exponential() + 0.005 * rng.standard_normal(TIMINGS)


def bimodal(rng):
    return lambda: 1 + 0.5 * (rng.random(TIMINGS) < 0.3) + 0.003 * rng.standard_normal(TIMINGS)


def correlated(rng):
    """An autoregressive process within the visit."""

    def visit():
        x, state = np.empty(TIMINGS), rng.standard_normal()
        for i in range(TIMINGS):
            state = 0.8 * state + 0.6 * rng.standard_normal()
            x[i] = 1 + 0.02 * state
        return x

    return visit


STREAMS = (gauss, skewed, spiky, per_visit, per_visit_skewed, bimodal, correlated)


def measured_by_the_rule(visit, target):
    """The values at the moment the suite would stop, which is a biased moment: it is when the interval is narrow."""
    progress = planner.Progress("case", visit_s=0.01)
    while progress.label is None and progress.n < MOST_VISITS:
        progress.add(list(visit()), 0.01)
        progress.judge(target)
    return progress.values


@pytest.mark.parametrize("stream", STREAMS)
def test_intervals_cover_the_true_median_when_stopped_by_the_rule(stream):
    rng = np.random.default_rng(7)
    draw = stream(rng)
    truth = np.median([sorted(draw())[TIMINGS // 2] for _ in range(40_000)])
    runs = [measured_by_the_rule(stream(rng), target=0.01) for _ in range(300)]
    intervals = [stats.median_interval(values) for values in runs]
    assert np.mean([low <= truth <= high for low, high in intervals]) >= 0.93


def test_noise_that_wanders_over_visits_covers_less():
    """As docs/bench.md admits."""
    rng = np.random.default_rng(11)

    def wandering():
        state = [rng.standard_normal()]

        def visit():
            state[0] = 0.6 * state[0] + 0.8 * rng.standard_normal()
            return 1 + 0.02 * state[0] + 0.005 * rng.standard_normal(TIMINGS)

        return visit

    intervals = [stats.median_interval(measured_by_the_rule(wandering(), 0.01)) for _ in range(300)]
    assert 0.85 <= np.mean([low <= 1 <= high for low, high in intervals]) < 0.95


@pytest.mark.parametrize("n", [6, 7, 10, 31, 100, 1001])
def test_interval_is_the_tightest_symmetric_one_of_order_statistics(n):
    values = [float(i // 2 if i % 2 else n - 1 - i // 2) for i in range(n)]  # high, low, high, low: no trend
    assert sorted(values) == list(range(n))
    low, high = stats.median_interval(values)
    k = int(low)
    assert high == n - 1 - k

    def cover(k):
        return scipy_stats.binom.cdf(n - 1 - k, n, 0.5) - scipy_stats.binom.cdf(k, n, 0.5)

    assert cover(k) >= 0.95
    assert cover(k + 1) < 0.95 + (0.002 if n > 1000 else 0)


def test_fewer_than_six_values_give_their_range():
    assert stats.median_interval(np.array([3.0, 1.0, 2.0])) == (1.0, 3.0)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("n", "m"), [(6, 6), (20, 35), (100, 80)])
def test_rank_test_is_scipys(n, m, ties):
    rng = np.random.default_rng(n)
    a, b = rng.normal(0, 1, n), rng.normal(0.4, 1, m)
    if ties:
        a, b = a.round(), b.round()
    expected = scipy_stats.mannwhitneyu(a, b, method="asymptotic").pvalue
    assert stats.rank_test(a, b) == pytest.approx(expected, rel=1e-9)


def test_equal_values_do_not_differ():
    assert stats.rank_test(np.ones(9), np.ones(9)) == 1.0


@pytest.mark.parametrize(
    ("factor", "verdict"), [(0.9, "faster"), (1.1, "slower"), (1.0, "same"), (1.01, "unclear")]
)
def test_verdict_of_pairs_sees_through_a_shared_wander(factor, verdict):
    rng = np.random.default_rng(1)
    wander = 1 + 0.002 * np.cumsum(rng.standard_normal(40))
    b = wander * (1 + 0.002 * rng.standard_normal(40))
    a = factor * wander * (1 + 0.002 * rng.standard_normal(40))
    assert stats.compare(a, b, paired=True).verdict == verdict


def test_few_values_are_never_a_verdict():
    assert stats.compare(np.full(5, 1.0), np.full(5, 2.0), paired=True).verdict == "unclear"


def test_a_difference_explained_by_the_clock_is_unclear():
    rng = np.random.default_rng(2)
    a, b = 0.9 * (1 + 0.001 * rng.standard_normal(20)), 1 + 0.001 * rng.standard_normal(20)
    assert stats.compare(a, b, paired=False).verdict == "faster"
    assert stats.compare(a, b, paired=False, clocks=(1980.0, 1782.0)).verdict == "unclear"


@pytest.mark.parametrize("seed", range(3))
def test_equal_kernels_are_seldom_told_apart(seed):
    rng = np.random.default_rng(seed)
    wrong = sum(
        stats.compare(*(1 + 0.05 * rng.standard_normal((2, 12))), paired=False, draws=400).verdict
        in ("faster", "slower")
        for _ in range(200)
    )
    assert wrong <= 4


def test_drift_is_seen_and_noise_is_not():
    rng = np.random.default_rng(3)
    noise = 1 + 0.005 * rng.standard_normal(30)
    assert not stats.drift(noise, 0.01)[1]
    assert stats.drift(noise * np.linspace(1, 1.1, 30), 0.01)[1]
    assert not stats.drift(np.full(30, 2.0), 0.01)[1]


def test_noise_that_no_longer_shrinks_is_known():
    rng = np.random.default_rng(4)
    steady = list(1 + 0.1 * rng.standard_normal(64))
    warming = list(1 + 0.1 * rng.standard_normal(64) * np.repeat([1, 0.01], 32))
    assert stats.stabilized(steady)
    assert not stats.stabilized(warming)
    assert not stats.stabilized(steady[:8])


def test_outliers_are_counted_and_kept():
    visits = [[1.0 + 0.001 * i] for i in range(20)] + [[50.0]]
    summary = stats.summarize(visits)
    assert summary.outliers == 1
    assert summary.n == 21
    assert summary.p90 < 50 < summary.median * 60


def test_nothing_to_summarize_or_compare_is_an_error():
    with pytest.raises(ValueError, match="no timings"):
        stats.summarize([])
    with pytest.raises(ValueError, match="one side"):
        stats.compare(np.empty(0), np.ones(3), paired=False)


def test_the_interval_of_a_mean_covers_it_and_narrows():
    rng = np.random.default_rng(1)
    few, many = rng.normal(5, 2, 50), rng.normal(5, 2, 5000)
    mean, low, high = stats.mean_interval(few)
    assert mean == pytest.approx(few.mean())
    assert low < mean < high
    assert high - low == pytest.approx(2 * 1.96 * few.std() / 50**0.5, rel=0.1)
    narrow = stats.mean_interval(many)
    assert narrow[2] - narrow[1] < (high - low) / 5
    assert stats.mean_interval(np.ones(9)) == (1, 1, 1)
