"""Cases made ready ahead of the worker, in processes of their own: inputs generated and checked, Triton kernels compiled.

Makers open no GPU. Inputs reach the worker through shared memory, kernels through Triton's cache on disk. Their keys
are those of the real launches: a kernel's function runs on CPU tensors of the case, believes that they are on the
worker's chip, and every launch ends after compiling. Imports torch in the makers only, so that they start first.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from draftwood.bench.catalog import Catalog
from draftwood.kernels.case import Case

MOST_MAKERS = 12

COMPILED = {"triton": "triton", "gluon": "gluon", "hopper": "gluon"}
"""Implementations with kernels that are compiled ahead, and the one whose those are."""

Gpu = tuple[int, int]
"""Compute capability, as Triton writes it, and number of multiprocessors."""

Files = tuple[Sequence[Path], Sequence[Path]]
"""Of peers and of extra kernels."""

Made = tuple[Any, dict[str, float]]
"""`inputs.Packed`, and each implementation's seconds of compiling."""


def find_gpu() -> Gpu:
    """The first visible GPU, asked through the driver without opening it. Raises `OSError` where there is none."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, value = ctypes.c_int(), ctypes.c_int()

    def ask(name: str, *arguments: Any) -> None:
        if error := getattr(cuda, name)(*arguments):
            raise OSError(f"{name}: CUDA error {error}")

    def attribute(number: int) -> int:
        ask("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value

    ask("cuInit", 0)
    ask("cuDeviceGet", ctypes.byref(device), 0)
    return 10 * attribute(75) + attribute(76), attribute(16)


def die_with_parent() -> None:
    """On Linux the kernel ends this process with its parent, even while it hangs."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


class Makers:
    """Makes the cases in order, a few more than there are processes at a time, and compiles their implementations."""

    def __init__(
        self, files: Files, gpu: Gpu, cases: Sequence[Case], compiled: Mapping[Case, Sequence[str]]
    ) -> None:
        self._todo = deque(dict.fromkeys(cases))
        self._compiled = compiled
        self._coming: dict[Case, Future[Made]] = {}
        self._n = max(1, min(MOST_MAKERS, (os.cpu_count() or 1) - 2, len(self._todo)))
        self._arguments = (files, gpu)
        self._start()

    def ready(self, case: Case, wait_s: float) -> bool:
        """Whether `take` would not wait. Where nothing at all is ready, waits for something, `wait_s` at most."""
        self._submit()
        if case in self._coming:
            wait(self._coming.values(), wait_s, FIRST_COMPLETED)
            return self._coming[case].done()
        return case not in self._todo

    def take(self, case: Case) -> Made | None:
        """A case's inputs, or None where the caller has to make them. Raises `CaseError`, or what generating raised."""
        future = self._coming.pop(case, None)
        if future is None:
            return None
        try:
            return future.result()
        except (
            BrokenProcessPool
        ):  # a compiler crashed; whose it was shows when the worker comes to that launch
            self._todo.extendleft(reversed(self._coming))
            self._coming.clear()
            self._start()
            return None
        finally:
            self._submit()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(self._n, context, _begin, self._arguments)
        self._submit()

    def _submit(self) -> None:
        """Keep the makers busy, but memory bounded; where no one takes what is ready, go on one by one."""
        while self._todo and (
            len(self._coming) < self._n + 2 or all(future.done() for future in self._coming.values())
        ):
            case = self._todo.popleft()
            with contextlib.suppress(
                BrokenProcessPool
            ):  # `take` starts a new pool; until then the worker makes it
                self._coming[case] = self._pool.submit(_make, case, self._compiled.get(case, ()))


# in the makers

_catalog: Catalog


def _begin(files: Files, gpu: Gpu) -> None:
    die_with_parent()
    global _catalog
    _catalog = Catalog.of_files(*files)
    import torch

    from draftwood.kernels import chip

    torch.set_num_threads(1)
    chip.off_gpu = chip.Chip(*gpu)
    with contextlib.suppress(ImportError):  # without Triton there are inputs to generate
        _end_launches_after_compiling(gpu[0])


def _make(case: Case, impls: Sequence[str]) -> Made:
    from draftwood.bench.inputs import Packed, generate

    _, tensors = generate(_catalog, case)
    packed = Packed.of(tensors)
    return packed, {impl: _compile(case, COMPILED[impl], tensors) for impl in impls}


def _compile(case: Case, impl: str, tensors: dict[str, Any]) -> float:
    """The kernels of a case and of the small case that its outputs are checked on first; the seconds."""
    from draftwood.bench.inputs import generate, hollow, nearest_small
    from draftwood.kernels import chip

    start = time.perf_counter()
    function = _catalog.load(case.kernel, impl)
    with contextlib.suppress(Exception):  # the worker's launch raises it again, for the job to be labelled
        function(**hollow(tensors))
        small = nearest_small(_catalog, case, impl, chip.off_gpu.capability)
        function(**hollow(generate(_catalog, small)[1]))
    return time.perf_counter() - start


def _end_launches_after_compiling(capability: int) -> None:
    """For the rest of this process: `kernel[grid](...)` compiles for the capability and does nothing else."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime import JITFunction, driver

    class NoGpu:
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", capability, 32))

    driver.set_active(NoGpu())
    launch, seen = JITFunction.run, set()
    try:
        ctypes.CDLL("libcuda.so.1")
        linkable = True
    except OSError:
        linkable = False

    def run(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, warmup=True, **kwargs)
        if linkable and kernel.hash not in seen:
            CudaLauncher(kernel.src, kernel.metadata)  # C code for the host, compiled into the same cache
            seen.add(kernel.hash)
        return kernel

    JITFunction.run = run
