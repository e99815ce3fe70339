"""What the commands of the suite share: options, seconds, devices, and errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from draftwood.bench import store
from draftwood.bench.catalog import UsageError
from draftwood.bench.countdown import Countdown
from draftwood.bench.makers import find_gpu
from draftwood.bench.supervisor import WorkerLost

FOLDER = Path("bench-results")

Axes = Annotated[list[str] | None, typer.Option("-a", "--axis", help="T=8,16,32 or B=1:32:pow2.")]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="A value of a case, or axis=value.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option()]
Seconds = Annotated[str, typer.Option(help="Wall time of the whole command: 30, 30s or 5m.")]
Deadline = Annotated[str | None, typer.Option(help="When the caller would kill it; ends a tenth earlier.")]
Target = Annotated[float, typer.Option(help="Half-width of the median's interval, in per cent.")]
CaseLimit = Annotated[
    float | None,
    typer.Option(help="Seconds one case may take to prepare; default: a quarter of the budget."),
]
PlanOnly = Annotated[bool, typer.Option("--plan", help="Print the plan and stop.")]
Resume = Annotated[Path | None, typer.Option(help="Run to continue; rows still valid are kept.")]
KeepFailed = Annotated[bool, typer.Option("--keep-failed", help="With --resume: keep all rows.")]
Out = Annotated[Path | None, typer.Option(help="Where to store; default: bench-results/TIME-DEVICE.jsonl.")]


def countdown_of(budget: str, deadline: str | None) -> Countdown:
    seconds = parse_seconds("--budget", budget)
    if deadline is not None:
        seconds = min(seconds, 0.9 * parse_seconds("--deadline", deadline))
    return Countdown(seconds)


def parse_seconds(option: str, text: str) -> float:
    """`30`, `30s`, `5m` -> seconds."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:], 0.0)
    try:
        seconds = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"`{option} {text}`: expected seconds, as in 30, 30s or 5m")
    return seconds


def device_of(device: str) -> str:
    """`auto` is the GPU where there is a driver for one: torch is not asked, importing it takes seconds."""
    if device != "auto":
        return device
    return "cuda" if Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists() else "cpu"


def capability_of(device: str) -> int:
    """Of the first GPU, as Triton writes it; 0 on a CPU. The worker is the one to say that there is no GPU after all."""
    if device != "cuda":
        return 0
    try:
        return find_gpu()[0]
    except OSError:
        return 0


def split(options: list[str] | None) -> tuple[str, ...]:
    return tuple(part for option in options or () for part in option.split(","))


def run_path(suite: str, resume: Path | None, out: Path | None, name: str) -> Path:
    """Where the run is stored. A run to be resumed is read, and must be one of this suite."""
    if resume is None:
        return out or FOLDER / f"{datetime.now():%Y%m%d-%H%M%S}-{name}.jsonl"
    other = store.read_run(resume).header.get("suite", suite)
    if other != suite:
        raise UsageError(f"`--resume {resume}`: a run of `bench {other}`, expected one of `bench {suite}`")
    store.cut_torn_line(resume)
    return resume


@contextmanager
def errors_named() -> Iterator[None]:
    try:
        yield
    except UsageError as e:
        print(f"error: {e}", file=sys.stderr)
        raise typer.Exit(2) from e
    except WorkerLost as e:
        asked = e.status == "invalid"
        print(f"error: {e}" if asked else f"error: the worker did not start: {e}", file=sys.stderr)
        raise typer.Exit(2 if asked else 3) from e
