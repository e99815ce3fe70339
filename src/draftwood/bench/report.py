"""A stored run as one HTML page: facts, roofline, and a section per kernel. No script, nothing fetched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from draftwood.bench import show
from draftwood.bench.catalog import UsageError
from draftwood.bench.charts import Point, Series, dot_plot, legend, line_chart, roofline
from draftwood.bench.rows import FAILED, STATUSES
from draftwood.bench.store import Row, Run, axes_text

LENGTHS = ("prefix", "context")
"""Axes that a latency plot has for its x, where a kernel has one with several values; else its most varied number."""

COLUMNS = (
    "impl",
    "case",
    "status",
    "median us",
    "interval",
    "n",
    "floor us",
    "ceiling",
    "binds",
    "GB/s",
    "TF/s",
)
EXTRA_COLUMNS = {"launch us": "launch_us", "clock": "clock_mhz"}
"""Shown where some row has them: a GPU's."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60666c; --line: #d9dde1; --page: #fff; --card: #f6f7f8;
 --0: #0072b2; --1: #d55e00; --2: #009e73; --3: #cc79a7; --4: #b8860b; --5: #56b4e9; --6: #7f5fc7; --7: #6b7280;
 --good: #18794e; --bad: #c4314b; --odd: #9a6700 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --soft: #9aa1a8; --line: #33383d; --page: #15181b;
 --card: #1d2125; --0: #4ba3dc; --1: #f08a3c; --2: #2fc79a; --3: #e59ac4; --4: #e0b34a; --5: #86cdf5; --6: #a78bfa;
 --7: #9aa1a8; --good: #4cc38a; --bad: #ff6b81; --odd: #e0b34a } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1180px;
 margin: 2rem auto; padding: 0 1.2rem }
