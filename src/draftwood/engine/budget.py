"""How many slots a tree should have: what pays, by measured cost and by acceptance as observed.

Expected tokens of a tree cut to N slots are 1 + c * sum of exp(score) over its drafted slots; c corrects the
drafter's own belief by what was accepted. The controller maximises expected tokens per second, plain decoding
included: where drafting does not pay it stops, and probes again after a while.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from draftwood.tree import DraftTree

FORGET = 0.05
"""Weight of the newest round in the running averages."""
FIRST_PAUSE, LONGEST_PAUSE = 8, 64
"""Plain rounds before drafting is probed again; doubles while probing does not pay."""


class CostTable:
    """Seconds of a target pass over n rows (batch times slots); linear between the sizes measured."""

    def __init__(self, measure: Callable[[int], float], sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.seconds = [measure(n) for n in sizes]

    def __call__(self, rows: int) -> float:
        at = min(max(bisect_left(self.sizes, rows), 1), len(self.sizes) - 1)
        (x0, x1), (y0, y1) = self.sizes[at - 1 : at + 1], self.seconds[at - 1 : at + 1]
        return max(y0 + (y1 - y0) * (rows - x0) / (x1 - x0), min(y0, y1))

    def observe(self, rows: int, seconds: float) -> None:
        """Move the nearest measured size towards a pass just timed."""
        at = min(range(len(self.sizes)), key=lambda i: abs(self.sizes[i] - rows))
        if self.sizes[at] == rows:
            self.seconds[at] += FORGET * (seconds - self.seconds[at])


class BudgetController:
    """Picks the slots of each round for a whole batch; one per engine and mode."""

    def __init__(self, cost: CostTable, draft_seconds: float, max_slots: int) -> None:
        self.cost, self.draft_seconds, self.max_slots = cost, draft_seconds, max_slots
        self.calibration = 1.0
        self._pause = self._next_pause = 0

    def wants_draft(self) -> bool:
        """Whether the next round should draft at all."""
        if self._pause > 0:
            self._pause -= 1
            return False
        return True

    def pick(self, tree: DraftTree) -> int:
        """Slots to keep of a built tree: most expected tokens per second."""
        expected = expected_tokens(tree, self.calibration)  # [T]
        batch = tree.B
        seconds = [self.draft_seconds + self.cost(batch * n) for n in range(1, tree.T + 1)]
        rates = expected / np.array(seconds)
        best = int(np.argmax(rates))
        if rates[best] <= batch / self.cost(batch):
            self._next_pause = min(max(2 * self._next_pause, FIRST_PAUSE), LONGEST_PAUSE)
            self._pause = self._next_pause
        else:
            self._next_pause = 0
        return best + 1

    def observe(self, expected: float, accepted: int, seconds: dict[str, float], rows: int) -> None:
        """Learn from a drafted round: tokens its scores promised (uncorrected, roots excluded), tokens accepted."""
        if expected > 0:
            ratio = min(accepted / expected, 4.0)
            self.calibration = max(self.calibration + FORGET * (ratio - self.calibration), 0.02)
        self.draft_seconds += FORGET * (seconds["draft"] + seconds["build"] - self.draft_seconds)
        self.cost.observe(rows, seconds["verify"] + seconds["accept"] + seconds["commit"])


def expected_tokens(tree: DraftTree, calibration: float = 1.0) -> np.ndarray:
    """[T] f64: expected tokens of the whole batch if every tree kept its first 1..T slots."""
    scores = tree.numpy().scores.astype(np.float64)
    chances = np.exp(scores) * calibration
    chances[:, 0] = 1.0
    return np.asarray(np.cumsum(chances, axis=1).sum(axis=0))
