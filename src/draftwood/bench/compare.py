"""Two stored runs, row by row: ratios, verdicts, and the spread over many runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from draftwood.bench import stats
from draftwood.bench.catalog import UsageError
from draftwood.bench.show import shorten, time_text
from draftwood.bench.store import Row, Run, axes_text, job_key

SAME_FIELDS = ("device", "model", "dtype")
"""Rows that differ in these are not compared unless asked: the difference would not be the code's."""

CLAIMS = {("ok", "ok"), ("imposed", "imposed")}
"""Labels of two rows that get a verdict; the second is one about cost alone."""

PAIRED = {"ok", "noisy", "budget", "imposed"}
"""Labels that get one where both runs visited the same prompts: what differs between prompts cancels out."""


def compare_runs(before: Run, after: Run, across: bool = False) -> list[dict[str, Any]]:
    """One line per job in both runs: time after over time before. See `CLAIMS` and `PAIRED` for which get a verdict.

    Raises `UsageError` when the runs share no job, or differ in a `SAME_FIELDS` and `across` is not set.
    """
    old = {job_key(row): row for row in before.rows}
    lines = []
    for row in after.rows:
        base = old.get(job_key(row))
        if base is None:
            continue
        for name in SAME_FIELDS:
            if base.get(name) != row.get(name) and not across:
                raise UsageError(
                    f"`{name}` differs: `{base.get(name)}` and `{row.get(name)}`; `--across` compares nevertheless"
                )
        lines.append(_line(base, row))
    if not lines:
        raise UsageError(f"`{before.path}` and `{after.path}` have no row in common")
    return lines


def _line(base: Row, row: Row) -> dict[str, Any]:
    line: dict[str, Any] = {k: row[k] for k in ("kernel", "impl", "case", "cache")}
    line |= {"before": base, "after": row}
    pairs = _same_prompts(base, row)
    if pairs and {base["status"], row["status"]} <= PAIRED:
        note = f"{len(pairs)} pairs" + (", imposed acceptance" if row.get("acceptance") else "")
        return line | {"note": note, **vars(stats.compare_pairs(*zip(*pairs, strict=True)))}
    if (base["status"], row["status"]) not in CLAIMS:
        return line | {"verdict": "unclear", "note": f"{base['status']} before, {row['status']} after"}
    a, b = ([stats.value_of(v) for v in r["timings_us"]] for r in (row, base))
    clocks = (row["clock_mhz"], base["clock_mhz"]) if row.get("clock_mhz") and base.get("clock_mhz") else None
    return line | {"note": "", **vars(stats.compare(a, b, paired=False, clocks=clocks))}


def _same_prompts(base: Row, row: Row) -> list[tuple[float, float]]:
    """Times after and before of visits that had the same prompts; rows of kernels have none."""
    before = {v["prompts"]: v["us_per_token"] for v in base.get("visits", ())}
    return [
        (v["us_per_token"], before[v["prompts"]]) for v in row.get("visits", ()) if v["prompts"] in before
    ]


def is_regression(line: Mapping[str, Any], allowed: float) -> bool:
    """Whether a line is a slowdown, beyond doubt, of more than the fraction `allowed`."""
    return bool(line["verdict"] == "slower" and line["low"] > 1 + allowed)


def comparison_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    out = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("kernel", "impl", "case", "before us", "after us", "ratio", "interval", "verdict"):
        out.add_column(name, justify="left" if name in ("kernel", "impl", "case", "verdict") else "right")
    styles = {"faster": "green", "slower": "bold red", "unclear": "yellow", "same": ""}
    for line, short in zip(lines, shorten([dict(line) for line in lines]), strict=True):
        known = "ratio" in line
        out.add_row(
            line["kernel"],
            line["impl"],
            axes_text(short["case"]),
            time_text(line["before"]["median_us"]),
            time_text(line["after"]["median_us"]),
            f"{line['ratio']:.3f}" if known else "-",
            f"[{line['low']:.3f}, {line['high']:.3f}]".replace("[", r"\[") if known else "-",
            line["verdict"] + (f" ({line['note']})" if line["note"] else ""),
            style=styles[line["verdict"]],
        )
    return out


def spread(runs: Sequence[Run], every: bool = False) -> list[dict[str, Any]]:
    """Of each job that is ok (with `every`: timed) in two runs or more: the range of its medians over their median.

    `covered` is the share of runs whose stated interval holds the median over all runs.
    """
    by_job: dict[Any, list[Row]] = {}
    for run in runs:
        for row in run.rows:
            if row["median_us"] and (every or row["status"] == "ok"):
                by_job.setdefault(job_key(row), []).append(row)
    lines = []
    for rows in by_job.values():
        if len(rows) < 2:
            continue
        medians = [row["median_us"] for row in rows]
        middle = median(medians)
        covered = sum(row["low_us"] <= middle <= row["high_us"] for row in rows) / len(rows)
        line = {k: rows[0][k] for k in ("kernel", "impl", "case")}
        line |= {"runs": len(rows), "median_us": middle, "covered": covered}
        lines.append(line | {"spread": (max(medians) - min(medians)) / middle})
    return lines


def spread_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    out = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("kernel", "impl", "case", "runs", "median us", "spread", "intervals hold it"):
        out.add_column(name, justify="left" if name in ("kernel", "impl", "case") else "right")
    for line in shorten([dict(line) for line in lines]):
        out.add_row(
            line["kernel"],
            line["impl"],
            axes_text(line["case"]),
            str(line["runs"]),
            time_text(line["median_us"]),
            f"{line['spread']:.2%}",
            f"{line['covered']:.0%}",
        )
    return out
