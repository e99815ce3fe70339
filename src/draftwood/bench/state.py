"""What a run is asked to do, what it knows of each job while it lasts, and who watches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from draftwood.bench.catalog import Job
from draftwood.bench.planner import Plan, Progress
from draftwood.bench.stats import NOISE_FLOOR


@dataclass(frozen=True)
class Options:
    """What one run is asked to do."""

    device: str
    budget_s: float
    target: float = NOISE_FLOOR
    case_limit_s: float | None = None  # of preparing one case; None for a quarter of the budget
    vs: str | None = None
    plan_only: bool = False
    once: bool = False
    resume: Path | None = None
    keep_failed: bool = False
    argv: tuple[str, ...] = ()

    @property
    def limit_s(self) -> float:
        return self.case_limit_s or max(5.0, self.budget_s / 4)


@dataclass
class State:
    """One job while the run lasts."""

    job: Job
    info: dict[str, Any] | None = None
    progress: Progress | None = None
    clocks: list[float] = field(default_factory=list)
    throttle: Counter[str] = field(default_factory=Counter)
    slow_visits: int = 0
    timings: int = 1  # per visit, odd
    pending: bool = False  # its inputs are being generated, or its kernels compiled

    def clock_fields(self) -> dict[str, Any]:
        """Of its row: the clock during the visits, where it can be read."""
        if not self.clocks:
            return {}
        return {
            "clock_mhz": median(self.clocks),
            "throttle": dict(self.throttle),
            "slow_clock_visits": self.slow_visits,
        }


class Watcher(Protocol):
    """Who shows how the run goes."""

    def phase(self, name: str, total: int) -> None: ...
    def step(self, what: str, done: int) -> None: ...
    def plan(self, plan: Plan, states: Mapping[str, State], left_s: float) -> None: ...
    def warn(self, message: str) -> None: ...
