"""What a round leaves for the host: one record of device tensors, and how it reads row by row once it is on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.engine.outputs import TokenLogprob, TracedTree
from draftwood.engine.row import Row
from draftwood.kernels.tree_accept import Done
from draftwood.round import RoundResult, Stages


@dataclass(frozen=True)
class RoundReport:
    """A round's results that the host may want, without logits."""

    done: Tensor  # [B] i32
    n_slots: Tensor  # [B] i32
    emitted: Tensor  # [B, D + 1] i32, -1 padded
    path: Tensor  # [B, D + 1] i32, -1 padded
    tokens: Tensor  # [B, T] i32
    parents: Tensor  # [B, T] i32
    depths: Tensor  # [B, T] i32
    scores: Tensor  # [B, T] f32, -inf at inert slots

    @classmethod
    def of(cls, result: RoundResult) -> RoundReport:
        tree, accepted = result.tree, result.accepted
        return cls(
            accepted.done,
            tree.n_slots,
            accepted.emitted,
            accepted.path,
            tree.tokens,
            tree.parents,
            tree.depths,
            tree.scores,
        )


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


@dataclass(frozen=True)
class RowResult:
    """What a round did for one row."""

    emitted: list[int]
    done: Done
    slots: int
    """Live slots of its tree, root included."""
    expected: float
    """Tokens that the tree's own scores promised, bonus included."""
    logprobs: list[TokenLogprob] | None
    trace: TracedTree | None


def most_logprobs(rows: Sequence[Row]) -> int | None:
    """A k that serves every row, a power of two, so that few are in use; None if no row wants log-probabilities."""
    most = max((row.params.logprobs for row in rows if row.params.logprobs is not None), default=None)
    return None if most is None else 1 << (max(most, 1) - 1).bit_length()


def row_results(
    rows: Sequence[Row], report: RoundReport, scores: TokenScores | None, *, trace: bool
) -> list[RowResult]:
    """Row by row, for the first len(rows) rows of the batch. Waits for the device if the tensors are on one."""
    done, n_slots = torch.stack([report.done, report.n_slots]).tolist()
    emitted = [[token for token in row if token >= 0] for row in report.emitted.tolist()]
    expected = report.scores.exp().sum(1).tolist()  # inert slots score -inf
    logprobs = _logprobs(rows, emitted, scores)
    return [
        RowResult(
            emitted[b],
            Done(done[b]),
            n_slots[b],
            expected[b],
            logprobs[b],
            _traced(report, b, n_slots[b], emitted[b]) if trace else None,
        )
        for b in range(len(rows))
    ]


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
