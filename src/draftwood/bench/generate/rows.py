"""A stored row of generation: one setting in one mode, every figure as its median over visits with an interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from draftwood.bench.catalog import Job
from draftwood.bench.generate import PLAIN
from draftwood.bench.generate.cases import acceptance_of
from draftwood.bench.planner import Progress
from draftwood.bench.rows import blank_row, is_timed, timing_fields
from draftwood.bench.stats import Comparison, median_interval, summarize
from draftwood.bench.store import Row, now


@dataclass
class Seen:
    """What visits of a job have shown beside their times."""

    visits: list[dict[str, Any]] = field(default_factory=list)  # see `visits.Record`
    turns: int = 0  # in which plain decoding was there to be compared with
    requests: int = 0  # compared
    identical: int = 0
    first_difference: tuple[int, int, int] | None = None  # turn, request, token: the earliest token
    ratio: Comparison | None = None  # of times, to plain

    def check(self, tokens: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> None:
        """Hold a visit's tokens against those of plain decoding."""
        for request, (ours, theirs) in enumerate(zip(tokens, plain, strict=True)):
            at = first_difference(ours, theirs)
            self.requests += 1
            self.identical += at is None
            if at is not None and (self.first_difference is None or at < self.first_difference[2]):
                self.first_difference = (self.turns, request, at)
        self.turns += 1

    def difference(self) -> str:
        """In words; empty where there is none."""
        if self.first_difference is None:
            return ""
        turn, request, token = self.first_difference
        return (
            f"{self.requests - self.identical} of {self.requests} outputs differ from plain decoding's, "
            f"first at token {token} (visit {turn}, request {request})"
        )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two outputs part; None if they are the same."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def make_row(
    job: Job,
    status: str,
    note: str,
    *,
    common: Mapping[str, Any],
    target: float,
    seen: Seen,
    progress: Progress | None = None,
    clocks: Mapping[str, Any] | None = None,
) -> Row:
    """The row of a job. `common` is what all rows of a run share. A row of imposed acceptance is never `ok`."""
    row: Row = {
        **blank_row(job, status, note),
        "acceptance": acceptance_of(job.case),
        "compared": seen.requests,
        "identical": seen.identical,
        **common,
        "time": now(),
    }
    if progress is None or not is_timed(status, progress):
        return row
    if status == "ok" and job.impl != PLAIN and seen.turns < progress.n:
        row["status"] = "unchecked"
    elif status == "ok" and row["acceptance"]:
        row["status"] = "imposed"
    row["note"] = "; ".join(filter(None, (note, seen.difference())))
    row |= timing_fields(progress, summarize(progress.visits, target)) | dict(clocks or {})
    row["calls"] = seen.visits[0]["tokens"]  # what a timing is divided by
    row["figures"] = figures(seen.visits)
    row["visits"] = seen.visits
    if seen.ratio is not None:
        row |= {f"vs_plain_{k}" if k != "verdict" else k: v for k, v in vars(seen.ratio).items()}
    return row


def figures(visits: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float, float]]:
    """Name -> median and its 95 % interval over visits, of every figure that all visits have."""
    found = {}
    for name in visits[0]:
        values = [value for v in visits if isinstance(value := v.get(name), int | float)]
        if len(values) == len(visits):
            found[name] = (float(median(values)), *median_interval(values))
    return found
