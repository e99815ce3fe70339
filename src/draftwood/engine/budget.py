"""How deep to draft and how many slots a tree should have: what pays, by measured cost and acceptance as observed.

Expected tokens of a tree cut to N slots are 1 + c * sum of exp(score) over its drafted slots; c corrects the
drafter's own belief by what was accepted. Depth and slots maximise tokens minus (rate of late) * seconds: a round that
promises much may take longer, since the rounds after it will not be as good. Whether to draft at all is a matter of credit:
drafted rounds earn what they save over plain decoding, and a controller that has lost its credit decodes plainly for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from draftwood.tree import DraftTree

FORGET = 0.1
"""Weight of the newest round in the running averages."""
FORGET_DEPTH = 0.05
"""Weight of the newest draft in what each depth is worth: the depths differ by less than one draft does from the next."""
OUTLIER = 2.0
"""A pass that took longer than this times the expected counts as that: something else had the processor."""
FULL_EVERY = 8
"""Drafts per one of full depth and size, which shows what more would bring; so does the first after a pause."""
LEAST_BUILT = 8
"""Slots built at least, if the largest tree has them."""
FIRST_CREDIT, MOST_CREDIT = 0.5, 1.0
"""In plain rounds: what a first request may lose by drafting, and how much of the gains is remembered in bad times."""
FIRST_PAUSE, LONGEST_PAUSE = 8, 64
"""Plain rounds before drafting is probed again; doubles until the credit has been earned back."""


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


class Credit:
    """Whether to draft at all: drafted rounds earn what they gain over plain decoding, and without credit there is a pause.

    Counted in plain rounds. A cumulative sum with a cap: it finds out soon when drafting stops paying (E. S. Page, 1954).
    """

    def __init__(self) -> None:
        self._credit, self._pause, self._next_pause = FIRST_CREDIT, 0, 0

    def restart(self) -> None:
        """Another text: an end to the pause, and half of the distrust goes."""
        self._pause, self._next_pause = 0, self._next_pause // 2
        if self._next_pause == 0:
            self._credit = max(self._credit, FIRST_CREDIT)

    def wants_draft(self) -> bool:
        """Whether the next round should draft; counts a pause down."""
        if self._pause > 0:
            self._pause -= 1
            return False
        return True

    def spend(self, gain: float) -> bool:
        """Book what a drafted round gained; whether there is any credit left."""
        self._credit = min(MOST_CREDIT, self._credit + gain)
        if self._credit < 0:
            self._credit = 0.0
            self._pause = self._next_pause = min(max(2 * self._next_pause, FIRST_PAUSE), LONGEST_PAUSE)
            return False
        if self._credit == MOST_CREDIT:
            self._next_pause = 0
        return True


class Calibration:
    """Accepted tokens per token that the scores promised: decayed sums, with one token of good faith."""

    def __init__(self) -> None:
        self._promised = self._accepted = 1.0

    @property
    def value(self) -> float:
        return min(max(self._accepted / self._promised, 0.02), 4.0)

    def restart(self) -> None:
        """Another text: half of the distrust goes."""
        self._accepted = (self._accepted + self._promised) / 2

    def observe(self, promised: float, accepted: float) -> None:
        """Tokens that a draft's scores promised, uncorrected and roots excluded, and tokens accepted."""
        self._promised += FORGET * (promised - self._promised)
        self._accepted += FORGET * (accepted - self._accepted)


