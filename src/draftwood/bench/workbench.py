"""Inside the worker: inputs of cases, brought to the device; outputs held against the reference; timers.

Everything here may crash, hang or run out of memory. The worker turns exceptions into replies; the parent process does
the rest.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from draftwood.bench.catalog import Catalog, Job, load_file
from draftwood.bench.device import last_level_cache
from draftwood.bench.inputs import generate, map_tensors, nearest_small, on_device, size_of, tensors_in
from draftwood.bench.makers import Makers
from draftwood.bench.timers import Call, CpuTimer, CudaTimer, Timer
from draftwood.kernels.case import Case
from draftwood.kernels.chip import chip_of
from draftwood.kernels.run_case import IN_PLACE, arrays_of, outputs, poisoned_memory, refused, to_numpy

MEMORY_SHARE = 0.75
"""Of the free memory, for inputs and their copies; the least recently used case makes room."""


@dataclass
class Prepared:
    """A job ready to be timed."""

    timer: Timer
    info: dict[str, Any]


@dataclass
class CaseInputs:
    """One case's inputs, shared by its implementations."""

    arguments: dict[str, Any]  # on the device
    numpy: dict[str, Any] | None  # kept for the reference only where it runs
    compile_s: Mapping[str, float]  # by a maker, of each implementation
    bytes: int
    held: int = 0  # with the copies made for cold timing
    jobs: dict[str, Prepared] = field(default_factory=dict)
    torch_output: Any = None


