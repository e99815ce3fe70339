"""Which jobs a command line selects, and the errors that name what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from draftwood.bench import store
from draftwood.bench.catalog import Catalog, Job, Selection, UsageError, parse_axes, read_peer, select
from draftwood.kernels.registry import KERNELS

FAULTS = Path(__file__).with_name("faults.py")

PEER = """
import something_not_installed
KERNEL = "verify_attn"
NAME = "other"
def run(**inputs):
    return something_not_installed.attention(**inputs)
"""


def test_the_default_suite_is_27_cases_over_all_kernels():
    jobs = select(Catalog(), Selection(), ("torch",))
    assert len({job.case for job in jobs}) >= 27
    assert {job.kernel for job in jobs} == set(KERNELS)


def test_kernels_take_turns_so_that_a_short_budget_sees_all():
    jobs = select(Catalog(), Selection(), ("torch",))
    assert {job.kernel for job in jobs[: len(KERNELS)]} == set(KERNELS)


def test_axes_replace_values_and_drop_duplicates():
    chosen = Selection(kernels=("tree_accept",), axes=parse_axes(["T=8,16", "B=1:4:pow2"]))
    jobs = select(Catalog(), chosen, ("torch",))
    assert {(job.case["T"], job.case["B"]) for job in jobs} == {(t, b) for t in (8, 16) for b in (1, 2, 4)}
    assert len(jobs) == 6


def test_ranges_include_their_end():
    assert parse_axes(["T=1:9:4,33"]) == {"T": ("1", "5", "9", "33")}


def test_tags_select_by_value_word_cache_and_implementation():
    catalog = Catalog()
    jobs = select(catalog, Selection(tags=("H=64", "cold")), ("torch",))
    assert jobs
    assert all(job.case["H"] == 64 and job.cache == "cold" for job in jobs)
    assert {job.kernel for job in select(catalog, Selection(tags=("greedy",)), ("torch",))} == {"sample"}


def test_the_limit_spreads_evenly():
    jobs = select(Catalog(), Selection(suite="small", kernels=("verify_attn",), limit=3), ("torch",))
    small = Catalog().cases("verify_attn").small()
    assert [job.case for job in jobs] == [small[0], small[len(small) // 3], small[2 * len(small) // 3]]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (Selection(kernels=("verify",)), "unknown kernel `verify`; known: .*verify_attn"),
        (Selection(impls=("hip",)), "unknown implementation `hip`; known: .*torch"),
        (Selection(axes={"Q": ("1",)}), "`-a Q`: none of"),
        (Selection(kernels=("tree_accept",), axes={"T": ("x",)}), "`-a T=x`: expected int"),
        (Selection(tags=("purple",)), "`--tag purple`"),
    ],
)
def test_a_wrong_selection_is_named(chosen, message):
    with pytest.raises(UsageError, match=message):
        select(Catalog(), chosen, ("torch",))


@pytest.mark.parametrize("option", ["T", "T=", "=8", "T=1:x", "T=0:8:pow2"])
def test_a_wrong_axis_option_is_named(option):
    with pytest.raises(UsageError, match=option):
        parse_axes([option])


def test_a_peer_is_read_without_running_it(tmp_path):
    path = tmp_path / "peer.py"
    path.write_text(PEER)
    catalog = Catalog.of_files(peers=[path])
    assert catalog.implementations("verify_attn")[-1] == "peer:other"
    jobs = select(catalog, Selection(kernels=("verify_attn",)), ("torch",))
    assert {job.impl for job in jobs} == {"torch", "peer:other"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NAME = 'x'\ndef run(**k): pass", "KERNEL"),
        ("KERNEL = 'moe'\ndef run(**k): pass", "NAME"),
        ("KERNEL = 'moe'\nNAME = 'x'", "run"),
        ("KERNEL = 'nothing'\nNAME = 'x'\ndef run(**k): pass", "nothing"),
    ],
)
def test_an_incomplete_peer_is_named(tmp_path, text, message):
    path = tmp_path / "peer.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        Catalog.of_files(peers=[path])
    with pytest.raises(UsageError, match="no such file"):
        read_peer(tmp_path / "missing.py")


def test_jobs_survive_the_way_to_the_worker():
    job = select(Catalog(), Selection(), ("torch",))[0]
    assert Job.from_json(job.to_json()) == job


def test_a_fingerprint_follows_sources_versions_and_device(tmp_path):
    path = tmp_path / "faults.py"
    path.write_text(FAULTS.read_text())
    catalog = Catalog.of_files(extra=[path])
    job = Job(catalog.cases("double").bench()[0], "ref", "warm")
    other = Job(catalog.cases("double").bench()[1], "ref", "warm")
    prints = {
        store.fingerprint(catalog, job, {"torch": "1"}, "gpu"),
        store.fingerprint(catalog, job, {"torch": "2"}, "gpu"),
        store.fingerprint(catalog, job, {"torch": "1"}, "cpu"),
        store.fingerprint(catalog, other, {"torch": "1"}, "gpu"),
    }
    path.write_text(FAULTS.read_text() + "\n# changed\n")
    store._digest.cache_clear()
    assert store.fingerprint(catalog, job, {"torch": "1"}, "gpu") not in prints
    assert len(prints) == 4


def test_the_sources_of_a_kernel_include_what_they_import():
    names = {f"{p.parent.name}/{p.name}" for p in Catalog().files("sample", "torch")}
    assert {"sample/torch_impl.py", "sample/cases.py", "sample/ref.py", "kernels/case.py"} <= names
    assert {"noise/torch_impl.py", "draftwood/tree.py"} <= names
    assert not any(name.startswith("moe/") for name in names)


@pytest.mark.parametrize("line", ["import helper", "from helper import paged"])
def test_the_sources_of_a_peer_include_helpers_beside_it(tmp_path, line):
    path, helper = tmp_path / "peer.py", tmp_path / "helper.py"
    path.write_text(f"{line}\n{PEER}")
    helper.write_text("")
    assert Catalog.of_files(peers=[path]).files("verify_attn", "peer:other")[:2] == [path, helper]


def test_planning_and_listing_never_import_torch():
    code = (
        "import sys; from draftwood.bench import cli, suite, live, report, catalog as c;"
        "c.select(c.Catalog(), c.Selection(), ('torch',)); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
