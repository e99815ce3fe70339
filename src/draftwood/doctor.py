"""`draftwood doctor`: what this machine has, or whether a model pair fits on N GPUs of it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from draftwood.config import EngineConfig

if TYPE_CHECKING:
    from draftwood.engine.footprint import Footprint, Layout
    from draftwood.models.config import TargetConfig

GIB = 2**30

CONFIGS = ["*.json"]
"""What is downloaded of a repository: configs and the index of the weights, not the weights."""

H200_BYTES = 149_557_477_376
"""What torch finds free on an NVIDIA H200, sold as 141 GB."""


def doctor(
    model: Annotated[
        Path | None,
        typer.Option(help="Target folder or repository id: say what it takes and whether it fits."),
    ] = None,
    drafter: Annotated[Path | None, typer.Option(help="Its DFlash drafter, likewise.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs to share the model; default 1.")] = None,
    gpu_memory_gib: Annotated[
        float | None, typer.Option(help="Of each; default: detected, or an H200's.")
    ] = None,
    max_batch: Annotated[int | None, typer.Option(help="Requests at once, as for the engine.")] = None,
    max_context: Annotated[int | None, typer.Option(help="Tokens per request, as for the engine.")] = None,
    max_budget: Annotated[int | None, typer.Option(help="Slots per tree, as for the engine.")] = None,
    expert_parallel: Annotated[
        bool,
        typer.Option(
            "--expert-parallel", help="Count whole experts per GPU; the engine shares columns of each."
        ),
    ] = False,
) -> None:
    """Say what this machine has and which kernels it would use; with --model, whether that model fits."""
    console = Console(highlight=False)
    settings: dict[str, Any] = {
        k: v
        for k, v in (("max_batch", max_batch), ("max_context", max_context), ("max_budget", max_budget))
        if v is not None
    }
    if model is not None:
        from draftwood.engine.footprint import Layout

        if gpu_memory_gib is not None and not 0 < gpu_memory_gib < float("inf"):
            raise ValueError(f"--gpu-memory-gib: expected a positive number, got {gpu_memory_gib}")
        sound = _fits(
            console,
            model,
            drafter,
            EngineConfig(**settings),
            layout=Layout(gpus or 1, expert_parallel),
            memory_gib=gpu_memory_gib,
        )
    elif settings or expert_parallel or any(v is not None for v in (drafter, gpus, gpu_memory_gib)):
        raise ValueError("--model: needed, since the other options are about it")
    else:
        sound = _machine(console)
    if not sound:
        raise typer.Exit(1)


# The machine


def _machine(console: Console) -> bool:
    """Print hardware, versions and the kernels chosen; False if a kernel has no implementation here."""
    import torch

    from draftwood import bundled
    from draftwood.kernels import KERNELS, KernelUnavailableError
    from draftwood.kernels.chip import chip_of
    from draftwood.kernels.registry import by_name_only, choose
    from draftwood.kernels.specialised import Use

    machine = Table("what", "here", title="machine", title_justify="left")
    machine.add_row("draftwood", _version("draftwood"))
    machine.add_row("python", platform.python_version())
    for package in ("torch", "triton", "cuda-bindings"):
        machine.add_row(package, _version(package))
    machine.add_row("cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads")
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        machine.add_row(f"gpu {i}", f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB")
    if not torch.cuda.is_available():
        machine.add_row("gpu", "none that torch can use")
    target, drafter = bundled.pair()
    machine.add_row("bundled target", str(target))
    machine.add_row("bundled drafter", str(drafter))
    console.print(machine)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernels = Table(
        *("kernel", "implementation", "why", "deterministic"),
        title=f"kernels on {device}",
        title_justify="left",
    )
    missing = False
    capability = chip_of(torch.device("cuda")).capability if device == "cuda" else 0
    kimi = Use(capability, "bfloat16", value_dim=512, rope_dim=64, page=64)
    for kernel in KERNELS:
        try:
            choice = choose(kernel, device, use=kimi)
            fixed = choose(kernel, device, deterministic=True)
            other = choose(kernel, device)
            kernels.add_row(kernel, choice.impl, choice.reason, fixed.impl)
            if other.impl != choice.impl:
                kernels.add_row(f"{kernel}, elsewhere", other.impl, other.reason, fixed.impl)
        except KernelUnavailableError as e:
            kernels.add_row(kernel, "none", str(e), "none")
            missing = True
        for impl in by_name_only(kernel) if device == "cuda" else ():
            try:
                why = choose(kernel, device, impl, use=kimi).reason
            except KernelUnavailableError as e:
                why = str(e)
            kernels.add_row(f"{kernel}, by name only", impl, why, "no")
    console.print(kernels)
    return not missing


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# A model


def _fits(
    console: Console,
    model: Path,
    drafter: Path | None,
    engine: EngineConfig,
    *,
    layout: Layout,
    memory_gib: float | None,
) -> bool:
    """Print what both models and their caches take on each GPU; whether that is within its memory."""
    from draftwood.engine.footprint import footprint
    from draftwood.models import drafter as drafter_model
    from draftwood.models import target as target_model
    from draftwood.models.config import TargetConfig
    from draftwood.models.drafter_config import DrafterConfig
    from draftwood.models.folder import resolve
    from draftwood.models.inventory import drafter_tensors, found, target_tensors

    folder = resolve(model, patterns=CONFIGS)
    target = TargetConfig.from_folder(folder)
    limit = target.max_position_embeddings
    if engine.max_context is not None and engine.max_context > limit:
        raise ValueError(f"max_context: {engine.max_context} is beyond the model's {limit} positions")
    rename = partial(target_model.own_name, config=target)
    with Console(stderr=True).status("reading the headers of the files"):  # seconds for 200,000 tensors
        target_specs, source = found(target_tensors(target), folder, rename)
    console.print(f"target {folder}: {source}", markup=False)
    choices, draft, draft_specs = target.choices, None, None
    if drafter is not None:
        folder = resolve(drafter, patterns=CONFIGS)
        draft = DrafterConfig.from_folder(folder)
        draft.check_fits(target)
        draft_specs, source = found(drafter_tensors(draft), folder, drafter_model.own_name)
        console.print(f"drafter {folder}: {source}", markup=False)
        choices |= draft.choices()
    for setting, choice in choices.items():
        console.print(f"{setting}: {choice}", markup=False)
    _print_attention(console, target, engine)
    takes = footprint(target, draft, engine, layout, target_specs=target_specs, drafter_specs=draft_specs)
    _print_parts(console, takes, layout)
    return _print_cache(console, takes, engine, engine.max_context or limit, *_memory(memory_gib))


def _print_attention(console: Console, target: TargetConfig, engine: EngineConfig) -> None:
    """On a GPU, which `verify_attn` this target gets; it is the kernel of which there are several."""
    from draftwood.engine.devices import attention_use, choose_device, choose_dtype
    from draftwood.kernels.registry import choose

    device = choose_device("auto")
    use = attention_use(target, choose_dtype("auto", device), device, engine.page_size)
    if use is not None:
        choice = choose("verify_attn", device, use=use)
        console.print(f"verify_attn: {choice.impl}, {choice.reason}", markup=False)


def _memory(asked_gib: float | None) -> tuple[int, str]:
    """Bytes of the smallest GPU, and how we know."""
    import torch

    if asked_gib is not None:
        return int(asked_gib * GIB), "as given"
    if not torch.cuda.is_available():
        return H200_BYTES, "assumed: an NVIDIA H200 (141 GB), as torch finds no GPU here"
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    smallest = min(gpus, key=lambda gpu: gpu.total_memory)
    return smallest.total_memory, f"{smallest.name}, detected; {len(gpus)} here"


def _print_parts(console: Console, takes: Footprint, layout: Layout) -> None:
    each = f"each of {layout.gpus} GPUs" if layout.gpus > 1 else "the GPU"
    table = Table("", "in the files", each, "", title="memory", title_justify="left")
    for name, lines in (
        ("target", takes.target),
        ("drafter", takes.drafter),
        ("scratch", takes.scratch),
        ("estimates", takes.estimates),
    ):
        if not lines:
            continue
        stored = sum(line.stored for line in lines)
        total = _size(sum(line.per_gpu for line in lines))
        table.add_section()
        table.add_row(f"[bold]{name}[/bold]", _size(stored) if stored else "", f"[bold]{total}[/bold]")
        for line in lines:
            table.add_row(
                f"  {line.name}", _size(line.stored) if line.stored else "", _size(line.per_gpu), line.how
            )
    table.add_section()
    table.add_row("[bold]without cache[/bold]", "", f"[bold]{_size(takes.without_cache)}[/bold]")
    console.print(table)


def _print_cache(
    console: Console, takes: Footprint, engine: EngineConfig, context: int, memory: int, source: str
) -> bool:
    """Print the cache that the settings ask for and the one that there is room for; whether the first fits."""
    requests, each = engine.max_batch, takes.pages_per_request(context)
    asked = requests * each * takes.page_bytes
    needed, room = takes.without_cache + asked, takes.pages_that_fit(memory)
    table = Table("", "", title="cache", title_justify="left", show_header=False)
    table.add_row(
        "cache per token", f"{takes.latent_bytes:,} B latents + {takes.context_bytes:,} B drafter context"
    )
    table.add_row(f"cache of {requests} requests of {context:,} tokens", _size(asked))
    table.add_row("needed in all", _size(needed))
    table.add_row("memory", f"{_size(memory)}, {source}")
    table.add_row("tokens that fit", f"{room * takes.page_size:,} in pages of {takes.page_size}")
    table.add_row(f"requests of {context:,} tokens that fit", f"{room // each:,}")
    console.print(table)
    if needed <= memory:
        console.print(f"fits, with {_size(memory - needed)} to spare")
        return True
    if takes.without_cache > memory:
        why = f"without any cache {_size(takes.without_cache - memory)} are missing"
    else:
        why = f"the cache lacks {_size(needed - memory)}; {room // requests * takes.page_size:,} tokens per request fit"
    console.print(f"does not fit: {why}", style="red")
    return False


def _size(n: int) -> str:
    return f"{n / GIB:,.2f} GiB" if n >= GIB / 8 else f"{n / 2**20:,.2f} MiB"
