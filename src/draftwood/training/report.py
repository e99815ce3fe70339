"""The end of a training run: a plot (SVG, no library needed to see or make it) and a model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 260, 60, 36
COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#a463f2")

Curve = Sequence[tuple[float, float]]


def panel(title: str, curves: Mapping[str, Curve], top: int) -> str:
    """One set of axes with a line per curve; steps along x."""
    points = [p for curve in curves.values() for p in curve]
    x_most = max(x for x, _ in points) or 1.0
    low, high = min(y for _, y in points), max(y for _, y in points)
    high = high if high > low else low + 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / x_most * (WIDTH - LEFT - 20)
        return round(across, 1), round(top + 30 + (high - y) / (high - low) * (HEIGHT - 30 - BOTTOM), 1)

    parts = [f'<text x="{LEFT}" y="{top + 18}" font-weight="bold">{escape(title)}</text>']
    for i in range(5):
        value = low + (high - low) * i / 4
        _, y = at(0, value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.3g}</text>')
        x, _ = at(x_most * i / 4, low)
        parts.append(
            f'<text x="{x}" y="{top + HEIGHT - 14}" text-anchor="middle">{x_most * i / 4:.0f}</text>'
        )
    for i, (name, curve) in enumerate(curves.items()):
        path = " ".join(f"{x},{y}" for x, y in (at(*p) for p in curve))
        color = COLORS[i % len(COLORS)]
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{path}"/>')
        x = LEFT + 190 + 90 * i
        parts.append(f'<text x="{x}" y="{top + 18}" fill="{color}">{escape(name)}</text>')
    return "\n".join(parts)


def write_plot(file: Path, losses: Curve, evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Loss and accept lengths over steps."""
    panels = [panel("training loss", {"loss": losses}, 0)]
    if evaluations:
        names = [k for k in evaluations[0] if k != "step"]
        curves = {name: [(e["step"], e[name]) for e in evaluations] for name in names}
        panels.append(panel("tokens per round", curves, HEIGHT))
    body = "\n".join(panels)
    file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT * len(panels)}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>{body}</svg>\n'
    )


def write_card(
    file: Path,
    *,
    target: str,
    settings: Mapping[str, Any],
    facts: Mapping[str, Any],
    evaluations: Sequence[Mapping[str, Any]],
) -> None:
    """README.md of the drafter folder."""
    lines = [
        "# DFlash drafter",
        "",
        f"Drafts for `{target}` only: it shares that model's embedding and head.",
        "",
    ]
    lines += [
        "Trained on the target's own continuations, with random anchors and exponentially weighted cross-entropy"
    ]
    lines += ["(DFlash, arXiv 2602.06036). ![loss and tokens per round](training.svg)", "", "## Run", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    if evaluations:
        lines += [
            "",
            "## Tokens per round on held-out prompts",
            "",
            "Accepted draft tokens plus the bonus token.",
            "",
        ]
        names = [k for k in evaluations[-1] if k != "step"]
        lines += ["| step | " + " | ".join(names) + " |", "|" + "---|" * (len(names) + 1)]
        for e in (evaluations[0], evaluations[-1]):
            lines += [f"| {e['step']} | " + " | ".join(f"{e[n]:.2f}" for n in names) + " |"]
    lines += ["", "## Settings", ""] + [f"- {name}: {value}" for name, value in settings.items()]
    file.write_text("\n".join(lines) + "\n")