class BudgetController:
    """Picks depth and slots of each round for a whole batch; `draft_seconds` are those of drafting 1, 2, ... tokens deep."""

    def __init__(self, cost: CostTable, draft_seconds: Sequence[float]) -> None:
        self.cost, self.draft_seconds = cost, np.array(draft_seconds, np.float64)
        # tokens and verify seconds of each depth, decayed means
        self._depths = np.zeros((2, len(draft_seconds)))
        self._tokens = self._seconds = 0.0  # of drafted rounds, decayed means
        self._drafts = self._newest_slots = 0
        self.credit, self.calibration = Credit(), Calibration()

    def restart(self) -> None:
        """A new request joins: other text may suit the drafter better."""
        self.credit.restart()
        self.calibration.restart()

    def wants_draft(self) -> bool:
        """Whether the next round should draft at all."""
        return self.credit.wants_draft()

    def plan(self, slots: int) -> tuple[int, int]:
        """How deep to draft the next block and how many slots, of at most `slots`, to build; the last picks tell."""
        self._drafts += 1
        if self._drafts % FULL_EVERY == 1 or not self._seconds:
            return len(self.draft_seconds), slots
        tokens, verify = self._depths
        worth = tokens - self._tokens / self._seconds * (verify + self.draft_seconds)
        return int(np.argmax(worth)) + 1, min(slots, max(LEAST_BUILT, 2 * self._newest_slots))

    def pick(self, tree: DraftTree, depth: int) -> int:
        """Slots to keep of a tree drafted `depth` deep, at least 2.

        Where that costs more credit than there is, the rounds to come pause drafting.
        """
        tree = tree.numpy()
        chances = reach(tree, self.calibration.value)
        plain = self.cost(tree.B)
        # tokens of one request a second
        rate = max(1 / plain, self._tokens / self._seconds if self._seconds else 0.0)
        verify = self.cost.of(tree.B * np.arange(2, tree.T + 1))
        tokens = chances.sum(0).cumsum()[1:] / tree.B
        best = int(np.argmax(tokens - rate * verify))
        self._learn_depths(tree, chances, depth, rate, verify)
        seconds = self.draft_seconds[depth - 1] + verify[best]
        self._tokens += FORGET * (tokens[best] - self._tokens)
        self._seconds += FORGET * (seconds - self._seconds)
        self._newest_slots = best + 2
        if not self.credit.spend(float(tokens[best] - seconds / plain)):
            self._drafts = 0
        return self._newest_slots

    def _learn_depths(
        self, tree: DraftTree, chances: np.ndarray, depth: int, rate: float, verify: np.ndarray
    ) -> None:
        """What each depth up to this one would have brought: the best cut of the slots that are no deeper."""
        weight = FORGET_DEPTH if self._depths.any() else 1.0
        for d in range(1, depth + 1):
            shallow = (tree.depths <= d) & (chances > 0)
            place = shallow.cumsum(1) - 1  # among the row's shallow slots
            tokens = np.bincount(place[shallow], chances[shallow], minlength=tree.T).cumsum()[1:] / tree.B
            best = int(np.argmax(tokens - rate * verify))
            newest = np.array([tokens[best], verify[best]])
            self._depths[:, d - 1] += weight * (newest - self._depths[:, d - 1])

    def observe_cost(self, rows: int, seconds: Mapping[str, float]) -> None:
        """Stage times of a round over `rows` target rows; rounds that drafted name more rows than requests."""
        self.cost.observe(rows, seconds["verify"] + seconds["accept"] + seconds["commit"])

    def observe_draft(self, promised: float, accepted: int, depth: int, seconds: Mapping[str, float]) -> None:
        """A round drafted `depth` deep: tokens its scores promised, uncorrected and roots excluded, and tokens accepted."""
        self.calibration.observe(promised, accepted)
        known = self.draft_seconds[depth - 1]
        took = min(seconds["draft"] + seconds["build"], OUTLIER * known)
        self.draft_seconds *= 1 + FORGET * (took / known - 1)  # what slows one depth down slows them all


def reach(tree: DraftTree, calibration: float) -> np.ndarray:
    """[B, T] f64, of numpy trees: the chance that each slot is on the accepted path; 1 for roots."""
    chances = np.exp(tree.scores.astype(np.float64)) * calibration
    chances[:, 0] = 1.0
    return np.asarray(chances)
