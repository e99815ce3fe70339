"""Budget "auto" for rounds whose size must be known before they run: which bucket of slots pays, from the trees seen lately.

The same reasoning as `BudgetController`, which sees the tree before it decides: most tokens minus rate times seconds, and
drafting only on credit. Here the expected tokens of each bucket are running means, and costs are those of whole rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from draftwood.engine.budget import FORGET, FULL_EVERY, OUTLIER, Calibration, Credit

SLOTS = (1, 8, 16, 32, 64, 128)
"""Tree buckets, root included; 1 is plain decoding."""
MOST_ROWS = 2048
"""Batch times slots of a round at most: more would take memory and bring nothing."""


class BucketController:
    """Picks the slots of each round; `measure(batch, slots)` gives the seconds of a whole round, once per pair and `width`, which
    says for what width of page tables rounds are being recorded."""

    def __init__(
        self, measure: Callable[[int, int], float], largest: int, width: Callable[[], int] = lambda: 0
    ) -> None:
        self.slots = np.array([*(n for n in SLOTS if n < largest), largest])
        self._measure, self._width = measure, width
        # (batch, width) -> seconds of each bucket, inf where it is too large
        self._cost: dict[tuple[int, int], np.ndarray] = {}
        # drafted tokens per request that scores promise, decayed means
        self._reach = np.zeros(len(self.slots))
        self._known = np.zeros(len(self.slots), bool)
        self._tokens = self._seconds = 0.0  # of drafted rounds, decayed means
        self._drafts = 0
        self.credit, self.calibration = Credit(), Calibration()

    def restart(self) -> None:
        """A new request joins: other text may suit the drafter better."""
        self.credit.restart()
        self.calibration.restart()

    def pick(self, batch: int) -> int:
        """Slots of the next round of so many rows."""
        cost = self._costs(batch)
        if len(self.slots) == 1 or not self.credit.wants_draft():
            return 1
        self._drafts += 1
        allowed = np.flatnonzero(np.isfinite(cost))[1:]
        if not len(allowed):
            return 1
        if not self._known[1:].any():
            return int(self.slots[allowed[-1]])
        rate = max(1 / cost[0], self._tokens / self._seconds)
        worth = np.where(self._known, self.calibration.value * self._reach, 0.0) - rate * cost
        best = allowed[int(np.argmax(worth[allowed]))]
        # whether the next larger one would bring more can only be seen there
        if self._drafts % FULL_EVERY == 0:
            best = allowed[min(int(np.searchsorted(allowed, best)) + 1, len(allowed) - 1)]
        return int(self.slots[best])

    def observe(
        self, batch: int, slots: int, seconds: float, chances: np.ndarray, accepted: Sequence[int]
    ) -> None:
        """What a round of `batch` rows took, exp of the node scores [B, T] of its live rows, and the drafted tokens each accepted.

        Rows that ended in the round teach nothing and are left out of the last two.
        """
        cost, i = self._costs(batch), int(np.flatnonzero(self.slots == slots)[0])
        cost[i] += FORGET * (min(seconds, OUTLIER * cost[i]) - cost[i])
        if slots == 1 or not len(accepted):
            return
        promised = chances.mean(0)[1:].cumsum()  # by slots, root not counted
        smaller = np.arange(1, i + 1)
        weight = np.where(self._known[smaller], FORGET, 1.0)
        self._reach[smaller] += weight * (promised[self.slots[smaller] - 2] - self._reach[smaller])
        self._known[smaller] = True
        self.calibration.observe(float(promised[-1]), float(np.mean(accepted)))
        tokens = 1 + self.calibration.value * float(promised[-1])
        self._tokens += FORGET * (tokens - self._tokens)
        self._seconds += FORGET * (float(cost[i]) - self._seconds)
        self.credit.spend(float(tokens - cost[i] / cost[0]))

    def _costs(self, batch: int) -> np.ndarray:
        key = (batch, self._width())
        if key not in self._cost:
            rows = batch * self.slots
            seconds = [
                self._measure(batch, int(n)) if n == 1 or r <= MOST_ROWS else np.inf
                for n, r in zip(self.slots, rows, strict=True)
            ]
            self._cost[key] = np.array(seconds, np.float64)
        return self._cost[key]
