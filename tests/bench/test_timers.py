"""How the timers arrange calls: blocks on a CPU; graphs, copies and flushes on a pretended GPU with its own clock."""

from __future__ import annotations

import weakref
from contextlib import contextmanager

import pytest
import torch

from draftwood.bench import timers
from draftwood.bench.timers import CpuTimer, CudaTimer

L2 = 60 << 20


class FakeGpu:
    """Time passes on this device only by the calls made on it."""

    def __init__(self):
        self.now_us = 0.0
        self.capturing = None
        self.flushes = 0

    def call(self, us, log=None, waits=False):
        def run():
            if waits and (self.strict or self.capturing is not None):
                raise RuntimeError("called a synchronizing CUDA operation")
            if self.capturing is not None:
                self.capturing.append(run)
                return
            self.now_us += us
            if log is not None:
                log.append(run)

        return run

    strict = False

    def install(self, monkeypatch):
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = gpu.now_us

            def elapsed_time(self, end):
                return (end.at - self.at) / 1e3

        class Graph:
            def __init__(self):
                self.calls = []

            def replay(self):
                for call in self.calls:
                    call()()  # None: a graph keeps nothing alive, so its inputs are gone

        @contextmanager
        def graph(g, capture_error_mode):
            gpu.capturing = []
            yield
            g.calls, gpu.capturing = [weakref.ref(call) for call in gpu.capturing], None

        class Flush:
            def sum(self):
                gpu.flushes += 1
                gpu.now_us += 30.0

        def set_mode(mode):
            gpu.strict = mode == "error"

        fakes = {"Event": Event, "CUDAGraph": Graph, "graph": graph, "synchronize": lambda: None}
        for name, fake in {**fakes, "set_sync_debug_mode": set_mode}.items():
            monkeypatch.setattr(timers.torch.cuda, name, fake)
        monkeypatch.setattr(timers.torch, "zeros", lambda n, dtype, device: Flush())
        return self


@pytest.fixture
def gpu(monkeypatch):
    return FakeGpu().install(monkeypatch)


def test_warm_calls_fill_a_millisecond_on_the_same_inputs(gpu):
    timer = CudaTimer(lambda n: [gpu.call(10.0)] * n, False, L2, 1000)
    assert timer.setup.method == "graph of calls"
    assert timer.setup.calls == 100
    assert timer.time(3) == pytest.approx([10.0] * 3)
    assert gpu.flushes == 0


def test_long_calls_stand_alone(gpu):
    timer = CudaTimer(lambda n: [gpu.call(5000.0)] * n, False, L2, 1000)
    assert (timer.setup.calls, timer.setup.method) == (1, "graph")
    assert timer.time(2) == pytest.approx([5000.0] * 2)


def test_cold_calls_take_turns_on_copies_beyond_the_cache(gpu):
    log, made = [], []

    def calls(n):
        made.append(n)
        return [gpu.call(20.0, log) for _ in range(n)]

    timer = CudaTimer(calls, True, L2, 10 << 20)
    assert timer.setup.method == "graph over 12 copies"
    assert made[-1] == 12  # twice the L2
    assert timer.setup.calls % 12 == 0
    assert timer.setup.calls * 20 >= 900
    del log[:]
    timer.run()
    assert len({id(run) for run in log}) == 12
    assert all(log[i] is log[i + 12] for i in range(len(log) - 12))


@pytest.mark.parametrize(
    ("touched", "copies", "method"),
    [(3 * L2, 2, "graph over 2 copies"), (4 * L2, 1, "graph of calls"), (100 * L2, 1, "graph of calls")],
)
def test_inputs_larger_than_the_cache_alternate_unless_they_flush_it_themselves(gpu, touched, copies, method):
    made = []

    def calls(n):
        made.append(n)
        return [gpu.call(300.0) for _ in range(n)]

    timer = CudaTimer(calls, True, L2, touched)
    assert (made[-1], timer.setup.method, timer.setup.calls) == (copies, method, 3 if copies == 1 else 4)
    assert timer.time(2) == pytest.approx([300.0] * 2)
    assert gpu.flushes == 0


@pytest.mark.parametrize(("size", "us"), [(64, 5.0), (1 << 20, 2000.0)])
def test_too_many_or_too_long_copies_are_flushed_instead(gpu, size, us):
    timer = CudaTimer(lambda n: [gpu.call(us)] * n, True, L2, size)
    assert timer.setup.method == "graph after a flush"
    assert timer.time(4) == pytest.approx([us] * 4)  # the flush is not in the timing
    assert gpu.flushes == 4


@pytest.mark.parametrize("cold", [False, True])
def test_a_call_that_waits_is_not_captured(gpu, cold):
    timer = CudaTimer(lambda n: [gpu.call(40.0, waits=True)] * n, cold, L2, 1000)
    assert timer.setup.method == "events, not capturable" + (" after a flush" if cold else "")
    assert timer.setup.calls == 1
    assert timer.time(2) == pytest.approx([40.0] * 2)
    assert not gpu.strict


def test_an_error_of_the_kernel_is_not_taken_for_waiting(gpu):
    def fails():
        raise RuntimeError("no such tile")

    with pytest.raises(RuntimeError, match="no such tile"):
        CudaTimer(lambda n: [fails] * n, False, L2, 1000)


def test_cpu_blocks_last_a_millisecond():
    x = torch.ones(64)
    timer = CpuTimer(lambda: x + 1, cold=False, flush_bytes=0)
    assert timer.setup.calls * timer.setup.estimate_us >= 1000
    assert len(timer.time(3)) == 3
    assert all(t > 0 for t in timer.time(3))


def test_cold_cpu_calls_are_timed_one_by_one():
    x = torch.ones(64)
    timer = CpuTimer(lambda: x + 1, cold=True, flush_bytes=1 << 20)
    assert timer.setup.calls == 1
    assert all(t > 0 for t in timer.time(3))
