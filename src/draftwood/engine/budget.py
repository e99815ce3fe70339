"""How deep to draft and how many slots a tree should have: what pays, by measured cost and acceptance as observed.

Expected tokens of a tree cut to N slots are 1 + c * sum of exp(score) over its drafted slots; c corrects the
drafter's own belief by what was accepted. The controller maximises expected tokens per second, plain decoding
included: where drafting does not pay it stops, and probes again after a while.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from draftwood.tree import DraftTree

FORGET = 0.1
"""Weight of the newest round in the running averages."""
RECENT = 0.3
"""Weight of the newest drafted round in the judgement whether drafting pays."""
OUTLIER = 2.0
"""A pass that took longer than this times the expected counts as that: something else had the processor."""
MARGIN = 1.05
"""Drafting must promise this much more than plain decoding: nearer to it, what is not timed decides."""
FULL_EVERY = 16
"""Drafts per one of full depth and size, which shows what more would bring; so does the first after a pause."""
LEAST_BUILT = 8
"""Slots built at least, if the largest tree has them."""
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
    """Picks depth and slots of each round for a whole batch; `draft_seconds` are those of drafting 1, 2, ... tokens deep."""

    def __init__(self, cost: CostTable, draft_seconds: Sequence[float]) -> None:
        self.cost, self.draft_seconds = cost, np.array(draft_seconds, np.float64)
        self._gain = np.zeros(len(draft_seconds))  # tokens that each depth brings, decayed means
        self._verify_seconds = 0.0  # decayed mean of the trees picked
        self._drafts = self._newest_slots = 0
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
        self._pause = self._next_pause = self._drafts = 0
        self._recent = None
        self._accepted = (self._accepted + self._promised) / 2

    def wants_draft(self) -> bool:
        """Whether the next round should draft at all."""
        if self._pause > 0:
            self._pause -= 1
            return False
        return True

    def plan(self, slots: int) -> tuple[int, int]:
        """How deep to draft the next block and how many slots, of at most `slots`, to build; the last picks tell."""
        self._drafts += 1
        if self._drafts % FULL_EVERY == 1:
            return len(self._gain), slots
        rates = (1 + np.cumsum(self._gain)) / (self.draft_seconds + self._verify_seconds)
        return int(np.argmax(rates)) + 1, min(slots, max(LEAST_BUILT, 2 * self._newest_slots))

    def pick(self, tree: DraftTree, depth: int) -> int:
        """Slots to keep of a tree drafted `depth` deep, at least 2: most expected tokens per second.

        Where the drafted rounds since the last pause are slower than plain decoding, the rounds to come pause drafting.
        """
        tree = tree.numpy()
        chances = reach(tree, self.calibration)
        expected = chances.sum(0).cumsum()[1:]
        verify = self.cost.of(tree.B * np.arange(2, tree.T + 1))
        seconds = self.draft_seconds[depth - 1] + verify
        best = int(np.argmax(expected / seconds))
        newest = float(expected[best]), float(seconds[best])
        self._learn_shape(tree, chances / tree.B, best + 2, depth, float(verify[best]))
        before = newest if self._recent is None else self._recent
        tokens, took = (RECENT * new + (1 - RECENT) * old for new, old in zip(newest, before, strict=True))
        if tokens / took > MARGIN * tree.B / self.cost(tree.B):
            self._recent, self._next_pause = (tokens, took), 0
        else:
            self._recent, self._drafts = None, 0
            self._pause = self._next_pause = min(max(2 * self._next_pause, FIRST_PAUSE), LONGEST_PAUSE)
        return best + 2

    def _learn_shape(
        self, tree: DraftTree, chances: np.ndarray, slots: int, depth: int, verify_seconds: float
    ) -> None:
        by_depth = np.bincount(
            tree.depths[:, :slots].ravel(), chances[:, :slots].ravel(), minlength=depth + 1
        )
        self._newest_slots = slots
        weight = 1.0 if self._drafts <= 1 else RECENT
        self._gain[:depth] += weight * (by_depth[1:] - self._gain[:depth])
        self._verify_seconds += weight * (verify_seconds - self._verify_seconds)

    def observe_cost(self, rows: int, seconds: Mapping[str, float]) -> None:
        """Stage times of a round over `rows` target rows; rounds that drafted name more rows than requests."""
        self.cost.observe(rows, seconds["verify"] + seconds["accept"] + seconds["commit"])

    def observe_draft(self, promised: float, accepted: int, depth: int, seconds: Mapping[str, float]) -> None:
        """A round drafted `depth` deep: tokens its scores promised, uncorrected and roots excluded, and tokens accepted."""
        self._promised = (1 - FORGET) * self._promised + FORGET * promised
        self._accepted = (1 - FORGET) * self._accepted + FORGET * accepted
        known = self.draft_seconds[depth - 1]
        took = min(seconds["draft"] + seconds["build"], OUTLIER * known)
        self.draft_seconds += FORGET * (took - known)  # what shifts one depth shifts them all


def reach(tree: DraftTree, calibration: float) -> np.ndarray:
    """[B, T] f64, of numpy trees: the chance that each slot is on the accepted path; 1 for roots."""
    chances = np.exp(tree.scores.astype(np.float64)) * calibration
    chances[:, 0] = 1.0
    return np.asarray(chances)
