"""The processes of ranks 1, 2, ...: started, watched, asked why they ended, and ended."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import draftwood

STORE, SIZE, RANK, LOCAL_RANK = "DRAFTWOOD_STORE", "WORLD_SIZE", "RANK", "LOCAL_RANK"
"""Environment of a rank: the last three as torchrun sets them, the first only where no torchrun does."""
FAREWELL = 10.0
"""Seconds that a process told to stop may take."""


class Processes:
    """Ranks 1 .. size - 1 on this machine, each a fresh interpreter in a session of its own.

    They find each other through a file that only this user can read, and end when this process does.
    """

    def __init__(self, size: int, build: Callable[[], object], threads: int) -> None:
        """Each rank calls `build`, which is pickled, with `threads` CPU threads."""
        self._folder = tempfile.TemporaryDirectory(prefix="draftwood-")
        self.store_file = str(Path(self._folder.name) / "store")
        package = str(Path(draftwood.__file__).parents[1])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        message = pickle.dumps((os.getpid(), build))
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(1, size):
            own = {
                STORE: self.store_file,
                SIZE: size,
                RANK: rank,
                LOCAL_RANK: rank,
                "OMP_NUM_THREADS": threads,
            }
            process = subprocess.Popen(
                [sys.executable, "-m", "draftwood.engine.worker"],
                stdin=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": path} | {name: str(value) for name, value in own.items()},
                start_new_session=True,  # Ctrl-C is for the first rank alone
            )
            self._running[rank] = process
            assert process.stdin is not None
            with process.stdin:
                process.stdin.write(message)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._running.items()}

    def ended(self) -> dict[int, str]:
        """How each rank that is no more has ended."""
        codes = {rank: process.poll() for rank, process in self._running.items()}
        return {rank: _how(code) for rank, code in codes.items() if code is not None}

    def end(self, *, within: float) -> None:
        """Wait for all of them to end, and kill what is left then."""
        until = time.monotonic() + within
        for process in self._running.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (", for want of memory perhaps" if name == "SIGKILL" else "")
