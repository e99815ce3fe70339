"""Which cases a worker holds ready, and that it says which it no longer does."""

from __future__ import annotations

import pytest

from draftwood.bench.catalog import Catalog, Job
from draftwood.bench.workbench import Workbench
from draftwood.bench.worker import Session
from draftwood.kernels.run_case import cases_of


@pytest.fixture
def jobs():
    return [Job(case, "torch", "warm") for case in cases_of("tree_accept").small()[:3]]


def test_the_least_recently_used_case_makes_room_and_is_told(jobs):
    bench = Workbench(Catalog(), "cpu", jobs)
    a, b, c = jobs
    for job in (a, b):
        bench.prepare(job, gate=True)
    assert bench.tell_evicted() == []
    bench.sample(a, 1)
    bench.room = sum(inputs.held for inputs in bench.cases.values())
    bench.prepare(c, gate=True)
    assert bench.tell_evicted() == [b.id]
    assert bench.tell_evicted() == []
    assert len(bench.sample(b, 3)) == 3  # prepared again
    assert bench.tell_evicted() == [a.id]


def test_a_worker_tells_what_made_room_for_a_job_that_failed(jobs):
    session = Session({"device": "cpu", "jobs": [job.to_json() for job in jobs], "peers": [], "extra": []})
    prepare = [{"do": "prepare", "job": job.to_json(), "gate": False} for job in jobs]
    assert "evicted" not in session.answer(prepare[0])
    session.bench.room = 0
    session.bench._timer = lambda *_: (_ for _ in ()).throw(MemoryError("no room"))
    reply = session.answer(prepare[1])
    assert (reply["status"], reply["evicted"]) == ("crash", [jobs[0].id])


def test_a_case_that_fills_the_room_by_itself_is_kept_while_it_is_prepared(jobs):
    bench = Workbench(Catalog(), "cpu", jobs)
    bench.prepare(jobs[0], gate=True)
    bench.room = 0
    bench.prepare(jobs[1], gate=True)
    bench._make_room(1 << 40, kept=jobs[1].case)
    assert [*bench.cases] == [jobs[1].case]
    assert bench.tell_evicted() == [jobs[0].id]
    assert len(bench.sample(jobs[1], 3)) == 3
