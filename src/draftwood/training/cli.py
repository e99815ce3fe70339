"""`draftwood train`: the command line of training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

app = typer.Typer(no_args_is_help=True, help="Train drafters.")

QUIET_SECONDS = 10.0
"""Between two lines when the output is not a terminal."""


class ConsoleShow:
    """Progress bars on a terminal, a line now and then elsewhere; everything to stderr."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self._said = 0.0

    def say(self, message: str) -> None:
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _line(self, message: str, final: bool = False) -> None:
        if not self.console.is_terminal and (final or monotonic() - self._said > QUIET_SECONDS):
            self._said = monotonic()
            self.say(message)

    @contextmanager
    def generating(self, total: int) -> Iterator[Callable[[int], None]]:
        columns = (TextColumn("continuations"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as bar:
            task = bar.add_task("", total=total)

            def progress(done: int) -> None:
                bar.update(task, completed=done)
                self._line(f"continuations {done}/{total}", final=done == total)

            yield progress

    @contextmanager
    def training(self) -> Iterator[Callable[[Any], None]]:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as bar:
            task = bar.add_task("training", total=1.0)

            def report(status: Any) -> None:
                text = (
                    f"step {status.step}/{status.steps}  loss {status.loss:.3f}  accept {status.accept:.2f}  "
                    f"{status.tokens_per_s / 1e3:.1f} k tokens/s"
                )
                bar.update(task, completed=status.share, description=text)
                left = status.seconds * (1 / max(status.share, 1e-6) - 1)
                self._line(f"{text}  {left:.0f} s left", final=status.share >= 1.0)
                if status.evaluation is not None:
                    lengths = "  ".join(f"{k} {v:.2f}" for k, v in status.evaluation.items())
                    self.say(f"step {status.step}: held-out tokens per round: {lengths}")

            yield report


def _numbers(text: str, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"expected numbers with commas between, got {text!r}") from None


@app.callback()
def _train() -> None:
    """Train drafters."""


@app.command()
def drafter(
    target: Annotated[str, typer.Option(help="Model folder or repository id.")],
    data: Annotated[
        list[Path], typer.Option(help="File of prompts: .jsonl or one prompt a line; repeatable.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the drafter; run again to go on.")],
    files: Annotated[list[Path] | None, typer.Argument(help="More files of prompts.")] = None,
    on_bad: Annotated[str, typer.Option(help="skip or refuse unusable files and lines.")] = "refuse",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    layers: Annotated[int, typer.Option(help="Draft layers.")] = 5,
    block_size: Annotated[int, typer.Option(help="Anchor and drafted tokens.")] = 8,
    taps: Annotated[str | None, typer.Option(help="Target layers, 0-based, with commas between.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key and value heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of a head.")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="Width of the MLPs.")] = None,
    mask_token_id: Annotated[int | None, typer.Option(help="Default: the tokenizer's mask token.")] = None,
    init: Annotated[
        str | None, typer.Option(help="Drafter folder to start from instead of at random.")
    ] = None,
    init_layers: Annotated[
        str | None, typer.Option(help="Its layers that become this one's, 0-based, with commas between.")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of prompt and continuation.")] = 512,
    temperatures: Annotated[str, typer.Option(help="Of the continuations, taken in turn.")] = "0",
    eval_prompts: Annotated[int, typer.Option(help="Held out from the end of the data.")] = 64,
    generation_batch: Annotated[int, typer.Option(help="Sequences continued together.")] = 256,
    labels: Annotated[
        str, typer.Option(help="hard (sampled tokens) or soft (the target's distribution).")
    ] = "hard",
    epochs: Annotated[float, typer.Option()] = 6.0,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 32,
    anchors: Annotated[int, typer.Option(help="Blocks per sequence and step.")] = 32,
    gamma: Annotated[float, typer.Option(help="Decay of the weights within a block.")] = 4.0,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 6e-4,
    warmup: Annotated[float, typer.Option(help="Share of the run.")] = 0.04,
    clip: Annotated[float, typer.Option(help="Largest gradient norm.")] = 1.0,
    seconds: Annotated[
        float | None, typer.Option(help="End the schedule after this time of training.")
    ] = None,
    seed: Annotated[int, typer.Option()] = 0,
    checkpoint_every: Annotated[int, typer.Option(help="Steps.")] = 500,
    eval_every: Annotated[int, typer.Option(help="Steps.")] = 500,
    compile_: Annotated[
        bool, typer.Option("--compile/--no-compile", help="torch.compile; pays on a GPU.")
    ] = False,
    stop_at: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Train a DFlash drafter on the target's own continuations of the prompts."""
    import torch

    from draftwood.training.run import train_drafter
    from draftwood.training.settings import TrainSettings

    values = {k: v for k, v in locals().items() if k in TrainSettings.model_fields}
    values |= {"temperatures": _numbers(temperatures, float), "compile": compile_}
    values["taps"] = None if taps is None else _numbers(taps, int)
    values["init_layers"] = None if init_layers is None else _numbers(init_layers, int)
    if on_bad not in ("skip", "refuse"):
        raise typer.BadParameter(f"expected skip or refuse, got {on_bad!r}", param_hint="--on-bad")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    show = ConsoleShow()
    try:
        settings = TrainSettings(**values)
        files = [*data, *(files or [])]
        train_drafter(target, files, out, settings, show, on_bad=on_bad, device=device, stop_at=stop_at)  # type: ignore[arg-type]
    except ValidationError as e:
        error = e.errors()[0]
        show.say(f"--{'.'.join(map(str, error['loc'])).replace('_', '-')}: {error['msg']}")
        sys.exit(2)
    except ValueError as e:
        show.say(str(e))
        sys.exit(2)


if __name__ == "__main__":
    app()
