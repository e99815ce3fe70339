"""A stored row: what was measured of one job, its label, and what may be concluded from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftwood.bench.catalog import Job
from draftwood.bench.planner import Progress
from draftwood.bench.stats import Summary, summarize
from draftwood.bench.store import Row, now
from draftwood.bench.work import Ceilings, bound, figures, is_suspect

STATUSES = {
    "ok": "the interval reached its target at a level that does not drift",
    "noisy": "more visits would not have reached the target within the case's share of the budget, or there are none",
    "drift": "the second half differs from the first by more than the target",
    "low_n": "fewer than six visits",
    "budget": "time ran out before the target, or before the first visit",
    "wrong": "outputs differ from the reference; not timed",
    "invalid": "the inputs break the kernel's contract; not launched",
    "crash": "the implementation raised, or its process died",
    "timeout": "no answer within the limit of one case",
    "suspect": "faster than the measured ceiling allows: the measurement is at fault",
    "unchecked": "timed, but nothing says that the outputs are right",
    "imposed": "timed with an acceptance that was set, not earned",
    "skipped": "the implementation does not take this case",
}
"""Only `ok` rows may support a claim."""

FAILED = ("wrong", "invalid", "crash", "timeout", "suspect")
UNFINISHED = ("budget", "low_n")


def blank_row(job: Job, status: str, note: str) -> Row:
    """What every row has, of a job that was not timed."""
    return {
        "type": "row",
        "kernel": job.kernel,
        "impl": job.impl,
        "case": {**dict(job.case.axes), "seed": job.case.seed},
        "status": status,
        "note": note,
        "median_us": None,
        "low_us": None,
        "high_us": None,
        "n": 0,
        "cache": job.cache,
    }


def is_timed(status: str, progress: Progress) -> bool:
    """Whether a row with this label may show the timings there are."""
    return progress.n > 0 and status not in ("wrong", "crash", "timeout")


def timing_fields(progress: Progress, summary: Summary) -> dict[str, Any]:
    """The row fields that follow from the timings alone."""
    return {
        "median_us": summary.median,
        "low_us": summary.low,
        "high_us": summary.high,
        "n": summary.n,
        "p10_us": summary.p10,
        "p90_us": summary.p90,
        "cv": summary.cv,
        "outliers": summary.outliers,
        "drift": summary.drift,
        "measure_s": progress.spent_s,
        "timings_us": [[round(t, 4) for t in visit] for visit in progress.visits],
    }


def make_row(
    job: Job,
    status: str,
    note: str,
    *,
    common: Mapping[str, Any],
    ceilings: Ceilings,
    target: float,
    info: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    clocks: Mapping[str, Any] | None = None,
) -> Row:
    """The row of a kernel's job. `info` is the worker's reply to `prepare`, `common` what all rows of a run share."""
    untimed = dict.fromkeys(("bytes", "flops", "gbps", "tflops", "ceiling_share"))
    row: Row = {**blank_row(job, status, note), **untimed, **common, "time": now()}
    if info is not None:
        row |= {k: v for k, v in info.items() if k != "status"}
    if progress is None or not is_timed(status, progress):
        return row
    summary = summarize(progress.visits, target)
    assert info is not None
    limit = bound(info["bytes"], info["flops"], dtype_of(job), job.cache, ceilings)
    if is_suspect(summary.low, limit):
        row["status"], row["note"] = "suspect", f"the floor is {limit.floor_us:.3g} us ({limit.binds})"
    elif status == "ok" and info["checked"] == "unchecked":
        row["status"] = "unchecked"
    rates = figures(summary.median, info["bytes"], info["flops"], limit)
    return row | timing_fields(progress, summary) | rates | dict(clocks or {})


def timed_s(row: Row) -> float:
    """Seconds of the run that went into timings, all else being overhead."""
    return float(sum(map(sum, row.get("timings_us") or ())) * row.get("calls", 0) / 1e6)


def dtype_of(job: Job) -> str:
    return str(dict(job.case.axes).get("dtype", "float32"))


def exit_code(rows: list[Row], slower: bool, once: bool) -> int:
    """0 fine, 1 slower, 3 something failed or nothing succeeded, 4 time ran out before the targets."""
    statuses = {row["status"] for row in rows}
    if statuses & set(FAILED) or not any(row["median_us"] for row in rows):
        return 3
    if slower:
        return 1
    return 4 if statuses & set(UNFINISHED) and not once else 0
