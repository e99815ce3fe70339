"""Kernels compile without a GPU and without a launch, several threads at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
import triton
from triton.backends.compiler import GPUTarget
from draftwood.bench.compiling import compile_only, interruptible_launches
from draftwood.kernels.registry import load
from draftwood.kernels.run_case import cases_of, torch_inputs

class NoDevice:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

triton.runtime.driver.set_active(NoDevice())
cases = cases_of("commit_kv")
function = load("commit_kv", "triton")
inputs = [torch_inputs(c, cases.make(c), "cpu") for c in cases.small()[:5:2]]
before = [i["pages"].clone() for i in inputs]
with interruptible_launches(), ThreadPoolExecutor(3) as pool:
    seconds = list(pool.map(lambda i: compile_only(function, i), inputs))
    again = compile_only(function, inputs[0])
unchanged = all(bool((b == i["pages"]).all()) for b, i in zip(before, inputs))
print(json.dumps({"first": seconds[0], "again": again, "unchanged": unchanged}))
"""


def test_compiles_without_a_gpu(tmp_path):
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert list(tmp_path.rglob("*.cubin"))
    assert facts["unchanged"]
    assert facts["again"] < facts["first"] / 5