class Workbench:
    def __init__(
        self, catalog: Catalog, device: str, jobs: Sequence[Job], makers: Makers | None = None
    ) -> None:
        self.catalog = catalog
        self.device = device
        self.makers = makers
        self.cases: OrderedDict[Case, CaseInputs] = OrderedDict()
        self.held_against_ref = {job.case for job in jobs if job.impl == "ref"}
        self.verified: dict[tuple[str, str, Case], None] = {}
        self.passed: dict[tuple[str, Case], str] = {}  # the gate, in whatever cache state
        self.peers = {impl: load_file(peer.path) for impl, peer in catalog.peers.items()}
        free = torch.cuda.mem_get_info()[0] if device == "cuda" else _available_ram()
        self.capability = chip_of(torch.device(device)).capability
        self.room = int(free * MEMORY_SHARE)
        self.evicted: list[str] = []  # ids of jobs that made room, until `tell_evicted`
        self.compiled = 0
        if device == "cuda":
            self._count_compiling()

    def has_inputs(self, case: Case, wait_s: float) -> bool:
        """Whether `prepare` would not wait for a maker; see `Makers.ready`."""
        return self.makers is None or case in self.cases or self.makers.ready(case, wait_s)

    def prepare(self, job: Job, gate: bool) -> dict[str, Any]:
        """Make the job ready; with `gate`, only if its outputs are right. Raises what the kernel raises."""
        if why_not := refused(job.case, job.impl, self.capability):
            raise NotImplementedError(f"{job.impl} {why_not}")
        started, compiled = time.perf_counter(), self.compiled
        inputs = self._inputs(job.case)
        made = time.perf_counter()
        checked = self.passed.get((job.impl, job.case), "")
        if gate and not checked:
            checked = self.passed[job.impl, job.case] = self._gate(job, inputs)
        gated = time.perf_counter()
        cases = self.catalog.cases(job.kernel)
        timer = self._timer(job, inputs)
        setup = timer.setup
        info = {
            "bytes": cases.bytes_moved(job.case),
            "flops": cases.flops(job.case),
            "checked": checked,
            "estimate_us": setup.estimate_us,
            "calls": setup.calls,
            "method": setup.method,
            "launch_us": setup.launch_us,
            "inputs_s": made - started,
            "gate_s": gated - made,
            "compile_s": inputs.compile_s.get(job.impl, 0.0),
            "compiled_late": self.compiled - compiled,
            "setup_s": time.perf_counter() - started,
        }
        inputs.jobs[job.id] = Prepared(timer, info)
        return info

    def sample(self, job: Job, n: int) -> list[float]:
        """n timings; prepares the job first where it is not ready (a new worker, or evicted)."""
        inputs = self.cases.get(job.case)
        if inputs is None or job.id not in inputs.jobs:
            self.prepare(job, gate=False)
            inputs = self.cases[job.case]
        self.cases.move_to_end(job.case)
        return inputs.jobs[job.id].timer.time(n)

    def tell_evicted(self) -> list[str]:
        """Ids of the jobs that are no longer ready since this was last asked: their next timing prepares them again."""
        told, self.evicted = self.evicted, []
        return told

    def _inputs(self, case: Case) -> CaseInputs:
        if case in self.cases:
            self.cases.move_to_end(case)
            return self.cases[case]
        arrays, tensors, compile_s = self._made(case)
        size = size_of(tensors)
        self._make_room(size)
        by_ref = case in self.held_against_ref or case in self.catalog.cases(case.kernel).small()
        inputs = CaseInputs(
            on_device(tensors, self.device), arrays if by_ref else None, compile_s, size, size
        )
        self.cases[case] = inputs
        return inputs

    def _made(self, case: Case) -> tuple[dict[str, Any] | None, dict[str, Any], Mapping[str, float]]:
        """Inputs as numpy, unless a maker has them; as tensors on the CPU; and the maker's seconds of compiling."""
        made = self.makers.take(case) if self.makers is not None else None
        if made is not None:
            return None, made[0].unpack(), made[1]
        return *generate(self.catalog, case), {}

    def _count_compiling(self) -> None:
        """Have Triton say what it did not find in its cache."""
        try:
            from triton import knobs
        except ImportError:
            return

        def listener(*, cache_hit: bool, **facts: Any) -> None:
            self.compiled += not cache_hit

        knobs.compilation.listener = listener

    def _make_room(self, size: int, kept: Case | None = None) -> None:
        """Evict other cases than `kept`, the least recently used first, until `size` bytes more are within the room."""
        held = sum(c.held for c in self.cases.values())
        for case in list(self.cases):
            if held + size <= self.room:
                break
            if case != kept:
                gone = self.cases.pop(case)
                held -= gone.held
                self.evicted += gone.jobs
                del gone  # before memory is given back
        if self.device == "cuda" and torch.cuda.mem_get_info()[0] < 2 * size:
            torch.cuda.empty_cache()

    def _gate(self, job: Job, inputs: CaseInputs) -> str:
        """Raise `Mismatch` unless the outputs are right. Returns against what they were held: see docs/bench.md."""
        if job.impl == "ref":
            return "reference"
        peer = self.catalog.peers.get(job.impl)
        if peer is not None and peer.mask is not None:
            self._call(job, inputs.arguments)()
            return "unchecked"
        if job.case in self.catalog.cases(job.kernel).small():
            got = self._poisoned_output(job, inputs.arguments)
            self._compare(job.case, got, self._reference(job.case, inputs.numpy))
            return "ref"
        if peer is None:
            self._verify_small(job)
        got = self._poisoned_output(job, inputs.arguments)
        if job.impl == "torch":
            inputs.torch_output = got
            return "ref at a small size"
        if "torch" not in self.catalog.implementations(job.kernel):
            return "ref at a small size" if peer is None else "unchecked"
        torch_job = Job(job.case, "torch", job.cache)
        if inputs.torch_output is None:
            self._verify_small(torch_job)
            inputs.torch_output = self._poisoned_output(torch_job, inputs.arguments)
        if not _identical(got, inputs.torch_output):
            self._compare(job.case, got, to_numpy(inputs.torch_output))
        return "torch at full size"

    def _verify_small(self, job: Job) -> None:
        """Against the reference, once per implementation and small case."""
        small = nearest_small(self.catalog, job.case, job.impl, self.capability)
        key = (job.kernel, job.impl, small)
        if key in self.verified:
            return
        arrays, tensors = generate(self.catalog, small)
        got = self._poisoned_output(Job(small, job.impl, job.cache), on_device(tensors, self.device))
        self._compare(small, got, self._reference(small, arrays))
        self.verified[key] = None

    def _compare(self, case: Case, got: Any, want: Any) -> None:
        """`got` are tensors, `want` is numpy. Raises `Mismatch`."""
        self.catalog.cases(case.kernel).compare(case, to_numpy(got), want)

    def _reference(self, case: Case, arrays: Mapping[str, Any] | None) -> Any:
        given = self.catalog.cases(case.kernel).make(case) if arrays is None else arrays
        arguments = arrays_of(given)
        out = self.catalog.load(case.kernel, "ref")(**arguments)
        return outputs(case.kernel, arguments, out)

    def _poisoned_output(self, job: Job, arguments: Mapping[str, Any]) -> Any:
        """The output on the device, of a call whose new memory is poisoned and whose in-place input is a copy."""
        own = self._own(job, arguments)
        call = self._call(job, own)
        with poisoned_memory():
            out = call()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return outputs(job.kernel, own, out)

    def _own(self, job: Job, arguments: Mapping[str, Any]) -> dict[str, Any]:
        written = IN_PLACE.get(job.kernel, ())
        return {k: v.clone() if k in written else v for k, v in arguments.items()}

    def _call(self, job: Job, arguments: dict[str, Any]) -> Call:
        """The job's function on these arguments, as a call without arguments."""
        if job.impl not in self.peers:
            function: Callable[..., Any] = self.catalog.load(job.kernel, job.impl)
            return lambda: function(**arguments)
        module = self.peers[job.impl]
        if hasattr(module, "build"):
            built: Call = module.build(job.case, arguments)
            return built
        return lambda: module.run(**arguments)

    def _timed(self, job: Job, sets: Sequence[dict[str, Any]]) -> list[Call]:
        """Calls to be timed, each on its own set of arguments. They are what the engine's layers are to each other: what these
        share is prepared here, once."""
        shared = getattr(self.catalog.cases(job.kernel), "shared", None)
        if shared is None or job.impl in self.peers:
            return [self._call(job, arguments) for arguments in sets]
        layer = shared(self.catalog.load(job.kernel, job.impl), sets[0])
        return [layer(arguments) for arguments in sets]

    def _timer(self, job: Job, inputs: CaseInputs) -> Timer:
        cold = job.cache == "cold"
        cache = last_level_cache(self.device)
        if job.impl == "ref":
            arrays = arrays_of(inputs.numpy or self.catalog.cases(job.kernel).make(job.case))
            function = self.catalog.load(job.kernel, "ref")
            return CpuTimer(lambda: function(**arrays), cold, 2 * cache)
        if self.device == "cpu":
            (call,) = self._timed(job, [self._own(job, inputs.arguments)])
            return CpuTimer(call, cold, 2 * cache)

        def calls(n: int) -> list[Call]:
            self._make_room((n - 1) * inputs.bytes, kept=job.case)
            sets = [self._own(job, inputs.arguments)]
            sets += [map_tensors(inputs.arguments, torch.clone) for _ in range(n - 1)]
            inputs.held += (n - 1) * inputs.bytes
            return self._timed(job, sets)

        touched = min(inputs.bytes, self.catalog.cases(job.kernel).bytes_moved(job.case))
        return CudaTimer(calls, cold, cache, touched)


def _identical(a: Any, b: Any) -> bool:
    """Whether all tensors are equal, number by number and without NaN: then large ones need not leave the device."""
    pairs = list(zip(tensors_in(a), tensors_in(b), strict=True))
    return bool(pairs) and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def _available_ram() -> int:
    with open("/proc/meminfo") as f:
        kib = next(line.split()[1] for line in f if line.startswith("MemAvailable"))
    return int(kib) << 10
