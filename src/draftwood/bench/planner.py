"""Which case to visit next and when to stop: decisions over what is known so far.

Pure: no process, no clock, no file. The caller says how many seconds are left and reports what a visit gave. A *lot* is
what is visited in turns: one case, or one case in several implementations to be compared (A B, B A, A B, ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwood.bench.stats import MIN_VALUES, drift, half_width, stabilized, value_of

MIN_VISITS = MIN_VALUES + 1
"""Every case first gets these; the seventh confirms what six say."""

WARM_UP_US = 20_000.0
"""A visit begins with an untimed call, unless one takes longer than this."""

LOST = "lost"
"""Label of what can be visited no more: its process died or hung."""

CONFIRMATIONS = 2
"""Visits in a row that must find the interval narrow enough: stopping at the first one favours lucky streaks."""


@dataclass
class Progress:
    """What is known of one implementation of one case."""

    key: str
    visit_s: float  # wall seconds of a visit: the probe's estimate, then what was observed
    most: float = float("inf")  # visits there can be
    visits: list[list[float]] = field(default_factory=list)
    values: list[float] = field(default_factory=list)  # one per visit
    spent_s: float = 0.0
    label: str | None = None  # set when it stops
    width: float = 1.0  # half the interval of the median, relative
    _hits: int = 0

    @property
    def n(self) -> int:
        return len(self.values)

    def add(self, timings: list[float], seconds: float) -> None:
        self.visits.append(timings)
        self.values.append(value_of(timings))
        self.spent_s += seconds
        self.visit_s += (seconds - self.visit_s) / min(self.n, 4)
        self.width = half_width(self.values)

    def judge(self, target: float, share_s: float = float("inf"), least: int = MIN_VALUES) -> None:
        """Stop when the target is reached, with `least` visits, or cannot be reached within `share_s` or `most` visits."""
        narrow = self.n >= MIN_VALUES and self.width <= target
        self._hits = self._hits + 1 if narrow else 0
        spent = self.n >= self.most or (self.n >= MIN_VISITS and self.spent_s >= share_s)
        sure = self._hits >= CONFIRMATIONS and self.n >= min(least, self.most)
        if sure or spent:
            drifts = drift(self.values, target)[1]
            if sure and not drifts:
                self.label = "ok"
            elif spent:
                self.label = "low_n" if self.n < MIN_VALUES else "drift" if drifts else "noisy"
        elif self._hopeless(target, share_s):
            self.label = "noisy"

    def close(self, target: float) -> None:
        """No more visits will come: label what stayed open."""
        if self.label is None:
            if 0 < self.n < MIN_VALUES:
                self.label = "low_n"
            else:
                self.label = "drift" if drift(self.values, target)[1] else "budget"

    def _hopeless(self, target: float, share_s: float) -> bool:
        """The interval shrinks with the square root of n; if the n needed costs more than the share, noise won."""
        if self.width <= target:
            return False
        needed = self.n * (self.width / target) ** 2
        return self.spent_s + (needed - self.n) * self.visit_s > share_s and stabilized(self.values)


Lot = Sequence[Progress]


@dataclass(frozen=True)
class Plan:
    """What the minimum visits of every lot cost, and which lots do not fit."""

    total_s: float
    fits: list[Lot]
    left_out: list[Lot]

    @property
    def tried(self) -> list[Lot]:
        """What fits; else the cheapest, for few visits are more than none."""
        return self.fits or sorted(self.left_out, key=cost)[:1]


def cost(lot: Lot) -> float:
    """Wall seconds of one visit to each of the lot."""
    return sum(p.visit_s for p in lot)


def visited(lot: Lot) -> int:
    """How often; a member that was lost is not counted."""
    return max(p.n for p in lot)


def make_plan(lots: Sequence[Lot], left_s: float, min_visits: int = MIN_VISITS) -> Plan:
    """Keep as many lots as the time allows: the dearest are left out first."""
    fits, left_out, total = [], [], 0.0
    for lot in sorted(lots, key=cost):
        dear = min_visits * cost(lot)
        if total + dear <= left_s:
            fits.append(lot)
        else:
            left_out.append(lot)
        total += dear
    order = {id(lot): i for i, lot in enumerate(lots)}
    return Plan(total, *(sorted(part, key=lambda lot: order[id(lot)]) for part in (fits, left_out)))


class Scheduler:
    """Minimum visits for all, in turns; then whatever has the widest interval per second."""

    def __init__(self, lots: Sequence[Lot], target: float, seconds: float, min_visits: int = MIN_VISITS):
        self.lots = list(lots)
        self.target = target
        self.min_visits = min_visits
        self.share_s = seconds * max(0.25, 1 / max(1, len(self.lots)))

    def next(self, left_s: float) -> Lot | None:
        """The lot to visit now; None when all have stopped or none fits into `left_s`."""
        able = [lot for lot in self.lots if self.is_open(lot) and cost(lot) <= left_s]
        young = [lot for lot in able if visited(lot) < self.min_visits]
        if young:
            return min(young, key=visited)
        return max(able, key=lambda lot: self._gap(lot) / max(cost(lot), 1e-6), default=None)

    def _gap(self, lot: Lot) -> float:
        """How far the widest of the lot is from its target; never nothing while the lot is open."""
        return max(*(p.width - self.target for p in lot), self.target / 10)

    def is_open(self, lot: Lot) -> bool:
        return any(p.label is None for p in lot)

    def judge(self, lot: Lot) -> None:
        """After a visit. Members that have stopped are judged again while others of their lot go on."""
        for p in lot:
            if p.n and p.label != LOST:
                p.label = None
                p.judge(self.target, self.share_s, self.min_visits)
        if self.min_visits < MIN_VALUES and visited(lot) >= self.min_visits:
            for p in lot:
                p.close(self.target)
