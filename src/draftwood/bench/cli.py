"""`draftwood bench`: kernels, generate, list, show, compare, spread, report.

Tables go to stdout; the plan, progress and warnings to stderr. Exit codes: 0 fine; 1 something is slower; 2 wrong
arguments; 3 a case was wrong, invalid, crashed, hung or suspect, or nothing could be measured; 4 time ran out first.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from draftwood.bench import show as show_
from draftwood.bench import store
from draftwood.bench.catalog import Catalog, Job, Selection, UsageError, parse_axes, select
from draftwood.bench.compare import compare_runs, comparison_table, is_regression, spread, spread_table
from draftwood.bench.generate.cli import generate
from draftwood.bench.options import (
    FOLDER,
    Axes,
    CaseLimit,
    Deadline,
    Device,
    KeepFailed,
    Out,
    PlanOnly,
    Resume,
    Seconds,
    Tags,
    Target,
    capability_of,
    countdown_of,
    device_of,
    errors_named,
    run_path,
    split,
)
from draftwood.bench.supervisor import worker_of
from draftwood.kernels.registry import ORDER

CPU_CASES = 4

app = typer.Typer(
    help="Measure kernels and generation, and say only what the measurements support.", no_args_is_help=True
)
app.command()(generate)

Only = Annotated[list[str] | None, typer.Option("--only", help="Kernel; repeat or separate by commas.")]
Impls = Annotated[list[str] | None, typer.Option("--impl", help="Implementation, or peer:NAME.")]
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
    budget: Seconds = "30s",
    deadline: Deadline = None,
    target: Target = 1.0,
    case_limit: CaseLimit = None,
    vs: Annotated[
        str | None, typer.Option(help="Compare with this implementation, in turns A B B A.")
    ] = None,
    peer: Peers = None,
    extra: Extra = None,
    plan: PlanOnly = False,
    once: Annotated[bool, typer.Option("--once", help="One timed call each: for profilers and CI.")] = False,
    resume: Resume = None,
    keep_failed: KeepFailed = False,
    out: Out = None,
) -> None:
    """Plan, check and measure kernels within a budget."""
    from draftwood.bench.live import Live
    from draftwood.bench.planner import MIN_VISITS
    from draftwood.bench.state import Options
    from draftwood.bench.suite import Suite

    with errors_named():
        countdown = countdown_of(budget, deadline)
        chip = device_of(device)
        catalog = Catalog.of_files(peer or (), extra or ())
        jobs = _jobs(catalog, chip, only, axes, impl, tag, suite, limit, cache, vs, once)
        start = worker_of(chip, peer or (), extra or ())
        path = run_path("kernels", resume, out, chip)
        options = Options(
            device=chip,
            budget_s=countdown.seconds,
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
            console = show_.wide_console()
            show_.short_table(console, run.rows, run.versus, show_.MOST_LINES)
            show_.last_line(console, run.rows, run.out, countdown)
    raise typer.Exit(code)


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
    with errors_named():
        catalog = Catalog.of_files(peer or (), extra or ())
        jobs = _jobs(catalog, device_of(device), only, axes, impl, tag, suite, limit, cache, None, False)
        for job in jobs:
            print(job.id)


@app.command()
def show(
    run: RunPath = None,
    section: Annotated[
        list[str] | None, typer.Option("--section", help="Kernel, or a part of `generate`.")
    ] = None,
    impl: Impls = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="axis=value, or a status.")] = None,
    columns: Annotated[str | None, typer.Option(help="Separated by commas; a wrong one lists all.")] = None,
    sort: Annotated[str | None, typer.Option(help="A stored field, such as median_us.")] = None,
    form: Annotated[
        Literal["table", "json", "csv", "md"], typer.Option("--format", help="How to print.")
    ] = "table",
) -> None:
    """Show a stored run, or a part of it."""
    with errors_named():
        rows = store.read_run(run or store.newest(FOLDER)).rows
        view = show_.view_of(rows)
        sections = split(section)
        columns_of = dict.fromkeys(c for s in sections for c in view.sections.get(s, ()))
        kernels = tuple(s for s in sections if s not in view.sections)
        rows = [r for r in rows if _matches(r, kernels, split(impl), tuple(tag or ()))]
        if not rows:
            raise UsageError("no row matches; `draftwood bench show` without filters lists all")
        rows = show_.in_order(rows, sort)
        chosen = tuple(columns_of) if columns_of and not columns else show_.choose_columns(columns, view)
        if form == "table":
            show_.wide_console().print(show_.table(rows, chosen, view.title(rows), view))
        elif form == "md":
            print("\n\n".join(filter(None, (view.title(rows), show_.as_markdown(rows, chosen, view)))))
        elif form == "csv":
            print(show_.as_csv(rows), end="")
        else:
            print(show_.as_json(rows))


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
    with errors_named():
        lines = compare_runs(store.read_run(before), store.read_run(after), across)
        show_.wide_console().print(comparison_table(lines))
    raise typer.Exit(int(any(is_regression(line, fail_slower / 100) for line in lines)))


@app.command("spread")
def spread_(
    runs: Annotated[list[Path], typer.Argument(help="Stored runs of the same cases.")],
    every: Annotated[bool, typer.Option("--all", help="Also rows that are timed but not ok.")] = False,
) -> None:
    """How far the medians of the same case lie apart over whole runs."""
    with errors_named():
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
    roofline: Annotated[bool, typer.Option("--roofline", help="Only that plot, as an SVG file.")] = False,
) -> None:
    """Write a standalone HTML page with tables and plots."""
    from draftwood.bench.report import html, roofline_file

    with errors_named():
        path = run or store.newest(FOLDER)
        target = out or path.with_suffix(".svg" if roofline else ".html")
        target.write_text((roofline_file if roofline else html)(store.read_run(path)))
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
    impls = split(impl)
    chosen = Selection(
        suite="bench" if suite == "bench" or (suite == "auto" and gpu) else "small",
        kernels=split(only),
        impls=(*impls, vs) if impls and vs else impls,
        axes=parse_axes(axes or ()),
        tags=tuple(tag or ()),
        cache="warm" if cache == "declared" and not gpu else cache,  # type: ignore[arg-type]
        limit=CPU_CASES if limit is None and not gpu and not narrowed else limit,
        capability=capability_of(device),
    )
    usual = ORDER[device] if gpu or chosen.suite == "bench" else (*ORDER[device], "ref")
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
