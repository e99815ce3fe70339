"""On a GPU: the timer against Triton's own, cache states, uncapturable calls, clocks, and the suite's promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch

from draftwood.bench.makers import COMPILED, find_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def timers():
    from draftwood.bench import timers

    return timers


@pytest.fixture(scope="module")
def l2():
    return torch.cuda.get_device_properties(0).L2_cache_size


def copies_of(source):
    def calls(n):
        pairs = [(source.clone(), torch.empty_like(source)) for _ in range(n)]
        return [lambda p=pair: p[1].copy_(p[0]) for pair in pairs]

    return calls


def test_a_large_cold_copy_takes_as_long_as_triton_says(timers, l2):
    from triton.testing import do_bench

    source = torch.randn(l2, device="cuda")  # four times the L2
    timer = timers.CudaTimer(copies_of(source), True, l2, source.nbytes)
    ours = sorted(timer.time(15))[7]
    target = torch.empty_like(source)
    theirs = do_bench(lambda: target.copy_(source), return_mode="median") * 1e3
    assert ours == pytest.approx(theirs, rel=0.05)
    assert timer.setup.launch_us > 0


def test_cold_is_slower_than_warm_for_data_that_fits_the_cache(timers, l2):
    source = torch.randn(l2 // 4 // 8, device="cuda")  # an eighth of the L2
    cold, warm = (timers.CudaTimer(copies_of(source), c, l2, source.nbytes) for c in (True, False))
    assert "copies" in cold.setup.method
    assert warm.setup.method == "graph of calls"
    assert sorted(cold.time(9))[4] > 1.1 * sorted(warm.time(9))[4]


def test_tiny_cold_inputs_are_flushed(timers, l2):
    timer = timers.CudaTimer(copies_of(torch.randn(16, device="cuda")), True, l2, 64)
    assert timer.setup.method == "graph after a flush"
    assert 0 < sorted(timer.time(9))[4] < 100


def test_a_call_that_waits_is_timed_without_a_graph_and_says_so(timers, l2):
    x = torch.randn(1000, device="cuda")
    timer = timers.CudaTimer(lambda n: [lambda: x.sum().item()] * n, False, l2, x.nbytes)
    assert timer.setup.method == "events, not capturable"
    assert min(timer.time(5)) > 0
    torch.randn(4, device="cuda")  # and torch's generator still works


def test_facts_ceilings_and_clock():
    from draftwood.bench import device

    facts = device.describe("cuda")
    assert facts["capability"]
    assert not str(facts["clock_reader"]).startswith("none")
    assert device.clock_reader("cuda").read()["clock_mhz"] > 0
    ceilings = device.measure_ceilings("cuda", {"bfloat16", "float32"})
    assert ceilings.cache_gbps > ceilings.memory_gbps > 100
    assert ceilings.tflops["bfloat16"] > ceilings.tflops["float32"] > 1


def test_an_illegal_access_costs_one_case(tmp_path):
    faults = tmp_path / "faults.py"
    faults.write_text(
        "from pathlib import Path\n"
        f"exec(Path({str(__file__)!r}).with_name('faults.py').read_text())\n"
        "def illegal(x):\n"
        "    import torch\n"
        "    index = torch.full((4,), 1 << 40, device=x.device)\n"
        "    return x[index] * 2\n"
        "def quick(x):\n"
        "    return x * 2\n"
        "IMPLEMENTATIONS = {'ref': ref, 'torch': quick, 'illegal': illegal}\n"
    )
    out = tmp_path / "run.jsonl"
    command = [
        sys.executable,
        "-m",
        "draftwood.bench",
        "kernels",
        "--extra-module",
        str(faults),
        "--only",
        "double",
    ]
    done = subprocess.run(
        [*command, "--budget", "60", "--impl", "illegal,torch", "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    status = {(r["impl"], r["case"]["n"]): r["status"] for r in rows if r["type"] == "row"}
    assert done.returncode == 3, done.stderr
    assert all(s == "crash" for (impl, _), s in status.items() if impl == "illegal")
    assert all(s == "ok" for (impl, _), s in status.items() if impl == "torch"), status


def rows_of(out, *options, **environment):
    """Rows of a run, and the seconds that the whole command took."""
    command = [sys.executable, "-m", "draftwood.bench", "kernels", "--out", str(out), *options]
    start = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    seconds = time.monotonic() - start
    assert done.returncode in (0, 3, 4), done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return [line for line in lines if line["type"] == "row"], seconds


def test_the_driver_names_the_chip_without_opening_it():
    properties = torch.cuda.get_device_properties(0)
    capability = 10 * properties.major + properties.minor
    assert find_gpu() == (capability, properties.multi_processor_count)


def test_launches_find_what_makers_compiled(tmp_path):
    """With an empty cache the worker itself compiles nothing: the makers' keys are those of real launches."""
    options = ("--only", "tree_accept,commit_kv,verify_attn,moe", "--limit", "1", "--budget", "120", "--once")
    rows, _ = rows_of(tmp_path / "run.jsonl", *options, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    compiled = [r for r in rows if r["impl"] in COMPILED]
    assert len(compiled) == 4
    assert all(r["n"] == 1 for r in compiled), compiled
    assert sum(r["compile_s"] for r in compiled) > 1
    assert [r["compiled_late"] for r in compiled] == [0] * 4


@pytest.mark.slow
def test_the_default_suite_keeps_its_promises(tmp_path):
    """30 s with a warm compile cache, of the whole command; at least 90 % of the rows ok."""
    rows_of(tmp_path / "cold.jsonl", "--budget", "180", "--once")
    rows, seconds = rows_of(tmp_path / "run.jsonl")
    assert seconds <= 30.5
    statuses = [r["status"] for r in rows]
    assert len(statuses) >= 27
    assert statuses.count("ok") >= 0.9 * len(statuses), Counter((r["kernel"], r["status"]) for r in rows)
    assert sum(r.get("compiled_late", 0) for r in rows) == 0
