"""Rows as tables: the short one at the end of a run, sections of a stored run, CSV, Markdown and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftwood.bench.catalog import UsageError
from draftwood.bench.countdown import Countdown
from draftwood.bench.generate import KERNEL, PLAIN
from draftwood.bench.rows import FAILED
from draftwood.bench.store import Row, Store, axes_text, flat

MOST_LINES = 60

STYLES = {"ok": "green", **dict.fromkeys(FAILED, "bold red"), "skipped": "dim"}


def wide_console() -> Console:
    """Stdout; where that is no terminal, wide enough for every column."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def time_text(us: float | None) -> str:
    """Three significant digits or more, in microseconds."""
    if us is None:
        return "-"
    return f"{us:.2f}" if us < 100 else f"{us:.1f}" if us < 10_000 else f"{us:,.0f}"


def _interval(row: Row) -> str:
    if row["median_us"] is None:
        return "-"
    half = (row["high_us"] - row["low_us"]) / 2 / row["median_us"]
    return f"±{100 * half:.2f} %"


def _number(key: str, form: str) -> Callable[[Row], str]:
    return lambda row: "-" if row.get(key) is None else format(row[key], form)


def _rate(key: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        rate = row.get(key)
        return "-" if rate is None else f"{rate:.3g}" if rate < 999.5 else f"{rate:.0f}"

    return text


def _share(row: Row) -> str:
    share = row.get("ceiling_share")
    if share is None:
        return "-"
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "kernel": lambda row: str(row["kernel"]),
    "impl": lambda row: str(row["impl"]),
    "case": lambda row: axes_text(row["case"]),
    "median us": lambda row: time_text(row["median_us"]),
    "interval": _interval,
    "n": _number("n", "d"),
    "GB/s": _rate("gbps"),
    "TF/s": _rate("tflops"),
    "ceiling": _share,
    "binds": lambda row: str(row.get("binds") or "-"),
    "cache": lambda row: str(row["cache"]),
    "status": lambda row: str(row["status"]),
    "floor us": lambda row: time_text(row.get("floor_us")),
    "launch us": lambda row: time_text(row.get("launch_us")),
    "calls": _number("calls", "d"),
    "method": lambda row: str(row.get("method") or "-"),
    "p10": lambda row: time_text(row.get("p10_us")),
    "p90": lambda row: time_text(row.get("p90_us")),
    "cv": _number("cv", ".2%"),
    "outliers": _number("outliers", "d"),
    "drift": _number("drift", "+.2%"),
    "checked": lambda row: str(row.get("checked") or "-"),
    "clock": _number("clock_mhz", ".0f"),
    "note": lambda row: str(row["note"]).split("\n", 1)[0],
}

SHORT = ("kernel", "impl", "case", "median us", "interval", "n", "GB/s", "TF/s", "ceiling", "binds", "status")
TEXT_COLUMNS = {"kernel", "impl", "case", "binds", "cache", "status", "method", "checked", "note"}


@dataclass(frozen=True)
class View:
    """How the rows of a suite are shown."""

    columns: Mapping[str, Callable[[Row], str]]
    short: tuple[str, ...]
    text: Collection[str]  # columns of words
    sections: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # columns by what they are about
    title: Callable[[Sequence[Row]], str | None] = lambda rows: None  # what must be said of all rows


KERNELS = View(COLUMNS, SHORT, TEXT_COLUMNS)


def view_of(rows: Sequence[Row]) -> View:
    """The view of the suite that the rows come from."""
    from draftwood.bench.generate.show import GENERATE

    return GENERATE if any(row["kernel"] == KERNEL for row in rows) else KERNELS


def varying_axes(rows: Sequence[Row]) -> dict[str, list[str]]:
    """By kernel, the axes that tell its cases apart: the others need not be repeated in each line."""
    values: dict[str, dict[str, set[Any]]] = {}
    for row in rows:
        axes = values.setdefault(row["kernel"], {})
        for axis, value in row["case"].items():
            axes.setdefault(axis, set()).add(value)
    return {k: [a for a, v in axes.items() if len(v) > 1] or list(axes)[:1] for k, axes in values.items()}


def shorten(rows: Sequence[Row]) -> list[Row]:
    """The rows with only the varying axes in their cases."""
    varying = varying_axes(rows)
    return [{**r, "case": {a: r["case"][a] for a in varying[r["kernel"]] if a in r["case"]}} for r in rows]


