"""How one call is timed, on a CPU and on a GPU. A timer knows the calls it is given and nothing about kernels.

A timing is microseconds per call. On a CPU: a block of calls of at least a millisecond, or one call after the caches
were flushed. On a GPU: a CUDA graph between two events; calls are repeated inside the graph up to a millisecond (warm: on the same
inputs; cold: in turns on copies, until what they touch exceeds the L2 twice, or on the same inputs where one call touches four
times the L2). Where copies would be too many, or a call cannot be captured, a cold call runs alone after a flush.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from draftwood.bench.planner import WARM_UP_US

Call = Callable[[], Any]

BLOCK_US = 1000.0
MOST_COPIES = 512
MOST_CALLS = 1000
LONGEST_GRAPH_US = 50_000.0
PROBE_S = 0.1


@dataclass(frozen=True)
class Setup:
    """What a timer found out before its first timing."""

    estimate_us: float
    calls: int  # per timing
    method: str
    first_s: float  # the first call, compiling included
    launch_us: float | None = None  # host time to launch one call; None on a CPU


class Timer(Protocol):
    setup: Setup

    def time(self, n: int) -> list[float]:
        """n timings, after an untimed call unless calls are long."""
        ...


class CpuTimer:
    """Blocks of `perf_counter_ns`; `flush_bytes` of other memory are written before each call when cold."""

    def __init__(self, call: Call, cold: bool, flush_bytes: int) -> None:
        self.call = call
        self.flush = torch.empty(flush_bytes, dtype=torch.uint8) if cold else None
        first, estimate = _probe(call, lambda: None)
        calls = 1 if cold else max(1, round(BLOCK_US / estimate + 0.5))
        self.setup = Setup(estimate, calls, "one call after a flush" if cold else "block of calls", first)

    def time(self, n: int) -> list[float]:
        call, calls = self.call, range(self.setup.calls)
        if self.setup.estimate_us < WARM_UP_US:
            call()
        timings = []
        for _ in range(n):
            if self.flush is not None:
                self.flush.fill_(1)
            start = time.perf_counter_ns()
            for _ in calls:
                call()
            timings.append((time.perf_counter_ns() - start) / 1e3 / len(calls))
        return timings


class CudaTimer:
    """Graph replays between events. `calls(n)` gives n calls, each on its own copy of the inputs."""

    def __init__(
        self, calls: Callable[[int], Sequence[Call]], cold: bool, l2_bytes: int, touched_bytes: int
    ) -> None:
        (call,) = calls(1)
        first, _ = _probe(call, torch.cuda.synchronize)
        launch = _launch_us(call)
        self._calls = [call]  # a graph reads their inputs at every replay and keeps none of them alive
        self.run, per_run, method = call, 1, "events, not capturable"
        self.flush: torch.Tensor | None = None
        graph = _capture([call])
        if graph is not None:
            self.run, method = graph.replay, "graph"
        self.estimate = self._estimate()
        if graph is not None:
            copies = copies_of(touched_bytes, l2_bytes) if cold else 1
            rounds = max(1, round(BLOCK_US / (copies * self.estimate)))
            if copies * rounds > 1 and copies <= MOST_COPIES and copies * self.estimate < LONGEST_GRAPH_US:
                per_run = copies * min(rounds, max(1, MOST_CALLS // copies))
                self._calls = list(calls(copies))
                graph = _capture(self._calls * (per_run // copies))
                assert graph is not None
                self.run = graph.replay
                method = f"graph over {copies} copies" if copies > 1 else "graph of calls"
        self._graph = graph  # alive as long as it is replayed
        if cold and per_run == 1:
            self.flush = torch.zeros(2 * l2_bytes // 4, dtype=torch.int32, device="cuda")
            method += " after a flush"
        self.setup = Setup(self.estimate, per_run, method, first, launch)

    def time(self, n: int) -> list[float]:
        if self.estimate < WARM_UP_US:
            self.run()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(n)]
        for start, end in pairs:
            if self.flush is not None:
                self.flush.sum()  # read, not written: the timed call must not pay for writing dirty lines back
            start.record()
            self.run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 / self.setup.calls for start, end in pairs]

    def _estimate(self) -> float:
        """Microseconds of one run, the better of two."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        for event in events:
            event.record()
            self.run()
        torch.cuda.synchronize()
        return max(min(float(a.elapsed_time(b)) for a, b in pairwise(events)) * 1e3, 0.5)


def copies_of(touched_bytes: int, l2_bytes: int) -> int:
    """How many sets of inputs cold calls take turns on, until what they touch exceeds the L2 twice. Two at least, but one where
    a call by itself leaves nothing of its inputs in the cache."""
    if touched_bytes >= 4 * l2_bytes:
        return 1
    return max(2, -(-2 * l2_bytes // max(1, touched_bytes)))


def _probe(call: Call, wait: Callable[[], None]) -> tuple[float, float]:
    """Seconds of the first call, and microseconds of one of the next three (fewer where they take long)."""
    start = time.perf_counter()
    call()
    wait()
    first = time.perf_counter() - start
    rounds = 1 if first > 5 * PROBE_S else 3  # dear, unless it compiled: one more tells
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        wait()
        best = min(best, time.perf_counter() - start)
        if best > PROBE_S:
            break
    return first, max(best * 1e6, 0.05)


def _launch_us(call: Call) -> float:
    """Host time per call while the device is kept busy by the earlier ones."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    n = 0
    while n < 20 and (n == 0 or time.perf_counter() - start < PROBE_S / 4):
        call()
        n += 1
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / n * 1e6


def _capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph | None:
    """The calls as one graph, or None where they cannot be captured because they wait for the device."""
    torch.cuda.synchronize()
    if _waits(calls[0]):  # asked first: a capture that fails leaves torch's allocator in capture
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    torch.cuda.synchronize()
    return graph


def _waits(call: Call) -> bool:
    """Whether a call makes the host wait for the device, as `tolist()` does."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as e:
        if "synchroniz" not in str(e):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False
