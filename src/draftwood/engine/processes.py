"""The processes of ranks 1, 2, ...: started, watched, asked why they ended, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

STORE, SIZE, RANK, LOCAL_RANK = "DRAFTWOOD_STORE", "WORLD_SIZE", "RANK", "LOCAL_RANK"
"""Environment of a rank: the last three as torchrun sets them, the first only where no torchrun does."""
PROGRAM = (
    "import json, sys; sys.path = json.loads(sys.argv[1]); from draftwood.engine.worker import main; main()"
)
"""With the parent's import path, so that what it has pickled is found."""
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
        message = pickle.dumps((os.getpid(), build))
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        shared = {SIZE: size, STORE: self.store_file, "OMP_NUM_THREADS": threads}
        try:
            for rank in range(1, size):
                self._running[rank] = _start(shared | {RANK: rank, LOCAL_RANK: rank}, message)
        except BaseException:
            self.end(within=0.0)
            raise

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


def _start(variables: Mapping[str, object], message: bytes) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        env=os.environ | {name: str(value) for name, value in variables.items()},
        start_new_session=True,  # Ctrl-C is for the first rank alone
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # one that has ended is noticed soon enough
        process.stdin.write(message)
    return process


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    suspicion = ", for want of memory perhaps" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({signal.strsignal(-code)}){suspicion}"
