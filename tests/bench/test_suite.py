"""Whole runs against a fake worker: budgets, losses of the worker, disks, interruptions, turns."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftwood.bench import store
from draftwood.bench.catalog import Catalog, Job
from draftwood.bench.countdown import Countdown
from draftwood.bench.state import Options
from draftwood.bench.suite import Suite
from draftwood.bench.supervisor import Worker

FAKE = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))
CATALOG = Catalog.of_files(extra=[Path(__file__).with_name("faults.py")])
CASES = CATALOG.cases("double").bench()


class Quiet:
    def __init__(self):
        self.warnings, self.plans = [], []

    def phase(self, name, total):
        pass

    def step(self, what, done):
        pass

    def warn(self, message):
        self.warnings.append(message)

    def plan(self, plan, states, left_s):
        self.plans.append(plan)


@pytest.fixture
def sources(monkeypatch):
    """Implementations that exist in the fake worker only have no source to hash."""
    monkeypatch.setattr(store, "fingerprint", lambda catalog, job, versions, device: job.id)


@pytest.fixture
def suite(tmp_path, sources):
    def make(*impls, budget=20.0, cases=CASES, out=None, **options):
        jobs = [Job(case, impl, "warm") for case in cases for impl in impls]
        return Suite(
            jobs,
            CATALOG,
            Options(device="cpu", budget_s=budget, **options),
            lambda jobs: Worker({"jobs": []}, FAKE),
            Countdown(budget, age_s=0.0),
            store.Store(out or tmp_path / "run.jsonl"),
            Quiet(),
        )

    return make


def statuses(run):
    return [r["status"] for r in run.rows]


def test_steady_cases_end_as_soon_as_they_are_certain(suite):
    run = suite("fast")
    assert run.run() == 0
    assert statuses(run) == ["ok"] * 3
    assert all(r["n"] == 7 for r in run.rows)
    assert run.countdown.used() < 5
    stored = store.read_run(run.out.path)
    assert stored.rows == run.rows
    assert stored.header["ceilings"]["memory_gbps"] == 100.0
    assert stored.end["promised_s"] == 20


@pytest.mark.parametrize("impl", ["silent", "stubborn"])
def test_a_hang_is_ended_whatever_it_does_with_signals(suite, impl):
    run = suite("fast", impl, cases=CASES[:1], case_limit_s=0.3)
    assert run.run() == 3
    assert sorted(statuses(run)) == ["ok", "timeout"]


def test_a_hang_cannot_break_the_budget(suite):
    run = suite("silent", budget=2.0, case_limit_s=60.0)
    run.run()
    assert run.countdown.used() <= 2.2
    assert statuses(run) == ["budget"] * 3


def test_what_is_still_being_compiled_lets_others_go_first(suite):
    run = suite("late", "fast", cases=CASES[:1])
    assert run.run() == 0
    assert statuses(run) == ["ok"] * 2


def test_a_compiler_that_hangs_costs_its_case_and_no_more_than_the_time_for_preparing(suite):
    run = suite("never", "fast", budget=4.0, cases=CASES[:1])
    assert run.run() == 4
    by_impl = {r["impl"]: r for r in run.rows}
    assert by_impl["fast"]["status"] == "ok"
    assert by_impl["never"]["status"] == "budget"
    assert "still being compiled" in by_impl["never"]["note"]
    assert run.countdown.used() <= 4.0


def test_last_words_and_two_strikes(suite):
    run = suite("dies", "fast")
    assert run.run() == 3
    dead = [r for r in run.rows if r["impl"] == "dies"]
    assert [r["status"] for r in dead] == ["crash"] * 3
    assert "exit code 7" in dead[0]["note"]
    assert "last words of the worker" in dead[0]["note"]
    assert "not tried" in dead[2]["note"]
    assert [r["status"] for r in run.rows if r["impl"] == "fast"] == ["ok"] * 3


def test_what_does_not_fit_is_left_out_and_named(suite):
    run = suite("fast", "dear", budget=4.0)
    assert run.run() == 4
    (plan,) = run.watcher.plans
    assert {p.key.split("/")[1] for lot in plan.left_out for p in lot} == {"dear"}
    assert all(r["status"] == "ok" for r in run.rows if r["impl"] == "fast")
    assert any(r["status"] == "budget" and "the minimum takes" in r["note"] for r in run.rows)
    assert run.countdown.used() <= 1.1 * 4.0


def test_plan_only_measures_and_stores_nothing(suite):
    run = suite("fast", plan_only=True)
    assert run.run() == 0
    assert not run.rows
    assert not run.out.path.exists()
    assert len(run.watcher.plans[0].fits) == 3


def test_once_is_one_timing_each(suite):
    run = suite("fast", once=True)
    assert run.run() == 0
    assert [(r["n"], len(r["timings_us"][0]), r["status"]) for r in run.rows] == [(1, 1, "low_n")] * 3


def test_a_full_disk_stops_nothing_and_is_reported(suite):
    run = suite("fast", out=Path("/dev/full"))
    assert run.run() == 0
    assert statuses(run) == ["ok"] * 3
    assert any("No space left" in w for w in run.watcher.warnings)
    assert len(run.out.pending) == 5  # header, three rows, end


def test_a_disk_that_fills_up_keeps_what_it_has(suite):
    run = suite("fast")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2500, before[1]))
    try:
        run.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    stored = store.read_run(run.out.path)
    assert run.out.error is not None
    assert 0 < len(stored.rows) < 3  # whole lines only
    run.out.append({"type": "note"})  # there is room again
    assert run.out.error is None
    assert store.read_run(run.out.path).rows == run.rows


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_closes_the_run_with_its_table(suite, sig):
    run = suite("fast", target=1e-9)
    steps = []

    def interrupt(what, done):
        steps.append(what)
        if len(steps) == 30:  # past preparing; all cases have been visited, none is done
            signal.raise_signal(sig)  # to this very thread, so that it is here before the next step

    run.watcher.step = interrupt
    assert run.run() == 4
    assert len(steps) == 30
    assert [(r["status"], r["note"]) for r in run.rows] == [("budget", "interrupted")] * 3
    assert all(r["n"] >= 6 for r in run.rows)
    assert store.read_run(run.out.path).rows == run.rows


def test_resume_measures_only_what_is_not_ok(suite, tmp_path):
    first = suite("fast")
    first.run()
    changed = [json.loads(line) for line in first.out.path.read_text().splitlines()]
    rows = [e for e in changed if e["type"] == "row"]
    rows[0]["status"] = "noisy"
    rows[1]["fingerprint"] = "other sources"
    first.out.path.write_text("".join(json.dumps(e) + "\n" for e in changed))
    again = suite("fast", resume=first.out.path)
    again.run()
    stored = store.read_run(first.out.path)
    assert len(stored.rows) == 3
    assert len(stored.headers) == 2
    kept = [r for r in again.rows if r in rows]
    assert kept == [rows[2]]
    assert all(r["status"] == "ok" for r in stored.rows)


def test_resume_keeps_of_a_comparison_all_or_nothing(suite):
    first = suite("half", "fast", vs="fast")
    first.run()
    changed = [json.loads(line) for line in first.out.path.read_text().splitlines()]
    next(e for e in changed if e["type"] == "row" and e["impl"] == "half")["status"] = "noisy"
    first.out.path.write_text("".join(json.dumps(e) + "\n" for e in changed))
    again = suite("half", "fast", vs="fast", resume=first.out.path)
    assert again.run() == 0
    assert again.watcher.warnings == ["resuming: 4 of 6 rows are still valid"]
    assert len(again.rows) == 6
    assert len(again.versus) == 3  # two are those of the first run


def test_resume_can_keep_failed_rows(suite):
    first = suite("fast")
    first.run()
    text = first.out.path.read_text().replace('"status": "ok"', '"status": "noisy"')
    first.out.path.write_text(text)
    again = suite("fast", resume=first.out.path, keep_failed=True)
    again.run()
    assert statuses(again) == ["noisy"] * 3


def test_compared_implementations_take_turns(suite, monkeypatch, tmp_path):
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_WORKER_LOG", str(log))
    run = suite("half", "fast", vs="fast", cases=CASES[:1])
    assert run.run() == 0
    order = log.read_text().split()
    assert order[:8] == ["half", "fast", "fast", "half"] * 2
    (line,) = run.versus
    assert line["verdict"] == "faster"
    assert line["low"] < 0.5 < line["high"] or line["ratio"] == pytest.approx(0.5, rel=0.01)
    assert store.read_run(run.out.path).versus == [line]


def test_slower_than_the_other_is_exit_code_1(suite):
    run = suite("fast", "half", vs="half", cases=CASES[:1])
    assert run.run() == 1
    assert run.versus[0]["verdict"] == "slower"


def test_a_loss_while_measuring_leaves_the_others_their_visits(suite):
    run = suite("dies_later", "fast", "half", vs="fast")
    assert run.run() == 3
    by_impl = {impl: [r for r in run.rows if r["impl"] == impl] for impl in ("dies_later", "fast", "half")}
    assert [r["status"] for r in by_impl["dies_later"]] == ["crash"] * 3
    assert all(r["status"] == "ok" for r in by_impl["fast"] + by_impl["half"])
    assert {v["impl"] for v in run.versus} == {"half"}


def test_what_was_evicted_may_take_its_time_to_be_prepared_again(suite):
    run = suite("evicted", "fast", cases=CASES[:1], budget=8.0)
    assert run.run() == 0
    assert {r["impl"]: r["status"] for r in run.rows} == {"evicted": "ok", "fast": "ok"}


def test_the_end_of_the_time_in_a_visit_leaves_what_was_measured(suite):
    run = suite("stalls_later", "fast", vs="fast", cases=CASES[:1], budget=2.0)
    assert run.run() == 4
    assert run.countdown.used() <= 4
    by_impl = {r["impl"]: r for r in run.rows}
    assert (by_impl["stalls_later"]["status"], by_impl["stalls_later"]["n"]) == ("low_n", 2)
    assert "the time ran out while" in by_impl["stalls_later"]["note"]
    assert [v["impl"] for v in run.versus] == ["stalls_later"]


def test_impossibly_fast_is_suspect(suite):
    run = suite("suspect", cases=CASES[:1])
    assert run.run() == 3
    assert statuses(run) == ["suspect"]
    assert "floor" in run.rows[0]["note"]


def test_visits_at_a_low_clock_are_made_once_more_and_counted(suite):
    run = suite("slow_clock", target=1e-9, budget=3.0)
    run.run()
    assert sum(r["slow_clock_visits"] for r in run.rows) > 0
    assert all(r["clock_mhz"] == 1800.0 for r in run.rows)


def test_an_unchecked_peer_is_never_ok(suite):
    run = suite("peer:other", cases=CASES[:1])
    run.run()
    assert statuses(run) == ["unchecked"]


def test_a_worker_that_cannot_start_is_an_error(sources, tmp_path):
    from draftwood.bench.supervisor import WorkerLost

    dead = (sys.executable, "-c", "import sys; sys.exit('no such device')")
    job = Job(CASES[0], "fast", "warm")
    run = Suite(
        [job],
        CATALOG,
        Options(device="cpu", budget_s=5.0),
        lambda jobs: Worker({}, dead),
        Countdown(5.0, age_s=0.0),
        store.Store(tmp_path / "run.jsonl"),
        Quiet(),
    )
    with pytest.raises(WorkerLost, match="no such device"):
        run.run()


def test_a_worker_dies_with_its_parent(tmp_path):
    """Also while it hangs: the parent is killed, not asked."""
    script = (
        "import sys, time; from draftwood.bench.supervisor import Worker;"
        "w = Worker({'device': 'cpu', 'jobs': [], 'peers': [], 'extra': []});"
        "print(w._process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    time.sleep(0.5)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and _alive(pid):
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
