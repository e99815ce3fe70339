"""Planted faults, through the real command and the real worker: each costs its own case and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

FAULTS = str(Path(__file__).with_name("faults.py"))
BENCH = (sys.executable, "-m", "draftwood.bench")


def kernels(*options, **popen):
    command = [*BENCH, "kernels", "--device", "cpu", "--extra-module", FAULTS, "--only", "double", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen)


def finish(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def lines(path, kind="row"):
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [e for e in entries if e["type"] == kind]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """One run with every fault; hangs are given one second."""
    out = tmp_path_factory.mktemp("bench") / "run.jsonl"
    impls = "ref,torch,hang,segfault,wrong,unwritten,bimodal,grows,raises,unsupported"
    start = time.monotonic()
    options = ("--suite", "bench", "--impl", impls, "--budget", "60", "--case-limit", "1", "--out", str(out))
    code, stdout, stderr = finish(kernels(*options, "--target", "5"))
    seconds = time.monotonic() - start
    return {"code": code, "stdout": stdout, "stderr": stderr, "path": out, "seconds": seconds}


def rows_of(faulty, impl):
    return sorted((r for r in lines(faulty["path"]) if r["impl"] == impl), key=lambda r: r["case"]["n"])


def test_every_case_has_one_row_and_the_run_fails(faulty):
    rows = lines(faulty["path"])
    assert len(rows) == 30, faulty["stderr"]
    assert faulty["code"] == 3
    assert lines(faulty["path"], "end")[0]["promised_s"] == 60


def test_within_the_budget(faulty):
    assert faulty["seconds"] <= 1.1 * 60
    assert lines(faulty["path"], "end")[0]["used_s"] <= faulty["seconds"]


@pytest.mark.parametrize(("impl", "status"), [("hang", "timeout"), ("segfault", "crash")])
def test_a_lost_worker_costs_its_case_and_two_skip_the_rest(faulty, impl, status):
    first, second, third = rows_of(faulty, impl)
    assert first["status"] == second["status"] == status
    assert "not tried after 2" in third["note"]
    assert third["status"] == status
    assert all(r["median_us"] is None and r["n"] == 0 for r in (first, second, third))
    if impl == "segfault":
        assert "SIGSEGV" in first["note"]
        assert "faults.py" in first["note"]  # the last words of the process


@pytest.mark.parametrize(
    ("impl", "status", "note"),
    [
        ("wrong", "wrong", "`out`"),
        ("unwritten", "wrong", "nan"),
        ("raises", "crash", "no such tile"),
        ("unsupported", "skipped", "odd sizes"),
    ],
)
def test_no_time_without_a_right_output(faulty, impl, status, note):
    rows = rows_of(faulty, impl)
    assert {r["status"] for r in rows} == {status}
    assert all(note in r["note"] and r["median_us"] is None for r in rows)


def test_bimodal_is_noisy(faulty):
    for row in rows_of(faulty, "bimodal"):
        assert row["status"] in ("noisy", "budget")
        assert row["high_us"] - row["low_us"] > 0.2 * 2 * row["median_us"]


def test_a_dear_case_does_not_starve_the_others(faulty):
    *cheap, dear = rows_of(faulty, "grows")
    assert dear["case"]["n"] == 4000
    assert dear["median_us"] >= 300_000
    assert all(r["n"] >= 6 for r in cheap)


def test_sound_rows_are_complete(faulty):
    header = lines(faulty["path"], "run")[0]
    assert header["ceilings"]["memory_gbps"] > 0
    fields = [
        "kernel",
        "impl",
        "case",
        "status",
        "median_us",
        "low_us",
        "high_us",
        "n",
        "bytes",
        "flops",
        "gbps",
        "tflops",
        "ceiling_share",
        "cache",
        "device",
        "python",
        "torch",
        "triton",
        "commit",
        "fingerprint",
        "binds",
        "calls",
        "method",
        "checked",
        "timings_us",
        "note",
        "launch_us",
    ]
    for row in rows_of(faulty, "torch"):
        assert set(fields) <= row.keys()
        assert row["low_us"] <= row["median_us"] <= row["high_us"]
        assert row["n"] == len(row["timings_us"]) >= 6
        assert row["bytes"] == 8 * row["case"]["n"]
        assert row["gbps"] == pytest.approx(row["bytes"] / row["median_us"] / 1e3)
        assert row["median_us"] > 200  # it spins for that long


def test_the_table_comes_last_and_is_short(faulty):
    shown = faulty["stdout"].splitlines()
    assert len(shown) <= 60
    assert "of 60 s" in shown[-1]
    assert any("SIGSEGV" in line for line in shown)


def test_inputs_that_break_the_contract_are_never_launched(tmp_path):
    out = tmp_path / "run.jsonl"
    options = ("-a", "broken=0,1", "-a", "n=64", "--impl", "torch", "--once", "--out", str(out))
    code, _, _ = finish(kernels(*options, "--budget", "20"))
    sound, broken = sorted(lines(out), key=lambda r: r["case"]["broken"])
    assert code == 3
    assert sound["n"] == 1
    assert broken["status"] == "invalid"
    assert "`x` element [3]" in broken["note"]


# Every peer that runs spins for 100 us: one too quick would be suspect wherever the measured memory ceiling comes out low.
PEERS = {
    "same": "def run(x):\n    spin()\n    return x + x",
    "built": (
        "def build(case, inputs):\n    assert case['n'] == len(inputs['x'])\n"
        "    return lambda: (spin(), inputs['x'] * 2)[1]"
    ),
    "lying": "def run(x):\n    spin()\n    return x",
    "other": "MASK = 'causal'\ndef run(x):\n    spin()\n    return x",
    "narrow": "def run(x):\n    raise NotImplementedError('n must be a multiple of 64')",
}
SPIN = """
from time import perf_counter

