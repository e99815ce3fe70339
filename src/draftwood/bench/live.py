"""How a run shows itself while it lasts: the plan, a progress bar with the time left, warnings. On stderr."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from draftwood.bench.countdown import Countdown
from draftwood.bench.planner import Plan, cost
from draftwood.bench.show import wide_console
from draftwood.bench.state import State

DEAREST = 5
MOST_LEFT_OUT = 20


class Live:
    """The `Watcher` of a terminal. The bar is of time, for that is what a budget bounds."""

    def __init__(
        self, countdown: Countdown, min_visits: int, full_plan: bool, unit: str = "us a call"
    ) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.countdown, self.min_visits, self.full_plan = countdown, min_visits, full_plan
        self.unit = unit
        columns = (
            TextColumn("{task.fields[phase]}"),
            BarColumn(),
            TextColumn("{task.fields[left]} left"),
            TextColumn("[dim]{task.fields[what]}"),
        )
        self.bar = Progress(
            *columns, console=self.console, transient=True, disable=not self.console.is_terminal
        )
        self.task = self.bar.add_task("", total=countdown.seconds, phase="", left="", what="")
        self.total = 0

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def phase(self, name: str, total: int) -> None:
        self.name, self.total = name, total
        self._update(name, "")

    def step(self, what: str, done: int) -> None:
        self._update(f"{self.name} {done}/{self.total}", what)

    def warn(self, message: str) -> None:
        self.console.print(message, style="yellow")

    def plan(self, plan: Plan, states: Mapping[str, State], left_s: float) -> None:
        console = wide_console() if self.full_plan else self.console  # asked for: goes to stdout
        console.print(plan_table(plan, states, self.min_visits, self.full_plan, self.unit))
        n, left_out = len(plan.fits) + len(plan.left_out), len(plan.left_out)
        compiling = sum(s.info.get("compile_s", 0.0) for s in states.values() if s.info)
        console.print(
            f"{n} cases, at least {self.min_visits} visits each: {plan.total_s:.1f} s of the {left_s:.1f} s left: "
            + (f"{left_out} do not fit" if left_out else "fits")
            + ("; the cheapest is tried all the same" if left_out and not plan.fits else "")
            + (f"; compiled for {compiling:.1f} s on the side" if compiling >= 0.1 else ""),
            style="bold",
        )

    def _update(self, phase: str, what: str) -> None:
        left = max(0.0, self.countdown.left())
        self.bar.update(
            self.task, completed=self.countdown.used(), phase=phase, what=what[:80], left=f"{left:.0f} s"
        )


def plan_table(plan: Plan, states: Mapping[str, State], min_visits: int, full: bool, unit: str) -> Table:
    """Seconds each: of all cases, or of the dearest ones and those that do not fit."""
    lots = sorted([*plan.fits, *plan.left_out], key=cost, reverse=True)
    left_out = {p.key for lot in plan.left_out for p in lot}
    shown = lots if full else lots[: max(DEAREST, min(len(plan.left_out), MOST_LEFT_OUT))]
    out = Table(
        box=None, pad_edge=False, title="plan" if full else "plan: the dearest cases", title_justify="left"
    )
    for name in ("case", unit, "seconds", ""):
        out.add_column(name, justify="left" if name in ("case", "") else "right", overflow="fold")
    for p in (p for lot in shown for p in lot):
        info = states[p.key].info or {}
        note = "does not fit" if p.key in left_out else ""
        out.add_row(p.key, f"{info.get('estimate_us', 0):.1f}", f"{min_visits * p.visit_s:.3f}", note)
    return out
