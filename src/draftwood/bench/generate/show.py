"""Generation's tables: speed against plain decoding, latency, stages of a round, acceptance, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from draftwood.bench.rows import FAILED
from draftwood.bench.show import View, in_order, table
from draftwood.bench.store import Row, axes_text

STAGES = ("draft", "build", "verify", "accept", "commit", "replay", "rest")
"""`replay` is the whole round where it is a replayed graph, whose stages cannot be told apart."""
"""Of a round; `rest` is what the host does between them."""


def figure(name: str, form: str = ".3g") -> Callable[[Row], str]:
    """Median and half the interval."""

    def text(row: Row) -> str:
        if name not in row.get("figures", {}):
            return "-"
        median, low, high = row["figures"][name]
        half = (high - low) / 2
        return f"{format(median, form) if median < 999 else f'{median:.0f}'} ±{half:{'.2g' if half < 99 else '.0f'}}"

    return text


def _speedup(row: Row) -> str:
    """How many times as fast as plain: the inverse of the ratio of times."""
    if "vs_plain_ratio" not in row:
        return "-"
    low, middle, high = (1 / row[f"vs_plain_{k}"] for k in ("high", "ratio", "low"))
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def _identical(row: Row) -> str:
    return f"{row['identical']}/{row['compared']}" if row["compared"] else "-"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "mode": lambda row: str(row["impl"]),
    "case": lambda row: axes_text(row["case"]),
    "tok/s": figure("tokens_per_s", ".1f"),
    "n": lambda row: str(row["n"]),
    "x plain": _speedup,
    "verdict": lambda row: str(row.get("verdict", "-")),
    "tok/s+prefill": figure("tokens_per_s_with_prefill", ".1f"),
    "tok/round": figure("tokens_per_round"),
    "expected": figure("expected_per_round"),
    "realised": figure("realised_per_round"),
    "slots": figure("slots"),
    "drafted": figure("drafted_share", ".2f"),
    "ttft p50 ms": figure("ttft_p50_ms"),
    "ttft p90 ms": figure("ttft_p90_ms"),
    "itl p50 ms": figure("itl_p50_ms"),
    "itl p90 ms": figure("itl_p90_ms"),
    "itl p99 ms": figure("itl_p99_ms"),
    "gap p99 ms": figure("gap_p99_ms"),
    "prefill ms": figure("prefill_ms"),
    "round ms": figure("round_ms"),
    **{f"{stage} ms": figure(f"{stage}_ms") for stage in STAGES},
    "peak MiB": figure("peak_mib", ".0f"),
    "identical": _identical,
    "acceptance": lambda row: str(row["acceptance"] or "real"),
    "status": lambda row: str(row["status"]),
    "note": lambda row: str(row["note"]).split("\n", 1)[0],
}

SPEED = (
    *("mode", "case", "tok/s", "n", "x plain", "verdict", "tok/round", "tok/s+prefill"),
    *("peak MiB", "identical", "acceptance", "status"),
)
SECTIONS = {
    "speed": SPEED,
    "latency": (
        *("mode", "case", "n", "ttft p50 ms", "ttft p90 ms", "itl p50 ms", "itl p90 ms", "itl p99 ms"),
        *("gap p99 ms", "acceptance", "status"),
    ),
    "stages": (
        *("mode", "case", "n", "prefill ms", "round ms", *(f"{stage} ms" for stage in STAGES)),
        *("acceptance", "status"),
    ),
    "acceptance": (
        *("mode", "case", "n", "expected", "realised", "tok/round", "slots", "drafted"),
        *("acceptance", "status"),
    ),
}


def imposed(rows: Sequence[Row]) -> str | None:
    """What stands above every table with such rows."""
    kinds = list(dict.fromkeys(row["acceptance"] for row in rows if row.get("acceptance")))
    if not kinds:
        return None
    return f"imposed acceptance ({'; '.join(kinds)}): what rounds cost, and no claim about speed"


GENERATE = View(
    COLUMNS,
    SPEED,
    {"mode", "case", "verdict", "acceptance", "status", "note"},
    SECTIONS,
    imposed,
)


def last_tables(console: Console, rows: Sequence[Row], lines: int) -> None:
    """What a run prints last: what failed, then every section that still fits into `lines`, the speed of all first."""
    shown, failed = in_order(rows), [r for r in rows if r["status"] in FAILED]
    above = imposed(rows)
    for row in failed[:8]:
        note = COLUMNS["note"](row)
        console.print(f"{row['status']}: {row['impl']} {axes_text(row['case'])}: {note}", style="red")
    left = lines - 2 - len(failed[:8])
    fits = shown[: max(1, left - 3)]
    console.print(table(fits, SPEED, above, GENERATE))
    if len(fits) < len(shown):
        console.print(f"... {len(shown) - len(fits)} more rows: `draftwood bench show`", style="dim")
    left -= len(fits) + 2 + bool(above)
    timed = [r for r in shown if r["median_us"]]
    for name, columns in SECTIONS.items() if timed else ():
        if columns == SPEED:
            continue
        if len(timed) + 3 > left:
            console.print(f"... more: `draftwood bench show --section {name}`", style="dim")
            break
        console.print()
        console.print(table(timed, columns, above, GENERATE))
        left -= len(timed) + 2 + bool(above)
