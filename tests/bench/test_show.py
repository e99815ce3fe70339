"""Stored runs read back, shown, exported, compared and turned into a page."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from typer.testing import CliRunner

from draftwood.bench import planner, rows, store
from draftwood.bench.catalog import Catalog, Selection, UsageError, select
from draftwood.bench.cli import app
from draftwood.bench.compare import compare_runs, is_regression, spread
from draftwood.bench.options import parse_seconds
from draftwood.bench.report import html
from draftwood.bench.work import Ceilings, bound, is_suspect

CEILINGS = Ceilings(4000.0, 9000.0, 60 << 20, {"bfloat16": 790.0, "float32": 50.0})
COMMON = {"device": "gpu", "python": "3", "torch": "2", "triton": "3", "commit": "abc", "fingerprint": "f"}


def make_run(path, factor=1.0, statuses=("ok",), seed=0, noise=0.002, kernels=("verify_attn", "tree_accept")):
    """A run of plausible rows, every implementation `factor` times a fixed time."""
    rng = np.random.default_rng(seed)
    jobs = select(Catalog(), Selection(kernels=kernels), ("torch", "ref"))
    entries = [{"type": "run", "ceilings": CEILINGS.to_json(), "target": 0.01, "budget_s": 30, **COMMON}]
    for i, job in enumerate(jobs):
        cases = Catalog().cases(job.kernel)
        info = {"bytes": cases.bytes_moved(job.case), "flops": cases.flops(job.case), "checked": "ref"}
        info |= {"calls": 1, "method": "graph", "launch_us": 9.0, "setup_s": 0.1}
        us = factor * 2000 * (1 + i % 7)
        progress = planner.Progress(job.id, 0.01)
        for _ in range(12):
            progress.add(list(us * (1 + noise * rng.standard_normal(3))), 0.01)
        status = statuses[i % len(statuses)]
        note = "" if status == "ok" else "a note\nwith a second line"
        entries.append(
            rows.make_row(
                job,
                status,
                note,
                common=COMMON,
                ceilings=CEILINGS,
                target=0.01,
                info=info,
                progress=progress,
                clocks={"clock_mhz": 1800.0},
            )
        )
    entries.append({"type": "end", "promised_s": 30, "used_s": 29.0, "seconds": {}})
    path.write_text("".join(json.dumps(e) + "\n" for e in entries))
    return path


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "a.jsonl", statuses=("ok", "ok", "ok", "noisy", "crash"))


def bench(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_show_selects_sections_columns_and_order(run):
    out = bench(
        "show", run, "--section", "tree_accept", "--impl", "torch", "--columns", "case,median us,launch us"
    )
    assert out.exit_code == 0
    assert "launch us" in out.stdout
    assert "verify_attn" not in out.stdout
    assert len(out.stdout.splitlines()) == 9
    values = [
        r["median_us"]
        for r in json.loads(bench("show", run, "--format", "json", "--sort", "median_us").stdout)
    ]
    timed = [v for v in values if v is not None]
    assert timed == sorted(timed)
    assert values[: len(timed)] == timed


def test_csv_and_markdown_hold_every_row(run):
    n = len(store.read_run(run).rows)
    table = list(csv.DictReader(io.StringIO(bench("show", run, "--format", "csv").stdout)))
    assert len(table) == n
    assert float(table[0]["median_us"]) > 0
    assert table[0]["case"].startswith("B=")
    markdown = bench("show", run, "--format", "md").stdout.splitlines()
    assert len(markdown) == n + 2
    assert len({line.count("|") for line in markdown}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "missing.jsonl"), "no such run"),
        (("show", "{run}", "--columns", "speed"), "no column `speed`"),
        (("show", "{run}", "--sort", "speed"), "--sort speed"),
        (("show", "{run}", "--section", "moe"), "no row matches"),
        (("kernels", "--budget", "soon"), "--budget soon"),
        (("kernels", "--only", "nothing"), "unknown kernel `nothing`"),
        (("kernels", "--only", "moe", "--vs", "ours"), "--vs ours"),
        (("list", "-a", "T"), "-a T"),
    ],
)
def test_wrong_arguments_are_named_and_exit_with_2(run, arguments, message):
    out = bench(*(str(a).format(run=run) for a in arguments))
    assert out.exit_code == 2
    assert message in out.stderr


def test_list_prints_stable_ids():
    out = bench(
        "list", "--only", "tree_accept", "-a", "T=8", "--impl", "torch", "--device", "cpu", "--suite", "bench"
    )
    assert out.stdout.splitlines() == [
        f"tree_accept/torch/B={B},D=7,T=8,S=2,tree=random,hit=0.9,limits=far/warm" for B in (1, 8)
    ]


def test_a_torn_last_line_is_left_out_and_other_faults_are_named(run):
    whole = store.read_run(run)
    with run.open("a") as f:
        f.write('{"type": "row", "ker')
    assert store.read_run(run).rows == whole.rows
    store.cut_torn_line(run)
    assert run.read_text().endswith("}\n")
    lines = run.read_text().splitlines()
    lines[2] = "nonsense"
    run.write_text("\n".join(lines) + "\n")
    with pytest.raises(UsageError, match="line 3"):
        store.read_run(run)


def test_a_later_row_of_a_job_replaces_the_earlier(run):
    before = store.read_run(run).rows
    with run.open("a") as f:
        f.write(json.dumps({**before[0], "status": "drift"}) + "\n")
    after = store.read_run(run).rows
    assert len(after) == len(before)
    assert after[0]["status"] == "drift"


@pytest.mark.parametrize(
    ("factor", "verdict", "code"), [(1.0, "same", 0), (1.1, "slower", 1), (0.9, "faster", 0)]
)
def test_compare_and_its_exit_code(tmp_path, factor, verdict, code):
    a, b = make_run(tmp_path / "a.jsonl"), make_run(tmp_path / "b.jsonl", factor, seed=1)
    lines = compare_runs(store.read_run(a), store.read_run(b))
    assert {line["verdict"] for line in lines} == {verdict}
    out = bench("compare", a, b)
    assert out.exit_code == code
    assert verdict in out.stdout
    assert bench("compare", a, b, "--fail-slower", "20").exit_code == 0


def test_rows_that_are_not_ok_support_no_verdict(tmp_path):
    a = make_run(tmp_path / "a.jsonl")
    b = make_run(tmp_path / "b.jsonl", 2.0, statuses=("noisy",))
    lines = compare_runs(store.read_run(a), store.read_run(b))
    assert {line["verdict"] for line in lines} == {"unclear"}
    assert not any(is_regression(line, 0.01) for line in lines)
    assert "noisy after" in bench("compare", a, b).stdout


def test_devices_are_not_compared_unless_asked(tmp_path):
    a, b = make_run(tmp_path / "a.jsonl"), make_run(tmp_path / "b.jsonl")
    b.write_text(b.read_text().replace('"device": "gpu"', '"device": "other"'))
    assert bench("compare", a, b).exit_code == 2
    assert bench("compare", a, b, "--across").exit_code == 0


def test_spread_over_runs(tmp_path):
    runs = [make_run(tmp_path / f"{i}.jsonl", f, seed=i) for i, f in enumerate((1.0, 1.02, 1.01))]
    lines = spread([store.read_run(r) for r in runs])
    assert lines
    assert all(line["runs"] == 3 and 0.015 < line["spread"] < 0.03 for line in lines)
    out = bench("spread", *runs)
    assert out.exit_code == 0
    assert "largest" in out.stdout


def test_the_page_is_whole_and_fetches_nothing(run, tmp_path):
    out = bench("report", run, "--out", tmp_path / "page.html")
    assert out.exit_code == 0
    page = (tmp_path / "page.html").read_text()
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    svgs = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(svgs) >= 4  # roofline, a panel, a dot plot per kernel
    for svg in svgs:
        root = ET.fromstring(svg)
        numbers = [
            float(v)
            for e in root.iter()
            for k, v in e.attrib.items()
            if k in ("x", "y", "cx", "cy", "x1", "y2")
        ]
        assert all(np.isfinite(numbers))
        assert min(numbers) > -40
    titles = re.findall(r"<title>(.*?)</title>", page)
    assert any("prefix=16384" in t for t in titles)
    assert "hollow" in page


def test_the_roofline_is_a_file_of_its_own(run, tmp_path):
    out = bench("report", run, "--roofline")
    assert out.exit_code == 0
    root = ET.parse(run.with_suffix(".svg")).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    text = [e.text for e in root.iter() if e.tag.endswith("text")]
    assert {r["kernel"] for r in store.read_run(run).rows} <= set(text)
    assert any("TFLOP/s" in t for t in text)


def test_a_run_without_times_still_gives_a_page(tmp_path):
    path = make_run(tmp_path / "a.jsonl", statuses=("crash",))
    assert "crash" in html(store.read_run(path))
    out = bench("report", path, "--roofline")
    assert out.exit_code == 2
    assert "no roofline" in out.stderr


def test_floors_and_suspicion():
    memory = bound(4_000_000, 1, "float32", "cold", CEILINGS)
    assert memory == bound(4_000_000, 1000, "float32", "cold", CEILINGS)
    assert memory.binds == "memory"
    assert memory.floor_us == pytest.approx(1.0)
    assert bound(4_000_000, 1, "float32", "warm", CEILINGS).binds == "cache"
    assert bound(400_000_000, 1, "float32", "warm", CEILINGS).binds == "memory"  # does not fit the cache
    compute = bound(1, 790_000_000, "bfloat16", "cold", CEILINGS)
    assert compute.binds == "compute"
    assert compute.floor_us == pytest.approx(1.0)
    assert is_suspect(0.5, compute)
    assert not is_suspect(0.95, compute)


def test_failed_rows_carry_no_time(tmp_path):
    path = make_run(tmp_path / "a.jsonl", statuses=("crash", "wrong", "timeout"))
    assert all(r["median_us"] is None for r in store.read_run(path).rows)


@pytest.mark.parametrize(("text", "seconds"), [("30", 30), ("30s", 30), ("5m", 300), ("0.5h", 1800)])
def test_seconds(text, seconds):
    assert parse_seconds("--budget", text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1", "0", "nan", "inf", "1d"])
def test_wrong_seconds(text):
    with pytest.raises(UsageError, match="--budget"):
        parse_seconds("--budget", text)


def test_every_status_has_a_meaning_and_a_job_key_ignores_order():
    assert set(rows.FAILED) | set(rows.UNFINISHED) < set(rows.STATUSES)
    row = {"kernel": "k", "impl": "i", "cache": "warm"}
    assert store.job_key({**row, "case": {"a": 1, "b": 2}}) == store.job_key(
        {**row, "case": {"b": 2, "a": 1}}
    )