def table(
    rows: Sequence[Row], columns: Sequence[str] = SHORT, title: str | None = None, view: View = KERNELS
) -> Table:
    out = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        wide = column in ("case", "note", "method")
        out.add_column(
            column,
            justify="left" if column in view.text else "right",
            no_wrap=not wide,
            overflow="ellipsis" if column == "case" else "fold",
        )
    before = None
    for row in shorten(rows):
        cells = [view.columns[c](row) for c in columns]
        if row["kernel"] == before and columns[0] == "kernel":
            cells[0] = ""
        before = row["kernel"]
        style = STYLES.get(row["status"], "yellow")
        out.add_row(
            *(Text(c, style=style if k == "status" else "") for k, c in zip(columns, cells, strict=True))
        )
    return out


def in_order(rows: Sequence[Row], sort: str | None = None) -> list[Row]:
    """By kernel, case and implementation, or by a stored field or figure."""
    if sort is None:
        return sorted(rows, key=lambda r: (r["kernel"], _natural(r["case"]), _natural_impl(r["impl"])))
    values = [row.get("figures", {}).get(sort, [row.get(sort)])[0] for row in rows]
    if all(value is None for value in values):
        raise UsageError(f"`--sort {sort}`: no row has this field")
    pairs = zip(rows, values, strict=True)
    return [row for row, _ in sorted(pairs, key=lambda pair: (pair[1] is None, pair[1]))]


def _natural_impl(impl: str) -> tuple[str, float, str]:
    """Plain decoding first; `tree:8` before `tree:16`, and before `tree:auto`."""
    name, _, argument = impl.partition(":")
    if name == PLAIN:
        return "", 0.0, ""
    return (name, float(argument), "") if argument.isdecimal() else (name, float("inf"), argument)


def _natural(case: Mapping[str, Any]) -> list[tuple[str, float, str]]:
    return [(k, v, "") if isinstance(v, int | float) else (k, 0.0, str(v)) for k, v in case.items()]


def short_table(
    console: Console, rows: Sequence[Row], versus: Sequence[Mapping[str, Any]], lines: int
) -> None:
    """What a run prints last: what failed first, then as many rows as `lines` allow, saying how many are left out."""
    failed = [r for r in rows if r["status"] in FAILED]
    shown = in_order(rows)
    room = lines - 4 - len(failed[:8]) - min(len(versus), 12)
    hidden = max(0, len(shown) - room)
    console.print(table(shown[: len(shown) - hidden]))
    if hidden:
        console.print(f"... {hidden} more rows: `draftwood bench show`", style="dim")
    for row in failed[:8]:
        note = COLUMNS["note"](row)
        console.print(
            f"{row['status']}: {row['kernel']} {row['impl']} {axes_text(row['case'])}: {note}", style="red"
        )
    for v in versus[:12]:
        console.print(versus_text(v))


def last_line(console: Console, rows: Sequence[Row], out: Store, countdown: Countdown) -> None:
    """How many rows of which label, what time it took, and where it is stored, or what is not."""
    unsaved = f"; {len(out.pending)} lines NOT SAVED: {out.error}" if out.pending else ""
    console.print(
        f"{tally(rows)}; {countdown.used():.1f} s of {countdown.seconds:.0f} s; `{out.path}`{unsaved}",
        style="bold",
    )


def versus_text(v: Mapping[str, Any]) -> str:
    return (
        (
            f"{v['kernel']} {axes_text(v['case'])}: {v['impl']} is {v['verdict']} than {v['vs']}, "
            f"time ratio {v['ratio']:.3f} [{v['low']:.3f}, {v['high']:.3f}], p {v['p']:.2g}"
        )
        .replace("is same than", "takes the same time as")
        .replace("is unclear than", "is unclear against")
    )


def tally(rows: Sequence[Row]) -> str:
    """`57 ok, 2 noisy, 1 wrong`."""
    counts = Counter(row["status"] for row in rows)
    return ", ".join(f"{n} {status}" for status, n in counts.most_common())


def choose_columns(text: str | None, view: View = KERNELS) -> tuple[str, ...]:
    if text is None:
        return view.short
    columns = tuple(c.strip() for c in text.split(","))
    for column in columns:
        if column not in view.columns:
            raise UsageError(f"`--columns`: no column `{column}`; there are: {', '.join(view.columns)}")
    return columns


def as_json(rows: Sequence[Row]) -> str:
    return json.dumps(list(rows), indent=1)


def as_csv(rows: Sequence[Row]) -> str:
    """All fields but the timings themselves; the case as `axis=value,...` text."""
    lines = flat(rows)
    fields = list(dict.fromkeys(k for line in lines for k in line))
    out = io.StringIO()
    writer = csv.DictWriter(out, fields, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def as_markdown(rows: Sequence[Row], columns: Sequence[str] = SHORT, view: View = KERNELS) -> str:
    head = [
        "| " + " | ".join(columns) + " |",
        "|" + "|".join("---" if c in view.text else "--:" for c in columns) + "|",
    ]
    body = ["| " + " | ".join(view.columns[c](row) for c in columns) + " |" for row in shorten(rows)]
    return "\n".join([*head, *body])
