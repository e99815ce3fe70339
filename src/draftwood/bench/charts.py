"""Plots as inline SVG: a line chart, a dot plot, a roofline and stacked bars. Only bars have a linear axis; no library, no script.

Colours come from the page's CSS (classes `c0`, `c1`, ...), so that a plot follows the reader's light or dark theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

N_COLORS = 8


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float
    high: float
    title: str
    solid: bool = True  # hollow: the row supports no claim


@dataclass(frozen=True)
class Series:
    name: str
    color: int
    points: Sequence[Point]


@dataclass
class Axis:
    """A logarithmic axis between two pixel positions."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, most: int = 8) -> list[float]:
        """1, 2, 5 per decade; powers of ten only where that would be too many."""
        decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        fine = [m * 10.0**d for d in decades for m in (1, 2, 5)]
        coarse = [10.0**d for d in decades]
        inside = [[t for t in ts if self.low <= t <= self.high * 1.0001] for ts in (fine, coarse)]
        return inside[0] if len(inside[0]) <= most else inside[1]


@dataclass
class Canvas:
    """SVG parts being collected, with margins left for labels."""

    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.parts.append(f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(
            f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def dot(self, x: float, y: float, color: int, solid: bool, title: str) -> None:
        kind = f"c{color % N_COLORS} " + ("solid" if solid else "hollow")
        self.parts.append(
            f'<circle class="{kind}" cx="{x}" cy="{y}" r="4.5"><title>{escape(title)}</title></circle>'
        )

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        self.parts.append(f'<polyline class="{kind}" points="{" ".join(f"{x},{y}" for x, y in points)}"/>')

    def svg(self, label: str, style: str = "") -> str:
        """For a page that has the colours; with a style sheet of its own, a file that stands alone."""
        space = ' xmlns="http://www.w3.org/2000/svg"' if style else ""
        sheet = f"<style>{escape(style)}</style>" if style else ""
        return (
            f'<svg{space} viewBox="0 0 {self.width} {self.height}" width="{self.width}" role="img" '
            f'aria-label="{escape(label)}">{sheet}{"".join(self.parts)}</svg>'
        )


def short(value: float) -> str:
    """`0.05`, `12`, `4k`, `64k`, `2M`: for axis labels; powers of two in binary thousands."""
    if value >= 1024 and value == int(value) and int(value) % 1024 == 0:
        return f"{int(value) // 1024}k"
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:g}{unit}"
    return f"{value:g}".replace("e-0", "e-")


def line_chart(
    series: Sequence[Series], x_label: str, title: str, size: tuple[int, int] = (430, 270), unit: str = "us"
) -> str:
    """A figure against an axis of the cases, with intervals; x ticks are the values measured."""
    canvas = Canvas(*size)
    points = [p for s in series for p in s.points]
    xs = sorted({p.x for p in points})
    zero = min(v for v in xs if v > 0) / 2  # where a value of 0 is drawn
    x = Axis((xs[0] or zero) / 1.25, xs[-1] * 1.25, 52, size[0] - 14)
    y = Axis(min(p.low for p in points) / 1.3, max(p.high for p in points) * 1.3, size[1] - 42, 40)
    canvas.text(52, 16, title, "title")
    _y_grid(canvas, y, 52, size[0] - 14, unit)
    for value in xs:
        canvas.text(x.at(value or zero), size[1] - 26, short(value), "tick", "middle")
    canvas.text((52 + size[0]) / 2, size[1] - 8, x_label, "tick", "middle")
    for s in series:
        ordered = sorted(s.points, key=lambda p: p.x)
        canvas.path([(x.at(p.x or zero), y.at(p.y)) for p in ordered], f"line c{s.color % N_COLORS}")
        for p in ordered:
            at = x.at(p.x or zero)
            canvas.line(at, y.at(p.low), at, y.at(p.high), f"bar c{s.color % N_COLORS}")
            canvas.dot(at, y.at(p.y), s.color, p.solid, p.title)
    return canvas.svg(title)


def dot_plot(
    labels: Sequence[str], series: Sequence[Series], floors: Sequence[float | None], unit: str = " us"
) -> str:
    """One line per case, one dot per implementation; a tick marks the floor. Point.x is the figure, Point.y the line."""
    left, width, step = 14 + 6.9 * max(map(len, labels)), 1100, 20
    canvas = Canvas(width, 34 + step * len(labels))
    points = [p for s in series for p in s.points]
    marks = [f for f in floors if f]
    x = Axis(min([p.low for p in points] + marks) / 1.4, max(p.high for p in points) * 1.4, left, width - 10)
    bottom = canvas.height - 22
    for tick in x.ticks(12):
        canvas.line(x.at(tick), 4, x.at(tick), bottom, "grid")
        canvas.text(x.at(tick), canvas.height - 6, f"{short(tick)}{unit}", "tick", "middle")
    for i, label in enumerate(labels):
        y = 14 + step * i
        canvas.text(left - 8, y + 4, label, "tick", "end")
        mark = floors[i]
        if mark:
            canvas.line(x.at(mark), y - 7, x.at(mark), y + 7, "floor")
    for s in series:
        for p in s.points:
            row = 14 + step * p.y
            canvas.line(x.at(p.low), row, x.at(p.high), row, f"bar c{s.color % N_COLORS}")
            canvas.dot(x.at(p.x), row, s.color, p.solid, p.title)
    return canvas.svg(f"each case and implementation,{unit}")


@dataclass(frozen=True)
class Bar:
    label: str
    parts: Sequence[float]


def stacked_bars(bars: Sequence[Bar], names: Sequence[str], unit: str) -> str:
    """One bar a line, its parts side by side in the colours of their places; not negative."""
    left, width, step = 14 + 6.9 * max(len(b.label) for b in bars), 1100, 20
    canvas = Canvas(width, 34 + step * len(bars))
    bottom, longest = canvas.height - 22, max(sum(b.parts) for b in bars) or 1.0
    scale = (width - 70 - left) / longest
    for i in range(5):
        x = round(left + i / 4 * longest * scale, 1)
        canvas.line(x, 4, x, bottom, "grid")
        canvas.text(x, canvas.height - 6, f"{i / 4 * longest:.3g} {unit}", "tick", "middle")
    for i, bar in enumerate(bars):
        x, y = left, 6 + step * i
        canvas.text(left - 8, y + 12, bar.label, "tick", "end")
        for j, (name, part) in enumerate(zip(names, bar.parts, strict=True)):
            canvas.parts.append(
                f'<rect class="c{j % N_COLORS} solid" x="{x:.1f}" y="{y}" width="{part * scale:.1f}" height="14">'
                f"<title>{escape(f'{bar.label}: {name} {part:.3g} {unit}')}</title></rect>"
            )
            x += part * scale
        canvas.text(round(x + 6, 1), y + 12, f"{sum(bar.parts):.3g}", "tick")
    return canvas.svg(f"stages, {unit}")


def roofline(
    series: Sequence[Series],
    bandwidths: Sequence[tuple[str, float]],
    peaks: Sequence[tuple[str, float]],
    size: tuple[int, int] = (1100, 440),
    style: str = "",
) -> str:
    """TFLOP/s against FLOP per byte, under slopes of GB/s and levels of TFLOP/s. With a style sheet: a file with its legend."""
    canvas = Canvas(*size)
    points = [p for s in series for p in s.points]
    top, fastest = max(peak for _, peak in peaks), max(gbps for _, gbps in bandwidths)
    ridge = top * 1e3 / min(gbps for _, gbps in bandwidths)
    x = Axis(min(p.x for p in points) / 2, max([p.x for p in points] + [ridge]) * 4, 62, size[0] - 14)
    y = Axis(min(p.y for p in points) / 3, top * 3, size[1] - 42, 18)
    _y_grid(canvas, y, 62, size[0] - 14, "TFLOP/s")
    for tick in x.ticks():
        canvas.text(x.at(tick), size[1] - 26, short(tick), "tick", "middle")
    canvas.text((62 + size[0]) / 2, size[1] - 8, "FLOP per byte of unavoidable traffic", "tick", "middle")
    for name, gbps in bandwidths:
        start = max(x.low, y.low * 1e3 / gbps)
        canvas.path([(x.at(a), y.at(a * gbps / 1e3)) for a in (start, top * 1e3 / gbps)], "roof")
        above = gbps == fastest
        at = start * 1.15
        canvas.text(x.at(at), y.at(at * gbps / 1e3) + (-22 if above else 16), name, "tick")
    for name, peak in peaks:
        canvas.line(x.at(peak * 1e3 / fastest), y.at(peak), x.end, y.at(peak), "roof")
        canvas.text(x.end - 4, y.at(peak) - 5, name, "tick", "end")
    for s in series:
        for p in s.points:
            canvas.dot(x.at(p.x), y.at(p.y), s.color, p.solid, p.title)
    for i, s in enumerate(series if style else ()):
        canvas.dot(size[0] - 190, size[1] - 60 - 18 * (len(series) - 1 - i), s.color, True, s.name)
        canvas.text(size[0] - 178, size[1] - 56 - 18 * (len(series) - 1 - i), s.name, "tick")
    return canvas.svg("roofline", style)


def legend(names: Sequence[tuple[str, int]]) -> str:
    items = (f'<span><i class="c{color % N_COLORS}"></i>{escape(name)}</span>' for name, color in names)
    return f'<p class="legend">{"".join(items)}</p>'


def _y_grid(canvas: Canvas, y: Axis, left: float, right: float, unit: str) -> None:
    for tick in y.ticks():
        canvas.line(left, y.at(tick), right, y.at(tick), "grid")
        canvas.text(left - 6, y.at(tick) + 4, short(tick), "tick", "end")
    canvas.text(left - 6, y.end - 10, unit, "tick", "end")
