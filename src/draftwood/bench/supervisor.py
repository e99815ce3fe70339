"""The worker process seen from outside: start it, ask it, and replace it when it dies or does not answer.

Knows nothing about what is measured or statistics. Requests are answered one at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwood.bench.catalog import Job

STDERR_LINES = 40
TERM_GRACE_S = 2.0
KILL_WAIT_S = 5.0
"""A process stuck in a driver may outlive SIGKILL; the run does not wait for it."""


class WorkerLost(Exception):  # noqa: N818 - an outcome, not an error of this program
    """The worker died (`crash`), did not answer in time and was ended (`timeout`), or was asked to start with what cannot
    be had (`invalid`)."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


def worker_of(device: str, peers: Sequence[Path], extra: Sequence[Path]) -> StartWorker:
    """How to start a worker that will be asked for these jobs, in this order."""

    def start(jobs: Sequence[Job]) -> Worker:
        return Worker(
            {
                "device": device,
                "jobs": [job.to_json() for job in jobs],
                "peers": [str(p) for p in peers],
                "extra": [str(p) for p in extra],
            }
        )

    return start


class Worker:
    """One child in its own process group. `config` is its first message; `hello()` is its answer."""

    def __init__(
        self,
        config: Mapping[str, Any],
        command: Sequence[str] | None = None,
        module: str = "draftwood.bench.worker",
    ) -> None:
        self._stderr = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed by stop()
        self._process = subprocess.Popen(
            list(command or (sys.executable, "-m", module)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)
        self._send(config)

    def hello(self, limit_s: float) -> dict[str, Any]:
        """What the worker says of its device. Raises `WorkerLost`."""
        return self._receive(limit_s)

    def ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """The reply to a request. Raises `WorkerLost` if the worker dies or is silent for `limit_s` seconds."""
        self._send(request)
        return self._receive(limit_s)

    def stop(self, grace_s: float = TERM_GRACE_S) -> None:
        """End the whole process group: SIGTERM, a grace period, SIGKILL."""
        for sig, wait in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_WAIT_S)):
            if self._process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, sig)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait)
        for stream in (self._stdin, self._stdout, self._stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self._selector.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # its death shows when the reply is awaited
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()

    def _receive(self, limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                self.stop()
                raise WorkerLost("timeout", f"no answer within {limit_s:.1f} s")
            data = os.read(self._stdout.fileno(), 1 << 16)
            if not data:
                raise WorkerLost("crash", self._last_words())
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _last_words(self) -> str:
        code = self._process.wait()
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").splitlines()[-STDERR_LINES:]
        return "\n".join([f"worker ended by {cause}", *lines])


StartWorker = Callable[[Sequence[Job]], Worker]
"""Starts a worker that will be asked for these jobs, in this order, so that it can generate inputs ahead."""


class Slot:
    """The place of the one worker at a time: a lost one is replaced when it is next needed."""

    def __init__(self, start: StartWorker, jobs: Sequence[Job], left: Callable[[], float]) -> None:
        self._start, self._left = start, left  # left: seconds of the whole run
        self._worker: Worker | None = start(jobs)
        self.held: set[str] = set()  # ids of jobs that the present worker has ready

    def hello(self) -> dict[str, Any]:
        """The first worker's words about its device. Raises `WorkerLost` where it cannot start."""
        assert self._worker is not None
        return self._greet(self._worker)

    def ask(self, request: Mapping[str, Any], limit_s: float, rest: Sequence[Job]) -> dict[str, Any]:
        """The reply, within `limit_s` and what is left of the run; starting a new worker does not count for the former.

        `rest` are the jobs still to be asked for, told to a new worker. Raises `WorkerLost`.
        """
        if self._worker is None:
            self._worker = self._start(rest)
            self._greet(self._worker)
        try:
            reply = self._worker.ask(request, max(0.0, min(limit_s, self._left())))
        except WorkerLost:
            self.drop()
            raise
        if reply.get("fatal"):
            self.drop()
        return reply

    def drop(self, grace_s: float = TERM_GRACE_S) -> None:
        """End the worker, if there is one."""
        if self._worker is not None:
            self._worker.stop(grace_s)
        self._worker = None
        self.held.clear()

    def _greet(self, worker: Worker) -> dict[str, Any]:
        try:
            hello = worker.hello(max(0.0, self._left()))
        except WorkerLost:
            self.drop()
            raise
        if "device" not in hello:
            self.drop()
            raise WorkerLost(hello["status"], hello["detail"])
        return hello