def spin():
    end = perf_counter() + 100e-6
    while perf_counter() < end:
        pass
"""


def test_peers_are_measured_beside_ours_and_checked_like_ours(tmp_path):
    options = []
    for name, body in PEERS.items():
        path = tmp_path / f"{name}.py"
        path.write_text(f"KERNEL = 'double'\nNAME = '{name}'\n{SPIN}\n{body}\n")
        options += ["--peer", str(path)]
    impls = ",".join(["torch", *(f"peer:{name}" for name in PEERS)])
    options += ["--impl", impls, "-a", "n=1000", "--suite", "bench", "--target", "50", "--budget", "20"]
    out = tmp_path / "run.jsonl"
    code, stdout, stderr = finish(kernels(*options, "--vs", "torch", "--out", str(out)))
    assert code == 3, stderr
    status = {r["impl"]: r["status"] for r in lines(out)}
    assert status == {
        "torch": "ok",
        "peer:same": "ok",
        "peer:built": "ok",
        "peer:lying": "wrong",
        "peer:other": "unchecked",
        "peer:narrow": "skipped",
    }
    verdicts = {v["impl"]: v["verdict"] for v in lines(out, "versus")}
    assert verdicts["peer:same"] == "faster"  # ours spins for 200 us
    assert "peer:same is faster than torch" in stdout


def test_killed_in_mid_run_then_resumed(tmp_path):
    out = tmp_path / "run.jsonl"
    options = (
        "--suite",
        "bench",
        "--impl",
        "ref,grows",
        "--budget",
        "20",
        "--target",
        "50",
        "--out",
        str(out),
    )
    process = kernels(*options)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not out.exists() or len(lines_so_far(out)) < 2):
        time.sleep(0.02)
    process.kill()
    process.communicate()
    with out.open("a") as f:
        f.write('{"type": "row", "kernel": "dou')  # as if killed while writing
    before = lines_so_far(out)
    assert before

    code, _, stderr = finish(kernels(*options[:-2], "--resume", str(out)))
    assert code == 0, stderr
    kept = {json.dumps(r, sort_keys=True) for r in before if r["status"] == "ok"}
    assert kept
    after = lines(out)
    assert kept <= {json.dumps(r, sort_keys=True) for r in after}
    assert f"{len(kept)} of 6 rows are still valid" in stderr
    keys = [(r["impl"], r["case"]["n"]) for r in after if r["status"] == "ok"]
    assert sorted(keys) == sorted(set(keys))  # none measured twice
    assert len(keys) == 6


def lines_so_far(path):
    found = []
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            break
        found += [entry] if entry["type"] == "row" else []
    return found
