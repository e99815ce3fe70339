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

    @property
    def done(self) -> np.ndarray:  # [B]
        return self._columns(0, 1)[:, 0]

    @property
    def n_slots(self) -> np.ndarray:  # [B]
        return self._columns(1, 1)[:, 0]

    @property
    def emitted(self) -> np.ndarray:  # [B, D + 1], -1 padded
        return self._columns(2, self._path)

    @property
    def path(self) -> np.ndarray:  # [B, D + 1], -1 padded
        return self._columns(2 + self._path, self._path)

    @property
    def tokens(self) -> np.ndarray:  # [B, T]
        return self._of_slots(0)

    @property
    def parents(self) -> np.ndarray:
        return self._of_slots(1)

    @property
    def scores(self) -> np.ndarray:  # [B, T] f32, -inf at inert slots
        return self._of_slots(3).view(np.float32)

    @property
    def _path(self) -> int:
        return (self.table.shape[1] - 2 - 4 * self.slots) // 2

    def _of_slots(self, which: int) -> np.ndarray:
        return self._columns(2 + 2 * self._path + which * self.slots, self.slots)

    def _columns(self, start: int, width: int) -> np.ndarray:
        return np.asarray(self.table.numpy()[:, start : start + width])


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
    done, n_slots, padded = report.done.tolist(), report.n_slots.tolist(), report.emitted
    emitted = [row[:n] for row, n in zip(padded.tolist(), (padded >= 0).sum(1).tolist(), strict=True)]
    chances = np.exp(report.scores[: len(rows)])  # inert slots score -inf
    expected, logprobs = chances.sum(1).tolist(), _logprobs(rows, emitted, scores)
    results = [
        RowResult(
            emitted[b],
            _DONE[done[b]],
            n_slots[b],
            expected[b],
            logprobs[b],
            _traced(report, b, n_slots[b], emitted[b]) if trace else None,
        )
        for b in range(len(rows))
    ]
    return results, chances


def _traced(report: RoundReport, b: int, n: int, emitted: list[int]) -> TracedTree:
    return TracedTree(
        report.tokens[b, :n].tolist(),
        report.parents[b, :n].tolist(),
        report.scores[b, :n].tolist(),
        [slot for slot in report.path[b].tolist() if slot >= 0],
        emitted,
    )


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
