"""A progress bar over bytes, with the rate: on a terminal, and only for what takes longer than a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

PATIENCE_S = 1.0


@contextmanager
def byte_bar(what: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """Gives the function to call with (bytes done, bytes in all), as often as one likes."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(TextColumn(what), *columns, console=console, transient=True)
    task, start = bar.add_task("", total=None), monotonic()

    def progress(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if console.is_terminal and not bar.live.is_started and monotonic() - start > PATIENCE_S:
            bar.start()

    try:
        yield progress
    finally:
        if bar.live.is_started:
            bar.stop()
