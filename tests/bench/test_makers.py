"""Makers: inputs arrive whole, kernels are in Triton's cache under the keys of the launches, crashes cost one case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from draftwood.bench.catalog import Catalog, Job
from draftwood.bench.inputs import Packed, generate, hollow, on_device, size_of, tensors_in
from draftwood.bench.makers import Makers
from draftwood.kernels.case import CaseError
from draftwood.kernels.run_case import cases_of

H200 = (90, 132)

EXTRA = """
import os, time
import numpy as np
from draftwood.kernels.case import CaseError, make_case
KERNEL = "odd"
DEFAULTS = {"kind": "fine"}
FLOATS = ()
CACHE = "warm"
def case(kind): return make_case(KERNEL, DEFAULTS, kind=kind)
def small(): return [case("fine")]
bench = small
def make(case):
    if case["kind"] == "dies": os._exit(1)
    if case["kind"] == "hangs": time.sleep(600)
    return {"x": np.arange(5), "size": 7}
def check(case, inputs):
    if case["kind"] == "unsound": raise CaseError("`x`: not sound")
IMPLEMENTATIONS = {}
"""


@pytest.fixture
def extra(tmp_path):
    path = tmp_path / "odd.py"
    path.write_text(EXTRA)
    return path


def wait_until_ready(makers, case, seconds=60):
    end = time.monotonic() + seconds
    while not makers.ready(case, 0.5):
        assert time.monotonic() < end


def odd(extra, *kinds):
    module = Catalog.of_files((), (extra,)).extra["odd"]
    cases = [module.case(kind) for kind in kinds]
    return Makers(((), (extra,)), H200, cases, {}), cases


def test_inputs_arrive_whole_in_the_dtype_of_the_case():
    case = next(c for c in cases_of("verify_attn").small() if c["dtype"] == "bfloat16")
    _, tensors = generate(Catalog(), case)
    makers = Makers(((), ()), H200, [case], {})
    wait_until_ready(makers, case)
    packed, _ = makers.take(case)
    arrived = packed.unpack()
    assert arrived.keys() == tensors.keys()
    assert arrived["q"].dtype == torch.bfloat16
    assert arrived["scale"] == tensors["scale"]
    for got, want in zip(tensors_in(arrived), tensors_in(tensors), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_a_packed_value_keeps_its_structure_and_empty_tensors():
    value = {"tree": (torch.empty(0, 3), torch.arange(5, dtype=torch.int16)), "k": 3, "none": None}
    memory = Packed.of(value)
    got = memory.unpack()
    assert got["tree"][0].shape == (0, 3)
    assert got["tree"][1].tolist() == [0, 1, 2, 3, 4]
    assert (got["k"], got["none"]) == (3, None)


def test_unsound_inputs_are_named_and_a_crash_leaves_the_case_to_the_worker(extra):
    makers, (dies, unsound, fine) = odd(extra, "dies", "unsound", "fine")
    wait_until_ready(makers, dies)
    assert makers.take(dies) is None
    wait_until_ready(makers, unsound)
    with pytest.raises(CaseError, match="not sound"):
        makers.take(unsound)
    wait_until_ready(makers, fine)
    np.testing.assert_array_equal(makers.take(fine)[0].unpack()["x"], np.arange(5))


def test_a_hanging_maker_delays_no_other_case(extra, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    makers, (hangs, fine) = odd(extra, "hangs", "fine")
    wait_until_ready(makers, fine)
    assert not makers.ready(hangs, 0.0)
    for process in makers._pool._processes.values():
        process.kill()


HANGS = """
import sys
from pathlib import Path
from draftwood.bench.catalog import Catalog
from draftwood.bench.makers import Makers

if __name__ == "__main__":
    files = ((), (Path(sys.argv[1]),))
    makers = Makers(files, (90, 132), [Catalog.of_files(*files).extra["odd"].case("hangs")], {})
    print(*makers._pool._processes, flush=True)
    sys.stdin.read()
"""


def test_makers_end_with_their_worker_even_when_it_is_killed(extra):
    script = extra.with_name("hangs.py")
    script.write_text(HANGS)
    command = [sys.executable, str(script), str(extra)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        maker = Path(f"/proc/{worker.stdout.readline().split()[0]}/stat")
        assert maker.exists()
        time.sleep(5)  # until it hangs
        worker.kill()
    end = time.monotonic() + 5
    while maker.exists() and maker.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)


LOOKS_UP = """
import json, sys
from triton import knobs
from draftwood.bench import makers
from draftwood.bench.inputs import generate
from draftwood.bench.catalog import Catalog, Job
from draftwood.kernels.run_case import cases_of

if __name__ == "__main__":
    hits = []
    knobs.compilation.listener = lambda *, cache_hit, **facts: hits.append(cache_hit)
    makers._begin(((), ()), (90, int(sys.argv[2])))
    cases = {str(case): case for case in cases_of(sys.argv[1]).small()}
    Catalog().load(sys.argv[1], sys.argv[4])(**generate(Catalog(), cases[sys.argv[3]])[1])
    print(json.dumps(hits))
"""


def hits(kernel, n_sms, case, impl):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", LOOKS_UP, kernel, str(n_sms), str(case), impl]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("impl", ["triton", pytest.param("gluon", marks=pytest.mark.slow)])
def test_what_makers_compile_another_process_finds_in_the_cache(impl, tmp_path, monkeypatch):
    """For the chip that they were told of: with other multiprocessors verify_attn is another program."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = next(c for c in cases_of("verify_attn").small() if c["dtype"] == "bfloat16" and c["R"] == 512)
    makers = Makers(((), ()), H200, [case], {case: [impl]})
    wait_until_ready(makers, case, seconds=200)
    _, seconds = makers.take(case)
    assert seconds[impl] > 0.1
    assert list(tmp_path.rglob("*.cubin"))
    found = hits("verify_attn", H200[1], case, impl)
    assert found
    assert all(found)
    assert not all(hits("verify_attn", 16, case, impl))


@pytest.mark.parametrize("kernel", ["commit_kv", "sample", "verify_attn"])
def test_the_workbench_takes_what_makers_made(kernel):
    """The whole way: packed, unpacked, checked against the reference, timed."""
    from draftwood.bench.workbench import Workbench

    job = Job(cases_of(kernel).small()[0], "torch", "warm")
    makers = Makers(((), ()), H200, [job.case], {})
    bench = Workbench(Catalog(), "cpu", [job], makers)
    end = time.monotonic() + 60
    while not bench.has_inputs(job.case, 0.5):
        assert time.monotonic() < end
    assert bench.prepare(job, gate=True)["checked"] == "ref"
    assert min(bench.sample(job, 3)) > 0
    assert bench.has_inputs(job.case, 0.0)


def test_large_inputs_stay_in_parts_until_they_are_on_the_device():
    case = next(c for c in cases_of("draft_attn").bench() if c["context"] == 4096 and c["B"] == 8)
    arrays, tensors = generate(Catalog(), case)
    moved = on_device({k: tensors[k] for k in ("k_pages", "q")}, "cpu")
    np.testing.assert_array_equal(moved["k_pages"].float().numpy(), np.asarray(arrays["k_pages"]))
    assert moved["q"] is tensors["q"]
    assert size_of(tensors) > 2 * moved["k_pages"].nbytes
    assert sum(t.nbytes for t in tensors_in(tensors)) < 0.6 * size_of(tensors)
    assert hollow(tensors)["v_pages"].shape == moved["k_pages"].shape