h1 { font-size: 1.5rem; margin: 0 0 .2rem } h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem }
p { margin: .4rem 0 } .soft { color: var(--soft) }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(210px, 1fr)); gap: .5rem; margin: 1rem 0 }
dl div { background: var(--card); border-radius: 6px; padding: .5rem .8rem } dt { font-size: .8rem; color: var(--soft) }
dd { margin: 0; font-variant-numeric: tabular-nums }
table { border-collapse: collapse; width: 100%; font-size: .84rem; font-variant-numeric: tabular-nums }
th, td { padding: .22rem .5rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th.t, td.t { text-align: left } td.case { white-space: normal; overflow-wrap: anywhere; min-width: 14rem } th { font-weight: 600; color: var(--soft) } .scroll { overflow-x: auto }
.ok { color: var(--good) } .fail { color: var(--bad); font-weight: 600 } .odd { color: var(--odd) }
svg { max-width: 100%; height: auto; font: 11px system-ui, sans-serif } .panels { display: flex; flex-wrap: wrap; gap: 1rem }
text.tick { fill: var(--soft) } text.title { fill: var(--ink); font-weight: 600; font-size: 12px }
.grid { stroke: var(--line) } .floor { stroke: var(--soft); stroke-width: 2 } .roof { stroke: var(--soft); fill: none;
 stroke-width: 1.5 } .line { fill: none; stroke-width: 1.6 } .bar { stroke-width: 2; opacity: .55 }
.hollow { fill: var(--page); stroke-width: 1.6 } .legend span { margin-right: 1.2rem }
.legend i { display: inline-block; width: .7rem; height: .7rem; border-radius: 50%; margin-right: .35rem;
 background: var(--k) }
""" + "".join(
    f".c{i} {{ --k: var(--{i}); stroke: var(--{i}) }} .c{i}.solid {{ fill: var(--{i}) }}" for i in range(8)
)


def html(run: Run) -> str:
    """The page; a run without timed rows gives one without plots."""
    if run.header.get("suite") == "generate":
        from draftwood.bench.generate.report import html as of_generation

        return of_generation(run)
    rows = show.in_order(run.rows)
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    colors = {
        impl: i
        for i, impl in enumerate(sorted(impls, key=lambda name: (name == "ref", name == "torch", name)))
    }
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    sections = "".join(_section(k, [r for r in rows if r["kernel"] == k], colors) for k in kernels)
    body = f"{_head(run, rows)}{_versus(run)}{_roofline_section(run, rows)}{sections}{labels(rows)}"
    return page("Kernel benchmark", body)


def page(title: str, body: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>draftwood bench: {escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def facts_of(run: Run) -> dict[str, str | None]:
    """What the header and the end of any run say, by what it is called on the page."""
    header, end = run.header, run.end
    return {
        "device": header.get("device"),
        "commit": header.get("commit"),
        "python / torch / triton": " / ".join(
            str(header.get(k) or "-") for k in ("python", "torch", "triton")
        ),
        "seconds promised / used": f"{end['promised_s']:g} / {end['used_s']:.1f}"
        if end
        else "the run did not end",
        "target": f"±{100 * header['target']:g} %" if "target" in header else None,
        "when": header.get("time"),
    }


def _head(run: Run, rows: Sequence[Row]) -> str:
    ceilings = run.header.get("ceilings", {})
    facts = {
        **facts_of(run),
        "measured copy": f"{ceilings['memory_gbps']:.4g} GB/s" if ceilings else None,
        "measured copy in cache": f"{ceilings['cache_gbps']:.4g} GB/s" if ceilings else None,
        "measured matrix product": ", ".join(
            f"{v:.3g} TFLOP/s {k}" for k, v in ceilings.get("tflops", {}).items()
        ),
    }
    items = "".join(f"<div><dt>{k}</dt><dd>{escape(str(v))}</dd></div>" for k, v in facts.items() if v)
    return (
        f"<h1>Kernel benchmark</h1><p class='soft'>{escape(run.path.name)}: {len(rows)} rows, "
        f"{escape(show.tally(rows))}. Only rows labelled <span class='ok'>ok</span> support a claim; others are drawn "
        f"hollow.</p><dl>{items}</dl>"
    )


def _versus(run: Run) -> str:
    if not run.versus:
        return ""
    counts = Counter(v["verdict"] for v in run.versus)
    items = "".join(f"<li>{escape(show.versus_text(v))}</li>" for v in run.versus)
    summary = ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common())
    return f"<h2>Side by side</h2><p>{summary}</p><ul>{items}</ul>"


def roofline_file(run: Run) -> str:
    """The roofline alone, as an SVG file. Raises `UsageError` where there is none."""
    svg, _ = _roofline(run, show.in_order(run.rows), STYLE + "svg { background: var(--page) }")
    if not svg:
        raise UsageError("no roofline: expected a run of kernels with timed rows that have FLOPs")
    return svg + "\n"


def _roofline_section(run: Run, rows: Sequence[Row]) -> str:
    svg, names = _roofline(run, rows)
    return f"<h2>Roofline</h2>{legend(names)}{svg}" if svg else ""


def _roofline(run: Run, rows: Sequence[Row], style: str = "") -> tuple[str, list[tuple[str, int]]]:
    """The plot, and what its colours stand for: kernels, or the implementations of a single one."""
    timed = [r for r in rows if r["median_us"] and r["flops"]]
    ceilings = run.header.get("ceilings")
    if not timed or not ceilings:
        return "", []
    apart = "kernel" if len({r["kernel"] for r in rows}) > 1 else "impl"
    series = [
        Series(
            name,
            i,
            [
                Point(
                    r["flops"] / r["bytes"],
                    r["tflops"],
                    r["tflops"],
                    r["tflops"],
                    _title(r),
                    r["status"] == "ok",
                )
                for r in timed
                if r[apart] == name
            ],
        )
        for i, name in enumerate(dict.fromkeys(r[apart] for r in rows))
    ]
    dtypes = {str(r["case"].get("dtype", "float32")) for r in timed}
    used = {k: v for k, v in ceilings["tflops"].items() if k in dtypes} or ceilings["tflops"]
    by_peak: dict[float, str] = {}  # equal peaks are one level
    for name, peak in used.items():
        by_peak[peak] = f"{by_peak[peak]}, {name}" if peak in by_peak else name
    peaks = [(f"{name} {peak:.3g} TFLOP/s", peak) for peak, name in by_peak.items()]
    bandwidths = [(f"memory {ceilings['memory_gbps']:.4g} GB/s", ceilings["memory_gbps"])]
    if any(r["binds"] == "cache" for r in timed):
        bandwidths.append((f"cache {ceilings['cache_gbps']:.4g} GB/s", ceilings["cache_gbps"]))
    drawn = [s for s in series if s.points]
    return roofline(drawn, bandwidths, peaks, style=style), [(s.name, s.color) for s in drawn]


def _section(kernel: str, rows: Sequence[Row], colors: Mapping[str, int]) -> str:
    timed = [r for r in rows if r["median_us"]]
    impls = [(impl, colors[impl]) for impl in dict.fromkeys(r["impl"] for r in timed)]
    columns = (*COLUMNS, *(c for c, field in EXTRA_COLUMNS.items() if any(r.get(field) for r in rows)))
    plots = ""
    if timed:
        plots = legend(impls) + _panels(timed, colors) + _dots(timed, colors)
        plots += "<p class='soft'>Grey marks: the time at the measured ceiling.</p>"
    return f"<h2>{escape(kernel)}</h2>{plots}{table(rows, columns)}"


def _panels(rows: Sequence[Row], colors: Mapping[str, int]) -> str:
    """Latency against length (or the most varied number), one panel per combination of the other axes."""
    axis = _x_axis(rows)
    if axis is None:
        return ""
    groups: dict[str, list[Row]] = {}
    for full, short_ in zip(rows, show.shorten(rows), strict=True):
        others = {k: v for k, v in short_["case"].items() if k != axis}
        groups.setdefault(axes_text(others), []).append(full)
    panels = []
    for name, group in groups.items():
        if len({r["case"][axis] for r in group}) < 2:
            continue
        series = [
            Series(impl, colors[impl], [_point(r["case"][axis], r) for r in group if r["impl"] == impl])
            for impl in dict.fromkeys(r["impl"] for r in group)
        ]
        panels.append(line_chart(series, axis, name))
    return f"<div class='panels'>{''.join(panels[:6])}</div>" if panels else ""


def _x_axis(rows: Sequence[Row]) -> str | None:
    values: dict[str, set[float]] = {}
    for row in rows:
        for axis, value in row["case"].items():
            if isinstance(value, int | float) and axis != "seed" and value > 0:
                values.setdefault(axis, set()).add(value)
    varied = {axis: len(v) for axis, v in values.items() if len(v) > 1}
    for axis in LENGTHS:
        if axis in varied:
            return axis
    return max(varied, key=lambda axis: varied[axis], default=None)


def _point(x: float, row: Row) -> Point:
    return Point(x, row["median_us"], row["low_us"], row["high_us"], _title(row), row["status"] == "ok")


def _dots(rows: Sequence[Row], colors: Mapping[str, int]) -> str:
    labels = [axes_text(r["case"]) for r in show.shorten(rows)]
    lines = list(dict.fromkeys(labels))
    series = []
    for impl in dict.fromkeys(r["impl"] for r in rows):
        points = [
            Point(
                r["median_us"], lines.index(label), r["low_us"], r["high_us"], _title(r), r["status"] == "ok"
            )
            for r, label in zip(rows, labels, strict=True)
            if r["impl"] == impl
        ]
        series.append(Series(impl, colors[impl], points))
    floors = [next(r["floor_us"] for r, at in zip(rows, labels, strict=True) if at == line) for line in lines]
    return dot_plot(lines, series, floors)


def _title(row: Row) -> str:
    return (
        f"{row['impl']} {axes_text(row['case'])}: {show.time_text(row['median_us'])} us "
        f"[{show.time_text(row['low_us'])}, {show.time_text(row['high_us'])}], n {row['n']}, "
        f"{show.COLUMNS['ceiling'](row)} of the {row['binds']} ceiling, {row['status']}"
    )


def table(rows: Sequence[Row], columns: Sequence[str], view: show.View = show.KERNELS) -> str:
    head = "".join(f"<th{_left(c, view)}>{c}</th>" for c in columns)
    body = []
    for row in show.shorten(rows):
        kind = "ok" if row["status"] == "ok" else "fail" if row["status"] in FAILED else "odd"
        cells = "".join(
            f'<td class="t {kind}" title="{escape(row["note"])}">{escape(row["status"])}</td>'
            if c == "status"
            else f"<td{_left(c, view)}>{escape(view.columns[c](row)).replace(',', ', ' if c == 'case' else ',')}</td>"
            for c in columns
        )
        body.append(f"<tr>{cells}</tr>")
    return f"<div class='scroll'><table><tr>{head}</tr>{''.join(body)}</table></div>"


def _left(column: str, view: show.View) -> str:
    if column == "case":
        return ' class="t case"'
    return ' class="t"' if column in view.text else ""


def labels(rows: Sequence[Row]) -> str:
    present: Any = dict.fromkeys(r["status"] for r in rows)
    items = "".join(f"<p><b>{s}</b>: {escape(STATUSES[s])}.</p>" for s in STATUSES if s in present)
    return f"<h2>Labels</h2><div class='soft'>{items}</div>"
