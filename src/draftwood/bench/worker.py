"""The measuring process: `python -m draftwood.bench.worker`, JSON lines in on stdin, JSON lines out.

One request, one reply. The first request configures; each of the others is `ceilings`, `prepare` or `sample`. An
exception becomes a reply with a status; after a device error the reply says `fatal` and the process ends, for a broken
CUDA context cannot be mended. Whatever kernels print goes to stderr.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from draftwood.bench.catalog import Catalog, Job, UsageError
from draftwood.bench.makers import COMPILED, Makers, die_with_parent, find_gpu
from draftwood.kernels.case import Case, CaseError, Mismatch
from draftwood.kernels.registry import KernelUnavailableError

PATIENCE_S = 0.5
"""How long a request waits for inputs of its case; then it is to be made again, after others."""


class Server(Protocol):
    """What answers the requests of a suite."""

    def hello(self) -> dict[str, Any]:
        """Its first words, `device` among them."""
        ...

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one request, with a status; never raises."""
        ...


def serve(start: Callable[[Mapping[str, Any]], Server]) -> None:
    """Answer requests until stdin ends. `start` makes a server from the first message."""
    die_with_parent()
    faulthandler.enable()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    started = time.perf_counter()
    config = json.loads(sys.stdin.readline())
    try:
        server = start(config)
        hello = {**server.hello(), "start_s": time.perf_counter() - started}
    except ValueError as e:  # what was asked for cannot be had, and says so itself
        _reply(replies, {"status": "invalid", "detail": str(e)})
        return
    except Exception as e:  # noqa: BLE001 - the parent reports it
        _reply(replies, {"status": "crash", "detail": error_text(e)})
        return
    _reply(replies, hello)
    for line in sys.stdin:
        reply = server.answer(json.loads(line))
        _reply(replies, reply)
        if reply.get("fatal"):
            return


class Session:
    """State of one kernel worker: the device it measures on and the cases it holds."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.device = str(config["device"])
        jobs = [Job.from_json(j) for j in config["jobs"]]
        files = [Path(p) for p in config["peers"]], [Path(p) for p in config["extra"]]
        makers = None
        if self.device == "cuda":  # on a CPU they would take the cores that are to be measured
            try:
                gpu = find_gpu()
            except OSError as e:
                raise UsageError(f"`--device cuda`: no GPU is to be had: {e}") from e
            compiled: dict[Case, list[str]] = {job.case: [] for job in jobs}
            for job in jobs:
                compiled[job.case] += [job.impl] if job.impl in COMPILED else []
            makers = Makers(files, gpu, list(compiled), compiled)

        from draftwood.bench import device, workbench  # imports torch, while the makers do so too

        self.bench = workbench.Workbench(Catalog.of_files(*files), self.device, jobs, makers)
        self.clock = device.clock_reader(self.device)
        self.actions: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "ceilings": lambda r: device.measure_ceilings(self.device, set(r["dtypes"])).to_json(),
            "prepare": self._prepare,
            "sample": self._sample,
        }

    def hello(self) -> dict[str, Any]:
        from draftwood.bench import device

        return {"device": device.describe(self.device)}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        outcome, evicted = self._outcome(request), self.bench.tell_evicted()
        return {**outcome, "evicted": evicted} if evicted else outcome

    def _outcome(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"status": "done", **self.actions[request["do"]](request)}
        except Mismatch as e:
            return {"status": "wrong", "detail": str(e)}
        except CaseError as e:
            return {"status": "invalid", "detail": str(e)}
        except NotImplementedError as e:
            return {"status": "skipped", "detail": f"not supported: {e}"}
        except KernelUnavailableError as e:
            return {"status": "skipped", "detail": str(e)}
        except Exception as e:  # noqa: BLE001 - whatever a kernel raises becomes its label
            return {"status": "crash", "detail": error_text(e), "fatal": is_device_error(e)}

    def _prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        job = Job.from_json(request["job"])
        if not self.bench.has_inputs(job.case, PATIENCE_S):
            return {"pending": True}
        return self.bench.prepare(job, bool(request["gate"]))

    def _sample(self, request: Mapping[str, Any]) -> dict[str, Any]:
        timings = self.bench.sample(Job.from_json(request["job"]), int(request["n"]))
        return {"timings": timings, **self.clock.read()}


def is_device_error(e: Exception) -> bool:
    """Whether the device context is lost; out of memory is not such an error."""
    import torch

    if isinstance(e, torch.OutOfMemoryError):
        return False
    text = str(e)
    return "CUDA error" in text or "device-side assert" in text or "illegal memory access" in text


def error_text(e: Exception) -> str:
    last = traceback.extract_tb(e.__traceback__)[-1]
    return f"{type(e).__name__}: {e} ({Path(last.filename).name}:{last.lineno})"


def _reply(stream: TextIO, message: Mapping[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    serve(Session)
