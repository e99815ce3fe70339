"""What a round leaves for the host: one record of device tensors, and how it reads row by row once it is on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from draftwood.engine.outputs import TokenLogprob, TracedTree
from draftwood.engine.row import Row
from draftwood.kernels.tree_accept import Done
from draftwood.round import RoundResult, Stages


@dataclass(frozen=True)
class RoundReport:
    """A round's results that the host may want, without logits: its table, see the kernel `advance`. Columns are read on the host."""

    table: Tensor  # [B, 2 + 2 (D + 1) + 4 T] i32
    slots: int  # T

    def head(self, rows: int) -> tuple[list[list[int]], int]:
        """done, n_slots, emitted and path of the first rows, -1 padded, in one list each; and D + 1."""
        width = (self.table.shape[1] - 2 - 4 * self.slots) // 2
        return self._columns(rows, 0, 2 + 2 * width).tolist(), width

    def tokens(self, rows: int) -> np.ndarray:  # [rows, T]
        return self._of_slots(rows, 4)

    def parents(self, rows: int) -> np.ndarray:
        return self._of_slots(rows, 3)

    def scores(self, rows: int) -> np.ndarray:  # [rows, T] f32, -inf at inert slots
        return self._of_slots(rows, 1).view(np.float32)

    def _of_slots(self, rows: int, last: int) -> np.ndarray:
        """The `last`-last of the four blocks of slots."""
        return self._columns(rows, self.table.shape[1] - last * self.slots, self.slots)

    def _columns(self, rows: int, start: int, width: int) -> np.ndarray:
        return np.asarray(self.table.numpy()[:rows, start : start + width])


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of the emitted tokens and of the k best at their positions: fp32, before temperature and filters."""

    chosen: Tensor  # [B, D + 1]
    lp: Tensor  # [B, D + 1, k]
    ids: Tensor  # [B, D + 1, k] i32

    @classmethod
    def of(cls, stages: Stages, result: RoundResult, k: int) -> TokenScores:
        """Of path rows only; k is cut to 1..V."""
        path = result.accepted.path.clamp(min=0).long()
        rows = result.logits.gather(1, path[..., None].expand(-1, -1, result.logits.shape[-1]))
        chosen = stages.target.logprobs(rows, result.accepted.emitted.clamp(min=0))
        k = min(max(k, 1), stages.target.config.vocab_size)
        return cls(chosen, *stages.kernels.topk_logprobs(rows, k))


class RowResult(NamedTuple):
    """What a round did for one row."""

    emitted: list[int]
    done: Done
    slots: int
    """Live slots of its tree, root included."""
    expected: float
    """Tokens that the tree's own scores promised, bonus included."""
    logprobs: list[TokenLogprob] | None
    trace: TracedTree | None


_DONE = tuple(Done)


def most_logprobs(rows: Sequence[Row]) -> int | None:
    """A k that serves every row, a power of two, so that few are in use; None if no row wants log-probabilities."""
    most = max((row.params.logprobs for row in rows if row.params.logprobs is not None), default=None)
    return None if most is None else 1 << (max(most, 1) - 1).bit_length()


def row_results(
    rows: Sequence[Row], report: RoundReport, scores: TokenScores | None, *, trace: bool
) -> tuple[list[RowResult], np.ndarray]:
    """Row by row, for the first len(rows) rows of the batch, and exp of all their slots' scores; the report is on the host."""
    n = len(rows)
    head, width = report.head(n)
    emitted = [[token for token in line[2 : 2 + width] if token >= 0] for line in head]
    if report.slots == 1:
        chances, expected = np.ones((n, 1), np.float32), [1.0] * n
    else:
        chances = np.exp(report.scores(n))  # inert slots score -inf
        expected = chances.sum(1).tolist()
    logprobs = _logprobs(rows, emitted, scores)
    traced = _traced(report, head, width, emitted) if trace else [None] * n
    results = [
        RowResult(out, _DONE[line[0]], line[1], promised, lp, tree)
        for line, out, promised, lp, tree in zip(head, emitted, expected, logprobs, traced, strict=True)
    ]
    return results, chances


def _traced(
    report: RoundReport, head: list[list[int]], width: int, emitted: list[list[int]]
) -> list[TracedTree | None]:
    n = len(head)
    tokens, parents, scores = report.tokens(n), report.parents(n), report.scores(n)
    return [
        TracedTree(
            tokens[b, : line[1]].tolist(),
            parents[b, : line[1]].tolist(),
            scores[b, : line[1]].tolist(),
            [slot for slot in line[2 + width :] if slot >= 0],
            emitted[b],
        )
        for b, line in enumerate(head)
    ]


def _logprobs(
    rows: Sequence[Row], emitted: list[list[int]], scores: TokenScores | None
) -> list[list[TokenLogprob] | None]:
    if scores is None:
        return [None] * len(rows)
    chosen, lp, ids = scores.chosen.tolist(), scores.lp.tolist(), scores.ids.tolist()

    def at(b: int, j: int, n: int) -> TokenLogprob:
        top = tuple(zip(ids[b][j][:n], lp[b][j][:n], strict=True))
        return TokenLogprob(emitted[b][j], chosen[b][j], top)

    wanted = [row.params.logprobs for row in rows]
    return [
        None if n is None else [at(b, j, n) for j in range(len(emitted[b]))] for b, n in enumerate(wanted)
    ]
