"""What the machine is, how fast it can be, and how it is doing: names, ceilings, clocks. Observes, never sets."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from draftwood.bench.store import commit
from draftwood.bench.work import Ceilings

_REPEAT = 50

_THROTTLE = {  # NVML's clock-event reasons that slow a chip down under load
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


class ClockReader(Protocol):
    def read(self) -> dict[str, Any]:
        """{} where nothing is known, else clock_mhz, and throttle: reasons at this moment."""
        ...

    def describe(self) -> dict[str, Any]: ...


def describe(device: str) -> dict[str, Any]:
    """Facts for the header of a run."""
    facts: dict[str, Any] = {
        "kind": device,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "cpu": cpu_name(),
        "cache_bytes": last_level_cache(device),
    }
    if device == "cpu":
        return {**facts, "name": cpu_name(), "memory_bytes": _available_ram()}
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return {
        **facts,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": free,
        "shared_by_others": total - free > 2 << 30,
        "cuda": torch.version.cuda,
        **clock_reader(device).describe(),
    }


def origin(device: str) -> dict[str, Any]:
    """Where a result comes from that is stored by itself, not in a run."""
    return {"device": describe(device), "torch": str(torch.__version__), "commit": commit()}


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} x{os.cpu_count()}"


def last_level_cache(device: str) -> int:
    """Bytes of the GPU's L2, or of the CPU's largest cache (32 MiB where the system does not say)."""
    if device != "cpu":
        return int(torch.cuda.get_device_properties(0).L2_cache_size)
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(s[:-1]) << {"K": 10, "M": 20}[s[-1]] for s in sizes if s[-1] in "KM"), default=32 << 20)


def _available_ram() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure_ceilings(device: str, dtypes: set[str]) -> Ceilings:
    """A copy of 8 caches, reads and copies within the cache, a matrix product per dtype on random data: the best of each."""
    cache = last_level_cache(device)
    gpu = device != "cpu"
    clock = _best_on_gpu if gpu else _best_on_cpu
    large = torch.ones(max(8 * cache, 1 << 30) // 4 if gpu else cache, dtype=torch.float32, device=device)
    target = torch.empty_like(large)
    memory = 2 * large.nbytes / clock(lambda: target.copy_(large), 8)
    size = cache // 16 if gpu else 32 << 10  # floats: a quarter of an L2, the size of a core's cache
    small, copy = large[:size], target[:size]
    within = max(
        small.nbytes * times * _REPEAT / clock(_repeated(work, gpu), 5)
        for times, work in ((1, small.sum), (2, lambda: torch.mul(small, 2.0, out=copy)))
    )
    names = dtypes if gpu else {_cpu_arithmetic(name) for name in dtypes}
    rates = {name: _matmul_rate(device, name, clock) / 1e12 for name in sorted(names)}
    tflops = {name: rates[name if gpu else _cpu_arithmetic(name)] for name in sorted(dtypes)}
    return Ceilings(memory / 1e9, max(within, memory) / 1e9, cache, tflops)


def _repeated(work: Callable[[], Any], gpu: bool) -> Callable[[], Any]:
    """`_REPEAT` times the work, without gaps: as a graph on a GPU."""

    def loop() -> None:
        for _ in range(_REPEAT):
            work()

    if not gpu:
        return loop
    loop()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop()
    return graph.replay


def _cpu_arithmetic(dtype: str) -> str:
    """A CPU without 16-bit arithmetic multiplies 16-bit matrices a hundred times slower than their float32 copies."""
    return "float64" if dtype == "float64" else "float32"


def _matmul_rate(device: str, dtype: str, clock: Callable[[Callable[[], Any], int], float]) -> float:
    sizes = {"bfloat16": 8192, "float16": 8192, "float32": 4096, "float64": 4096}
    n = sizes[dtype] if device != "cpu" else 768
    a, b = (torch.randn(n, n, device=device).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / clock(lambda: torch.matmul(a, b, out=out), 5)


def _best_on_gpu(work: Callable[[], Any], times: int) -> float:
    """Shortest seconds of `times` runs, the first two not counted."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 3)]
    for event in events:
        event.record()
        work()
    torch.cuda.synchronize()
    return float(min(a.elapsed_time(b) for a, b in pairwise(events[2:]))) / 1e3


def _best_on_cpu(work: Callable[[], Any], times: int) -> float:
    best = float("inf")
    for _ in range(times + 2):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


class NoClock:
    """Where no clock can be read: on a CPU, whose governor shows a virtual machine nothing."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason

    def read(self) -> dict[str, Any]:
        return {}

    def describe(self) -> dict[str, Any]:
        return {"clock_reader": f"none: {self.reason}"} if self.reason else {}


class NvmlClock:
    """Through `nvidia-ml-py`, a fraction of a millisecond per reading."""

    def __init__(self, nvml: Any) -> None:
        nvml.nvmlInit()
        self.nvml = nvml
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        self.handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")

    def read(self) -> dict[str, Any]:
        reasons = self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle)
        return {
            "clock_mhz": self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM),
            "throttle": [name for bit, name in _THROTTLE.items() if reasons & bit],
        }

    def describe(self) -> dict[str, Any]:
        nvml, handle = self.nvml, self.handle
        return {
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "clock_reader": "nvml",
            "clock_max_mhz": nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        }


class SmiClock:
    """Through `nvidia-smi`, too slow to ask at every visit: one reading serves for two seconds."""

    FIELDS = "clocks.sm,clocks.max.sm,temperature.gpu,power.draw,driver_version"

    def __init__(self) -> None:
        self.last: tuple[float, list[str]] = (-1e9, [])

    def read(self) -> dict[str, Any]:
        return {"clock_mhz": float(self._query()[0]), "throttle": []}

    def describe(self) -> dict[str, Any]:
        _, most, temperature, power, driver = self._query()
        return {
            "driver": driver,
            "clock_reader": "nvidia-smi",
            "clock_max_mhz": float(most),
            "temperature_c": float(temperature),
            "power_w": float(power),
        }

    def _query(self) -> list[str]:
        if time.monotonic() - self.last[0] > 2:
            uuid = str(torch.cuda.get_device_properties(0).uuid)
            command = [
                "nvidia-smi",
                f"--id=GPU-{uuid}",
                f"--query-gpu={self.FIELDS}",
                "--format=csv,noheader,nounits",
            ]
            out = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
            self.last = (time.monotonic(), [v.strip() for v in out.split(",")])
        return self.last[1]


def clock_reader(device: str) -> ClockReader:
    """The reader this machine allows; where none works, one that says why in the run's header."""
    if device == "cpu":
        return NoClock()
    try:
        import pynvml  # type: ignore[import-not-found]
    except ImportError as e:
        nvml_reason = str(e)
    else:
        try:
            return NvmlClock(pynvml)
        except pynvml.NVMLError as e:
            nvml_reason = str(e)
    smi = SmiClock()
    try:
        smi.read()
    except (OSError, subprocess.SubprocessError, ValueError) as e:
        return NoClock(f"NVML: {nvml_reason}; nvidia-smi: {e}")
    return smi
