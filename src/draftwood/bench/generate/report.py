"""A stored run of generation as one HTML page: speed against plain decoding, latency, rounds by stage, acceptance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from draftwood.bench import show
from draftwood.bench.charts import Bar, Point, Series, dot_plot, legend, line_chart, stacked_bars
from draftwood.bench.generate.show import GENERATE, SECTIONS, STAGES, imposed
from draftwood.bench.report import facts_of, labels, page, table
from draftwood.bench.store import Row, Run, axes_text

Colors = Mapping[str, int]

AXES = ("batch", "prompt", "new", "temperature")
"""That a line may run along, the first that has several values."""


def html(run: Run) -> str:
    """The page; a run without timed rows gives one without plots."""
    rows = show.in_order(run.rows)
    timed = [r for r in rows if r["median_us"]]
    modes = list(dict.fromkeys(r["impl"] for r in rows))
    colors = {mode: i for i, mode in enumerate(modes)}
    return page(
        "Generation benchmark", _head(run, rows) + _plots(timed, colors) + _tables(rows) + labels(rows)
    )


def _head(run: Run, rows: Sequence[Row]) -> str:
    model = run.header.get("model_facts", {})
    facts = {
        "model": model.get("model"),
        "dtype": model.get("dtype"),
        "acceptance": imposed(rows) or "real",
        **facts_of(run),
    }
    items = "".join(f"<div><dt>{k}</dt><dd>{escape(str(v))}</dd></div>" for k, v in facts.items() if v)
    warning = f"<p class='fail'>{escape(above)}</p>" if (above := imposed(rows)) else ""
    return (
        f"<h1>Generation benchmark</h1><p class='soft'>{escape(run.path.name)}: {len(rows)} rows, "
        f"{escape(show.tally(rows))}. Figures are medians over visits with 95 % intervals; every mode visits the same "
        "prompts. Only rows labelled <span class='ok'>ok</span> support a claim; others are drawn hollow.</p>"
        f"{warning}<dl>{items}</dl>"
    )


def _plots(rows: Sequence[Row], colors: Colors) -> str:
    if not rows:
        return ""
    names = [(mode, colors[mode]) for mode in colors if any(r["impl"] == mode for r in rows)]
    parts = [
        ("Speed over plain decoding", _speedups(rows, colors)),
        ("Tokens per second", _lines(rows, colors, "tokens_per_s", "tok/s")),
        ("Tokens per round", _lines(rows, colors, "tokens_per_round", "tokens")),
        ("Tokens per round that trees promised", _dots(rows, colors, "expected_per_round", "tokens")),
        (
            "Tokens per round that came, last rounds left out",
            _dots(rows, colors, "realised_per_round", "tokens"),
        ),
        ("Wait for a token, p99", _dots(rows, colors, "itl_p99_ms", "ms")),
    ]
    key = legend(names)
    plots = "".join(f"<h2>{escape(title)}</h2>{key}{plot}" for title, plot in parts if plot)
    return f"{plots}<h2>A round, by stage</h2>{_stages(rows)}"


def _speedups(rows: Sequence[Row], colors: Colors) -> str:
    """Of pairs of the same prompts; plain decoding is at 1."""
    compared = [r for r in rows if "vs_plain_ratio" in r]

    def point(row: Row, line: float) -> Point:
        low, middle, high = (1 / row[f"vs_plain_{k}"] for k in ("high", "ratio", "low"))
        return Point(middle, line, low, high, _title(row), row["status"] == "ok")

    return _by_case(compared, colors, point, " x", mark=1.0)


def _dots(rows: Sequence[Row], colors: Colors, name: str, unit: str) -> str:
    def point(row: Row, line: float) -> Point:
        middle, low, high = row["figures"][name]
        return Point(middle, line, low, high, _title(row), row["status"] == "ok")

    return _by_case([r for r in rows if name in r["figures"]], colors, point, f" {unit}")


def _by_case(
    rows: Sequence[Row],
    colors: Colors,
    point: Callable[[Row, float], Point],
    unit: str,
    mark: float | None = None,
) -> str:
    """A line per row: intervals of modes overlap."""
    if not rows:
        return ""
    series = [
        Series(mode, colors[mode], [point(r, i) for i, r in enumerate(rows) if r["impl"] == mode])
        for mode in dict.fromkeys(r["impl"] for r in rows)
    ]
    return dot_plot(_names(rows), series, [mark] * len(rows), unit)


def _names(rows: Sequence[Row]) -> list[str]:
    return [f"{r['impl']} {axes_text(r['case'])}" for r in show.shorten(rows)]


def _lines(rows: Sequence[Row], colors: Colors, name: str, unit: str) -> str:
    """Against the axis that varies, a panel per combination of the others; against slots where none does."""
    axis = next((a for a in AXES if len({r["case"][a] for r in rows}) > 1), None)
    if axis is None:
        return _dots(rows, colors, name, unit)
    groups: dict[str, list[Row]] = {}
    for full, short in zip(rows, show.shorten(rows), strict=True):
        groups.setdefault(axes_text({k: v for k, v in short["case"].items() if k != axis}), []).append(full)
    panels = []
    for text, group in groups.items():
        series = []
        for mode in dict.fromkeys(r["impl"] for r in group):
            own = [r for r in group if r["impl"] == mode]
            points = [_figure_point(r, r["case"][axis], name) for r in own]
            series.append(Series(mode, colors[mode], points))
        panels.append(line_chart(series, axis, text, unit=unit))
    return f"<div class='panels'>{''.join(panels)}</div>"


def _figure_point(row: Row, x: float, name: str) -> Point:
    middle, low, high = row["figures"][name]
    return Point(x, middle, low, high, _title(row), row["status"] == "ok")


def _stages(rows: Sequence[Row]) -> str:
    """Medians of each stage, one bar per row."""
    bars = []
    for row, name in zip(rows, _names(rows), strict=True):
        parts = [row["figures"].get(f"{stage}_ms", (0.0,))[0] for stage in STAGES]
        bars.append(Bar(name, [max(0.0, part) for part in parts]))
    return legend([(stage, i) for i, stage in enumerate(STAGES)]) + stacked_bars(bars, STAGES, "ms")


def _title(row: Row) -> str:
    cells = (f"{c} {GENERATE.columns[c](row)}" for c in ("tok/s", "x plain", "tok/round"))
    label = f", {row['acceptance']} acceptance" if row["acceptance"] else ""
    return f"{row['impl']} {axes_text(row['case'])}: {', '.join(cells)}, n {row['n']}, {row['status']}{label}"


def _tables(rows: Sequence[Row]) -> str:
    above = imposed(rows)
    note = f"<p class='fail'>{escape(above)}</p>" if above else ""
    return "".join(
        f"<h2>{escape(name.capitalize())}</h2>{note}{table(rows, columns, GENERATE)}"
        for name, columns in SECTIONS.items()
    )
