"""What may be said about timings: the median, its interval, drift, and whether two streams differ.

Pure functions on numbers; this module knows nothing about kernels, clocks or files.

A visit to a case takes an odd number of timings back to back. They share a clock, a cache and a neighbour, so they are
not independent; their median is one value, and intervals are made of values. Of an odd number of timings the
median lies above the true median with probability exactly 1/2, whatever the distribution, so order statistics of
values give an interval of the true median.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import comb, erfc, pi, sin, sqrt
from statistics import median
from typing import Literal

import numpy as np

MIN_VALUES = 6
"""Smallest n for which [min, max] covers the median with at least 95 % (five give 93.75 %)."""

NOISE_FLOOR = 0.01
"""Medians this close are the same: two whole runs of one kernel can differ by as much."""

SIGNIFICANT = 0.01
"""Largest p-value of a rank test that counts as a difference."""

OUTLIER_Z = 15.0

MOST_DRAWN = 400_000
"""Values that one bootstrap draws, in all."""

Verdict = Literal["faster", "slower", "same", "unclear"]
Visits = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Summary:
    """Of one case, in the unit of its timings."""

    n: int  # values, that is visits
    median: float
    low: float  # 95 % interval of the median
    high: float
    p10: float
    p90: float
    cv: float
    outliers: int  # timings, kept
    drift: float  # second half over first half, minus 1
    drifts: bool


def value_of(visit: Sequence[float]) -> float:
    """The one value of a visit: the median of its timings."""
    return float(median(visit))


def summarize(visits: Visits, target: float = NOISE_FLOOR) -> Summary:
    """Summary of visits in the order made; `target` is the relative change that counts as drift."""
    if not visits:
        raise ValueError("no timings to summarize")
    values = [value_of(v) for v in visits]
    timings = np.concatenate([np.asarray(v, np.float64) for v in visits])
    low, high = median_interval(values)
    shift, drifts = drift(values, target)
    p10, p90 = np.percentile(timings, [10, 90])
    return Summary(
        n=len(values),
        median=float(median(values)),
        low=low,
        high=high,
        p10=float(p10),
        p90=float(p90),
        cv=float(timings.std(ddof=1) / timings.mean()) if len(timings) > 1 else 0.0,
        outliers=outliers(timings),
        drift=shift,
        drifts=drifts,
    )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the median by order statistics; below `MIN_VALUES` it is [min, max], which covers less.

    The ranks are those of the binomial distribution with n = values; where successive values are correlated, they
    are widened by the square root of `correlation_effect`.
    """
    n = len(values)
    k = n / 2 - (n / 2 - _binomial_rank(n)) * sqrt(correlation_effect(values))
    rank = min(max(0, int(k)), (n - 1) // 2)
    ordered = sorted(values)
    return float(ordered[rank]), float(ordered[n - 1 - rank])


def mean_interval(values: np.ndarray) -> tuple[float, float, float]:
    """The mean, and its 95 % bootstrap interval; the draws are the same in every call."""
    draws = np.random.default_rng(0).choice(values, (10_000, len(values))).mean(1)
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def half_width(values: Sequence[float]) -> float:
    """Half the interval of the median, relative to the median."""
    low, high = median_interval(values)
    middle = median(values)
    return (high - low) / 2 / middle if middle > 0 else 0.0


@cache
def _binomial_rank(n: int) -> int:
    """Largest k with P(k < Bin(n, 1/2) < n - k) >= 0.95: the interval is [x[k], x[n - 1 - k]], counted from 0."""
    if n > 1000:  # 0.5**n underflows
        return int(n / 2 - 0.98 * sqrt(n) - 0.5)
    tail, term, k = 0.0, 0.5**n, 0
    while tail + term <= 0.025:
        tail += term
        term *= (n - k) / (k + 1)
        k += 1
    return max(0, k - 1)


def correlation_effect(values: Sequence[float]) -> float:
    """How many values weigh as much as one independent value: (1 + r) / (1 - r), r the lag-1 correlation.

    r is that of the signs about the median, mapped to the correlation of a normal process with such signs. Their
    product has a mean of about -1/n when independent, which is given back, once more for safety.
    """
    n = len(values)
    if n < 8:
        return 1.0
    middle = median(values)
    signs = [(v > middle) - (v < middle) for v in values]
    agree = sum(a * b for a, b in zip(signs[1:], signs, strict=False)) / (n - 1)
    r = sin(pi / 2 * min(1.0, agree + 2 / n))
    return (1 + r) / (1 - min(r, 0.95)) if r > 1 / sqrt(n) else 1.0


def drift(values: Sequence[float], target: float) -> tuple[float, bool]:
    """Relative change from the first half to the second, and whether it is real and above `target`."""
    half = len(values) // 2
    if half < 2:
        return 0.0, False
    first, second = values[:half], values[-half:]
    change = float(median(second) / median(first)) - 1
    real = abs(change) > target and rank_test(np.asarray(first), np.asarray(second)) < SIGNIFICANT
    return change, real


def stabilized(values: Sequence[float]) -> bool:
    """Whether the spread of the first half already predicts that of all: more visits will not lower the noise."""
    if len(values) < 16:
        return False
    early, late = _spread(values[: len(values) // 2]), _spread(values)
    return late > 0 and abs(early / late - 1) < 0.3


def _spread(values: Sequence[float]) -> float:
    low, high = np.percentile(values, [25, 75])
    return float(high - low)


def outliers(timings: np.ndarray) -> int:
    """How many lie beyond a modified z-score of 15. They are counted, never dropped."""
    distance = np.abs(timings - np.median(timings))
    mad = float(np.median(distance))
    return int((0.6745 * distance > OUTLIER_Z * mad).sum()) if mad > 0 else 0


def rank_test(a: np.ndarray, b: np.ndarray) -> float:
    """Two-sided p-value of the Mann-Whitney U test: normal approximation, corrected for ties and continuity."""
    n, m = len(a), len(b)
    _, group, size = np.unique(np.concatenate([a, b]), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(size) - (size - 1) / 2)[group]
    u = float(ranks[:n].sum()) - n * (n + 1) / 2
    ties = float((size.astype(np.float64) ** 3 - size).sum())
    variance = n * m / 12 * ((n + m + 1) - ties / ((n + m) * (n + m - 1)))
    if variance <= 0:
        return 1.0
    z = max(0.0, abs(u - n * m / 2) - 0.5) / sqrt(variance)
    return erfc(z / sqrt(2))


@dataclass(frozen=True)
class Comparison:
    """Time of one over time of the other: below 1 the first is faster."""

    ratio: float
    low: float
    high: float
    p: float
    verdict: Verdict


def compare(
    a: Sequence[float],
    b: Sequence[float],
    *,
    paired: bool,
    clocks: tuple[float, float] | None = None,
    draws: int | None = None,
) -> Comparison:
    """Ratio of medians a / b with its 95 % bootstrap interval, and a verdict.

    Args:
        a, b: values; with `paired` they were taken in turns (A B B A) and are resampled together.
        clocks: median clock during a and during b, where known; then the ratio of cycles must agree.
        draws: of the bootstrap; by default 4000, and down to 1000 for long streams, for a run's budget ends with its comparisons.

    `faster` and `slower` need an interval beyond the noise floor and a rank test below 0.01; `same` needs an interval
    within the noise floor; all else is `unclear`, and so is anything with fewer than `MIN_VALUES` values.
    """
    if paired:
        a, b = a[: len(b)], b[: len(a)]
    if not len(a) or not len(b):
        raise ValueError("nothing to compare: one side has no timings")
    ratio = float(median(a) / median(b))
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    rng = np.random.default_rng(0)
    draws = draws or max(1000, min(4000, MOST_DRAWN // len(a)))
    i = rng.integers(0, len(a), (draws, len(a)))
    j = i if paired else rng.integers(0, len(b), (draws, len(b)))
    low, high = np.percentile(np.median(x[i], 1) / np.median(y[j], 1), [2.5, 97.5])
    p = rank_test(x, y)
    verdict = _verdict(float(low), float(high), p)
    if verdict in ("faster", "slower") and clocks is not None:
        scale = clocks[0] / clocks[1]
        if _verdict(float(low) * scale, float(high) * scale, p) != verdict:
            verdict = "unclear"
    if min(len(a), len(b)) < MIN_VALUES:
        verdict = "unclear"
    return Comparison(ratio, float(low), float(high), p, verdict)


def compare_pairs(a: Sequence[float], b: Sequence[float]) -> Comparison:
    """Median of the ratios a[i] / b[i] of values that belong together, say of one prompt, and a verdict as in `compare`.

    Interval by order statistics and exact sign test: no assumption on how ratios are distributed over the pairs. The test
    takes eight pairs at least to find a difference.

    Raises:
        ValueError: a and b differ in length, or are empty.
    """
    if len(a) != len(b) or not len(a):
        raise ValueError(f"expected as many values on both sides, and some: {len(a)} and {len(b)}")
    ratios = [float(x / y) for x, y in zip(a, b, strict=True)]
    low, high = median_interval(ratios)
    p = sign_test(sum(r < 1 for r in ratios), sum(r > 1 for r in ratios))
    verdict = _verdict(low, high, p) if len(ratios) >= MIN_VALUES else "unclear"
    return Comparison(float(median(ratios)), low, high, p, verdict)


def sign_test(below: int, above: int) -> float:
    """Two-sided p-value that signs so uneven come from a fair coin."""
    n, fewer = below + above, min(below, above)
    return min(1.0, 2 * sum(comb(n, k) for k in range(fewer + 1)) / (1 << n))


def _verdict(low: float, high: float, p: float) -> Verdict:
    if high < 1 - NOISE_FLOOR and p < SIGNIFICANT:
        return "faster"
    if low > 1 + NOISE_FLOOR and p < SIGNIFICANT:
        return "slower"
    return "same" if low >= 1 - NOISE_FLOOR and high <= 1 + NOISE_FLOOR else "unclear"
