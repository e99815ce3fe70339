"""`draftwood bench generate`: its options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from draftwood.bench import show, store
from draftwood.bench.catalog import UsageError, parse_axes
from draftwood.bench.generate import PLAIN
from draftwood.bench.generate.cases import Models, make_jobs
from draftwood.bench.generate.show import last_tables
from draftwood.bench.options import (
    Axes,
    CaseLimit,
    Deadline,
    Device,
    KeepFailed,
    Out,
    PlanOnly,
    Resume,
    Seconds,
    Target,
    countdown_of,
    device_of,
    errors_named,
    run_path,
    split,
)

DEFAULTS: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {"batch": ("1", "4"), "budget": ("auto", "8", "32")},
    "cuda": {"batch": ("1", "8", "64"), "budget": ("auto", "16", "64")},
}
ALWAYS: dict[str, tuple[str, ...]] = {"prompt": ("64",), "new": ("64",), "temperature": ("0",)}


def generate(
    axes: Axes = None,
    mode: Annotated[
        list[str] | None, typer.Option("--mode", help="Of plain, chain, tree; plain is always measured.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Target folder; default: the bundled pair.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="Its DFlash drafter.")] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="Texts to cut prompts from, or .jsonl with a string or token ids per line."),
    ] = None,
    random_text: Annotated[
        bool, typer.Option("--random-text", help="Random tokens, the worst case of speculation.")
    ] = False,
    synthetic: Annotated[
        Path | None, typer.Option(help="A target's config.json: random weights, imposed acceptance.")
    ] = None,
    synthetic_drafter: Annotated[
        Path | None, typer.Option(help="A drafter's config.json, for what drafting costs.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the synthetic target.")] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(help="Imposed chance of the first candidate, or one per depth; repeat to sweep."),
    ] = None,
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float64"], typer.Option()] = "auto",
    device: Device = "auto",
    graphs: Annotated[
        bool | None,
        typer.Option(
            "--graphs/--no-graphs",
            help="Replay rounds as CUDA graphs, in every mode; default: on a GPU.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts.")] = 0,
    budget: Seconds = "60s",
    deadline: Deadline = None,
    target: Target = 10.0,
    case_limit: CaseLimit = None,
    plan: PlanOnly = False,
    once: Annotated[bool, typer.Option("--once", help="One visit each: for profilers and CI.")] = False,
    resume: Resume = None,
    keep_failed: KeepFailed = False,
    out: Out = None,
) -> None:
    """Generate in plain, chain and tree mode side by side, within a budget.

    Axes for -a: batch, prompt, new, temperature, and budget (slots per tree, or auto).
    """
    from draftwood.bench.generate.suite import MIN_VISITS, GenerateSuite, worker_of
    from draftwood.bench.live import Live
    from draftwood.bench.state import Options

    with errors_named():
        countdown = countdown_of(budget, deadline)
        chip = device_of(device)
        models = Models(
            device=chip,
            dtype=dtype,
            model=_text(model),
            drafter=_text(drafter),
            synthetic=_text(synthetic),
            synthetic_drafter=_text(synthetic_drafter),
            layers=layers,
            prompts=tuple(map(str, prompts or ())),
            random_text=random_text,
            graphs=graphs,
        )
        models.check()
        if accept and not synthetic:
            raise UsageError(
                "`--accept`: a real drafter's acceptance is measured; only --synthetic imposes one"
            )
        jobs = make_jobs(
            parse_axes(axes or ()),
            split(mode) or ("chain", "tree"),
            _defaults(models),
            text=models.text,
            accepts=(accept or ("0.8",)) if synthetic else (),
            seed=seed,
        )
        path = run_path("generate", resume, out, f"{chip}-generate")
        options = Options(
            device=chip,
            budget_s=countdown.seconds,
            target=target / 100,
            case_limit_s=case_limit,
            vs=PLAIN,
            plan_only=plan,
            once=once,
            resume=resume,
            keep_failed=keep_failed,
            argv=tuple(sys.argv[1:]),
        )
        with Live(countdown, 1 if once else MIN_VISITS, full_plan=plan, unit="us a token") as live:
            run = GenerateSuite(jobs, options, worker_of(models), countdown, store.Store(path), live)
            code = run.run()
        if not plan:
            console = show.wide_console()
            last_tables(console, run.rows, show.MOST_LINES)
            show.last_line(console, run.rows, run.out, countdown)
    raise typer.Exit(code)


def _defaults(models: Models) -> dict[str, tuple[str, ...]]:
    """A .jsonl file's prompts are taken as long as they are."""
    listed = any(Path(p).suffix == ".jsonl" for p in models.prompts)
    defaults = ALWAYS | DEFAULTS[models.device]
    return defaults | {"prompt": ("0",)} if listed else defaults


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
