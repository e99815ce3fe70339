"""How many slots a tree should have: what pays, by measured cost and by acceptance as observed.

Expected tokens of a tree cut to N slots are 1 + c * sum of exp(score) over its drafted slots; c corrects the
drafter's own belief by what was accepted. The controller maximises expected tokens per second, plain decoding
included: where drafting does not pay it stops, and probes again after a while.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from draftwood.tree import DraftTree

FORGET = 0.1
"""Weight of the newest round in the running averages."""
RECENT = 0.3
"""Weight of the newest drafted round in the judgement whether drafting pays."""
OUTLIER = 2.0
"""A pass that took longer than this times the expected counts as that: something else had the processor."""
FIRST_PAUSE, LONGEST_PAUSE = 8, 64
"""Plain rounds before drafting is probed again; doubles while probing does not pay."""


class CostTable:
    """Seconds of verifying and committing n rows (batch times slots); linear between the sizes measured."""

    def __init__(self, measure: Callable[[int], float], sizes: tuple[int, ...]) -> None:
        self.sizes = np.array(sizes, np.float64)
        self.seconds = np.array([measure(n) for n in sizes], np.float64)

    def __call__(self, rows: int) -> float:
        return float(self.of(np.array(rows)))

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Seconds for each of several sizes; beyond the largest measured one the last line goes on."""
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
        beyond = np.maximum(rows - self.sizes[-1], 0.0)
        return np.asarray(np.interp(rows, self.sizes, self.seconds) + slope * beyond)

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a pass: half of an error is taken for overhead that every size shares, half is its own."""
        error = min(seconds, OUTLIER * self(rows)) - self(rows)
        own = [np.interp(rows, self.sizes, unit) for unit in np.eye(len(self.sizes))]
        share = 0.5 + 0.5 * np.array(own)
        self.seconds = np.maximum(self.seconds + FORGET * error * share, 1e-9)


class BudgetController:
    """Picks the slots of each round for a whole batch."""

    def __init__(self, cost: CostTable, draft_seconds: float) -> None:
        self.cost, self.draft_seconds = cost, draft_seconds
        self._promised = self._accepted = 1.0  # decayed sums; one token of good faith
        self._pause = self._next_pause = 0
        self._recent: tuple[float, float] | None = (
            None  # tokens and seconds of drafted rounds since the last pause
        )

    @property
    def calibration(self) -> float:
        """Accepted tokens per token that the scores promised."""
        return min(max(self._accepted / self._promised, 0.02), 4.0)

    def restart(self) -> None:
        """A new request joins: other text may suit the drafter better, so half of the distrust goes."""
        self._pause = self._next_pause = 0
        self._recent = None
        self._accepted = (self._accepted + self._promised) / 2

    def wants_draft(self) -> bool:
        """Whether the next round should draft at all."""
        if self._pause > 0:
            self._pause -= 1
            return False
        return True

    def pick(self, tree: DraftTree) -> int:
        """Slots to keep of a drafted tree, at least 2: most expected tokens per second.

        Where the drafted rounds since the last pause are slower than plain decoding, the rounds to come pause drafting.
        """
        expected = expected_tokens(tree, self.calibration)[1:]
        seconds = self.draft_seconds + self.cost.of(tree.B * np.arange(2, tree.T + 1))
        best = int(np.argmax(expected / seconds))
        newest = float(expected[best]), float(seconds[best])
        before = newest if self._recent is None else self._recent
        tokens, took = (RECENT * new + (1 - RECENT) * old for new, old in zip(newest, before, strict=True))
        if tokens / took > tree.B / self.cost(tree.B):
            self._recent, self._next_pause = (tokens, took), 0
        else:
            self._recent = None
            self._pause = self._next_pause = min(max(2 * self._next_pause, FIRST_PAUSE), LONGEST_PAUSE)
        return best + 2

    def observe_cost(self, rows: int, seconds: Mapping[str, float]) -> None:
        """Stage times of a round over `rows` target rows; rounds that drafted name more rows than requests."""
        self.cost.observe(rows, seconds["verify"] + seconds["accept"] + seconds["commit"])

    def observe_draft(self, promised: float, accepted: int, seconds: Mapping[str, float]) -> None:
        """A drafted round: tokens its scores promised, uncorrected and roots excluded, and tokens accepted."""
        self._promised = (1 - FORGET) * self._promised + FORGET * promised
        self._accepted = (1 - FORGET) * self._accepted + FORGET * accepted
        took = min(seconds["draft"] + seconds["build"], OUTLIER * self.draft_seconds)
        self.draft_seconds += FORGET * (took - self.draft_seconds)


def expected_tokens(tree: DraftTree, calibration: float) -> np.ndarray:
    """[T] f64: expected tokens of the whole batch if every tree kept its first 1..T slots."""
    scores = tree.numpy().scores.astype(np.float64)
    chances = np.exp(scores) * calibration
    chances[:, 0] = 1.0
    return np.asarray(np.cumsum(chances, axis=1).sum(axis=0))
