"""`draftwood bench`: kernels, list, show, compare, spread, report.

Tables go to stdout; the plan, progress and warnings to stderr. Exit codes: 0 fine; 1 something is slower; 2 wrong
arguments; 3 a case was wrong, invalid, crashed, hung or suspect, or nothing could be measured; 4 time ran out first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from draftwood.bench import show as show_
from draftwood.bench import store
from draftwood.bench.catalog import Catalog, Job, Selection, UsageError, parse_axes, select
from draftwood.bench.compare import compare_runs, comparison_table, is_regression, spread, spread_table
from draftwood.bench.countdown import Countdown
from draftwood.bench.supervisor import WorkerLost, worker_of

FOLDER = Path("bench-results")
DEFAULT_BUDGET_S = 30.0
CPU_CASES = 4

app = typer.Typer(help="Measure kernels, and say only what the measurements support.", no_args_is_help=True)

Only = Annotated[list[str] | None, typer.Option("--only", help="Kernel; repeat or separate by commas.")]
Axes = Annotated[list[str] | None, typer.Option("-a", "--axis", help="T=8,16,32 or B=1:32:pow2.")]
Impls = Annotated[list[str] | None, typer.Option("--impl", help="Implementation, or peer:NAME.")]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="A value of a case, or axis=value.")]
Peers = Annotated[
    list[Path] | None, typer.Option("--peer", help="File with an implementation to measure too.")
]
Extra = Annotated[list[Path] | None, typer.Option("--extra-module", hidden=True)]
SuiteName = Annotated[
    Literal["auto", "small", "bench"],
    typer.Option(help="small: what the reference can afford; auto: by device."),
]
CacheName = Annotated[
    Literal["declared", "cold", "warm"],
    typer.Option(help="declared: as the kernel finds it in use; warm on a CPU."),
]
Limit = Annotated[int | None, typer.Option(help="Cases per kernel at most, evenly spread.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option()]
Format = Annotated[Literal["table", "json", "csv", "md"], typer.Option(help="How to print.")]
RunPath = Annotated[Path | None, typer.Argument(help="A stored run; default: the newest in `bench-results`.")]


@app.command()
def kernels(
    only: Only = None,
    axes: Axes = None,
    impl: Impls = None,
    tag: Tags = None,
    suite: SuiteName = "auto",
    limit: Limit = None,
    cache: CacheName = "declared",
    device: Device = "auto",
    budget: Annotated[str, typer.Option(help="Wall time of the whole command: 30, 30s or 5m.")] = "30s",
    deadline: Annotated[
        str | None, typer.Option(help="When the caller would kill it; ends a tenth earlier.")
    ] = None,
    target: Annotated[float, typer.Option(help="Half-width of the median's interval, in per cent.")] = 1.0,
    case_limit: Annotated[
        float | None,
        typer.Option(help="Seconds one case may take to prepare; default: a quarter of the budget."),
    ] = None,
    vs: Annotated[
        str | None, typer.Option(help="Compare with this implementation, in turns A B B A.")
    ] = None,
    peer: Peers = None,
    extra: Extra = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the plan and stop.")] = False,
    once: Annotated[bool, typer.Option("--once", help="One timed call each: for profilers and CI.")] = False,
    resume: Annotated[Path | None, typer.Option(help="Run to continue; valid ok rows are kept.")] = None,
    keep_failed: Annotated[bool, typer.Option("--keep-failed", help="With --resume: keep all rows.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where to store; default: bench-results/TIME-DEVICE.jsonl.")
    ] = None,
) -> None:
    """Plan, check and measure kernels within a budget."""
    from draftwood.bench.live import Live
    from draftwood.bench.planner import MIN_VISITS
    from draftwood.bench.state import Options
    from draftwood.bench.suite import Suite

    with _errors_named():
        seconds = parse_seconds("--budget", budget)
        if deadline is not None:
            seconds = min(seconds, 0.9 * parse_seconds("--deadline", deadline))
        countdown = Countdown(seconds)
        chip = _device(device)
        catalog = Catalog.of_files(peer or (), extra or ())
        jobs = _jobs(catalog, chip, only, axes, impl, tag, suite, limit, cache, vs, once)
        start = worker_of(chip, peer or (), extra or ())
        if resume is not None:
            store.read_run(resume)
            store.cut_torn_line(resume)
        path = resume or out or FOLDER / f"{datetime.now():%Y%m%d-%H%M%S}-{chip}.jsonl"
        options = Options(
            device=chip,
            budget_s=seconds,
            target=target / 100,
            case_limit_s=case_limit,
            vs=vs,
            plan_only=plan,
            once=once,
            resume=resume,
            keep_failed=keep_failed,
            argv=tuple(sys.argv[1:]),
        )
        with Live(countdown, 1 if once else MIN_VISITS, full_plan=plan) as live:
            run = Suite(jobs, catalog, options, start, countdown, store.Store(path), live)
            code = run.run()
        if not plan:
            _print_run(run, path, countdown)
    raise typer.Exit(code)


def _print_run(run: Any, path: Path, countdown: Countdown) -> None:
    console = show_.wide_console()
    show_.short_table(console, run.rows, run.versus, show_.MOST_LINES)
    unsaved = f"; {len(run.out.pending)} lines NOT SAVED: {run.out.error}" if run.out.pending else ""
    console.print(
        f"{show_.tally(run.rows)}; {countdown.used():.1f} s of {countdown.seconds:.0f} s; `{path}`{unsaved}",
        style="bold",
    )


@app.command("list")
def list_(
    only: Only = None,
    axes: Axes = None,
    impl: Impls = None,
    tag: Tags = None,
    suite: SuiteName = "auto",
    limit: Limit = None,
    cache: CacheName = "declared",
    device: Device = "auto",
    peer: Peers = None,
    extra: Extra = None,
) -> None:
    """Print the ids of the cases that `kernels` would measure with the same options."""
    with _errors_named():
        catalog = Catalog.of_files(peer or (), extra or ())
        jobs = _jobs(catalog, _device(device), only, axes, impl, tag, suite, limit, cache, None, False)
        for job in jobs:
            print(job.id)


@app.command()
def show(
    run: RunPath = None,
    section: Annotated[list[str] | None, typer.Option("--section", help="Kernel; repeat for more.")] = None,
    impl: Impls = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="axis=value, or a status.")] = None,
    columns: Annotated[str | None, typer.Option(help=f"Of: {', '.join(show_.COLUMNS)}.")] = None,
    sort: Annotated[str | None, typer.Option(help="A stored field, such as median_us.")] = None,
    form: Annotated[
        Literal["table", "json", "csv", "md"], typer.Option("--format", help="How to print.")
    ] = "table",
) -> None:
    """Show a stored run, or a part of it."""
    with _errors_named():
        rows = store.read_run(run or store.newest(FOLDER)).rows
        wanted = (_split(section), _split(impl), tuple(tag or ()))
        rows = show_.in_order([r for r in rows if _matches(r, *wanted)], sort)
        if not rows:
            raise UsageError("no row matches; `draftwood bench show` without filters lists all")
        chosen = show_.choose_columns(columns)
        if form == "table":
            show_.wide_console().print(show_.table(rows, chosen))
        else:
            text = {"json": show_.as_json, "csv": show_.as_csv, "md": lambda r: show_.as_markdown(r, chosen)}
            print(text[form](rows), end="" if form == "csv" else "\n")


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A stored run.")],
    after: Annotated[Path, typer.Argument(help="Another one.")],
    fail_slower: Annotated[
        float, typer.Option(help="Slowdown in per cent that makes the exit code 1.")
    ] = 1.0,
    across: Annotated[bool, typer.Option("--across", help="Compare even across devices.")] = False,
) -> None:
    """Compare two stored runs row by row. Measuring both sides in one run with `kernels --vs` is surer."""
    with _errors_named():
        lines = compare_runs(store.read_run(before), store.read_run(after), across)
        show_.wide_console().print(comparison_table(lines))
    raise typer.Exit(int(any(is_regression(line, fail_slower / 100) for line in lines)))


@app.command("spread")
def spread_(
    runs: Annotated[list[Path], typer.Argument(help="Stored runs of the same cases.")],
    every: Annotated[bool, typer.Option("--all", help="Also rows that are timed but not ok.")] = False,
) -> None:
    """How far the medians of the same case lie apart over whole runs."""
    with _errors_named():
        lines = spread([store.read_run(path) for path in runs], every)
        if not lines:
            raise UsageError("no case is ok in two of these runs")
        show_.wide_console().print(spread_table(lines))
        ordered = sorted(line["spread"] for line in lines)
        covered = sum(line["covered"] for line in lines) / len(lines)
        print(
            f"{len(lines)} cases: spread median {ordered[len(ordered) // 2]:.2%}, largest {ordered[-1]:.2%}; "
            f"intervals hold the common median {covered:.0%} of the time"
        )


@app.command()
def report(
    run: RunPath = None,
    out: Annotated[Path | None, typer.Option(help="Default: the run's path with .html.")] = None,
) -> None:
    """Write a standalone HTML page with tables and plots."""
    from draftwood.bench.report import html

    with _errors_named():
        path = run or store.newest(FOLDER)
        target = out or path.with_suffix(".html")
        target.write_text(html(store.read_run(path)))
        print(target)


def _jobs(
    catalog: Catalog,
    device: str,
    only: list[str] | None,
    axes: list[str] | None,
    impl: list[str] | None,
    tag: list[str] | None,
    suite: str,
    limit: int | None,
    cache: str,
    vs: str | None,
    once: bool,
) -> list[Job]:
    gpu = device == "cuda"
    narrowed = bool(only or axes or tag or once or suite != "auto")
    impls = _split(impl)
    chosen = Selection(
        suite="bench" if suite == "bench" or (suite == "auto" and gpu) else "small",
        kernels=_split(only),
        impls=(*impls, vs) if impls and vs else impls,
        axes=parse_axes(axes or ()),
        tags=tuple(tag or ()),
        cache="warm" if cache == "declared" and not gpu else cache,  # type: ignore[arg-type]
        limit=CPU_CASES if limit is None and not gpu and not narrowed else limit,
    )
    usual = ("triton", "torch") if gpu else ("torch", "ref") if chosen.suite == "small" else ("torch",)
    jobs = select(catalog, chosen, usual, first_only=gpu and vs is None)
    if not jobs:
        raise UsageError("nothing to measure: no case is left after the filters")
    if vs is not None and not any(job.impl == vs for job in jobs):
        raise UsageError(f"`--vs {vs}`: not among the implementations measured")
    return jobs


def _matches(
    row: store.Row, sections: tuple[str, ...], impls: tuple[str, ...], tags: tuple[str, ...]
) -> bool:
    has = {f"{k}={v}" for k, v in row["case"].items()} | {row["status"], row["cache"]}
    return (
        (not sections or row["kernel"] in sections)
        and (not impls or row["impl"] in impls)
        and has.issuperset(tags)
    )


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


def _device(device: str) -> str:
    """`auto` is the GPU where there is a driver for one: torch is not asked, importing it takes seconds."""
    if device != "auto":
        return device
    return "cuda" if Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists() else "cpu"


def _split(options: list[str] | None) -> tuple[str, ...]:
    return tuple(part for option in options or () for part in option.split(","))


@contextmanager
def _errors_named() -> Iterator[None]:
    try:
        yield
    except UsageError as e:
        print(f"error: {e}", file=sys.stderr)
        raise typer.Exit(2) from e
    except WorkerLost as e:
        print(f"error: the worker did not start: {e}", file=sys.stderr)
        raise typer.Exit(3) from e
