"""Drafters that know the true continuation, and use that knowledge well, badly or at random."""

from __future__ import annotations

from typing import Literal

import torch

from draftwood.round import RoundState
from draftwood.scores import NEUTRAL

Style = Literal["perfect", "adversarial", "random"]


class ScriptedDrafting:
    """Implements `draftwood.round.Drafting`. Rows are told apart by their seed.

    perfect: the true token leads at every depth. adversarial: it is never a candidate. random: it holds up to a
    random depth, at one random depth as a later sibling, and is no candidate after that.
    """

    taps = (0,)
    rule = NEUTRAL

    def __init__(
        self, texts: dict[int, list[int]], vocab: int, style: Style, max_depth: int, seed: int = 0
    ) -> None:
        self.texts, self.vocab, self.style, self.max_depth = texts, vocab, style, max_depth
        self.generator = torch.Generator().manual_seed(seed)

    def _integer(self, high: int) -> int:
        return int(torch.randint(high, (1,), generator=self.generator))

    def logits(self, state: RoundState, depth: int) -> torch.Tensor:
        out = torch.randn(len(state.root), depth, self.vocab, generator=self.generator)
        for b, (seed, prefix) in enumerate(zip(state.seed.tolist(), state.prefix_len.tolist(), strict=True)):
            true = self.texts[seed][prefix + 1 : prefix + 1 + depth]
            until, late = self._integer(depth + 1), self._integer(depth)
            for d in range(depth):
                # Gaps are wide enough that the noise of coupled drafting cannot close them.
                if d >= len(true):
                    continue
                if self.style == "perfect":
                    out[b, d, true[d]] = 200.0
                elif self.style == "adversarial" or d >= until:
                    out[b, d, true[d]] = -torch.inf
                else:
                    out[b, d, true[d]] = 200.0
                    if d == late:
                        out[b, d, self._integer(self.vocab)] = 200.5
        return out

    def extend(self, features, page_table, start, count) -> None:
        assert features.shape[0] == len(start) == len(count)

    def catch_up(self) -> None:
        """It keeps no context."""

    def copy_page(self, source: int, target: int) -> None:
        """It keeps no context."""


class Coverage:
    """What the accepted paths of traced outputs have shown."""

    def __init__(self) -> None:
        self.lengths: set[int] = set()
        self.later_siblings = 0

    def add(self, output) -> None:
        for record in output.rounds:
            trace = record.trace
            self.lengths.add(len(trace.path))
            for slot in trace.path[1:]:
                self.later_siblings += trace.parents[slot] in trace.parents[:slot]
