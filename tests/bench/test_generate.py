"""`bench generate`: cases, prompts, pairs and rows for themselves; then the real worker, its faults, a kill, and the pages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from scipy import stats as scipy_stats
from typer.testing import CliRunner

from draftwood.bench import stats, store
from draftwood.bench.catalog import UsageError
from draftwood.bench.cli import app
from draftwood.bench.countdown import Countdown
from draftwood.bench.generate import prompts
from draftwood.bench.generate.cases import Models, make_jobs, mode_of, parse_accept
from draftwood.bench.generate.rows import Seen, make_row
from draftwood.bench.generate.suite import MIN_VISITS, GenerateSuite, worker_of
from draftwood.bench.planner import Progress
from draftwood.bench.state import Options
from draftwood.bench.supervisor import Slot, Worker, WorkerLost
from support.tiny import TARGET, write_drafter, write_target

DEFAULTS = {"batch": ("1",), "prompt": ("8",), "new": ("8",), "temperature": ("0",), "budget": ("auto",)}
FAULTY = (sys.executable, str(Path(__file__).with_name("faulty_generate.py")))


def jobs_of(modes=("chain", "tree"), accepts=(), **axes):
    return make_jobs(axes, modes, DEFAULTS, text="source", accepts=accepts)


# cases and prompts


def test_settings_times_modes_with_plain_always_there():
    jobs = jobs_of(("tree", "chain", "plain"), batch=("1", "4"), budget=("16", "auto"))
    assert [job.impl for job in jobs[:4]] == ["plain", "tree:16", "tree:auto", "chain"]
    assert len(jobs) == len({job.id for job in jobs}) == 8
    assert mode_of("tree:16") == {"mode": "tree", "budget": 16}
    assert mode_of("tree:auto") == {"mode": "tree", "budget": "auto"}
    assert mode_of("plain") == {"mode": "plain"}
    swept = jobs_of((), accepts=("0.8", "0.9,0.5"))
    assert [job.case["accept"] for job in swept] == ["0.8", "0.9,0.5"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jobs_of(batch=("none",)), "-a batch=none"),
        (lambda: jobs_of(batch=("0",)), "-a batch=0"),
        (lambda: jobs_of(temperature=("nan",)), "-a temperature=nan"),
        (lambda: jobs_of(budget=("1",)), "-a budget=1"),
        (lambda: jobs_of(width=("1",)), "-a width"),
        (lambda: jobs_of(("beam",)), "--mode beam"),
        (lambda: parse_accept("0.8,1.1"), "--accept 0.8,1.1"),
        (lambda: parse_accept("0.01"), "--accept 0.01"),
        (lambda: Models("cpu", model="a").check(), "--drafter"),
        (lambda: Models("cpu", synthetic="a", model="b", drafter="c").check(), "--synthetic"),
        (lambda: Models("cpu", layers=3).check(), "--layers"),
        (lambda: Models("cpu", prompts=("missing.txt",)).check(), "missing.txt"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        make()


def test_windows_cross_no_border_and_are_numbered_alike_in_any_batch():
    documents = [list(range(100, 120)), list(range(200, 203)), list(range(300, 330))]
    windows = prompts.Windows(documents, seed=1)
    found = windows.take(0, 200, 7)
    assert all(len(w) == 7 and w == list(range(w[0], w[0] + 7)) for w in found)
    assert {w[0] for w in found} == {*range(100, 114), *range(300, 324)}  # every place there is
    assert found[5:8] == windows.take(5, 3, 7)
    with pytest.raises(NotImplementedError, match="31 tokens"):
        windows.take(0, 1, 31)
    uniform = prompts.Uniform(40, 0).take(0, 50, 64)
    assert {t for p in uniform for t in p} == set(range(40))


def test_listed_prompts_are_cut_and_short_ones_left_out(tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text('[1, 2, 3]\n"abcdef"\n[7]\n')
    listed = prompts.of_files([file], lambda text: [ord(c) - 97 for c in text], 40, 0)
    assert listed.take(0, 3, 0) == [[1, 2, 3], [0, 1, 2, 3, 4, 5], [7]]
    assert listed.count(2) == 2
    assert listed.longest(0) == 6
    assert listed.take(0, 2, 2) == [[1, 2], [0, 1]]
    with pytest.raises(NotImplementedError, match="3 prompts of 2 tokens or more"):
        listed.take(1, 2, 2)
    for bad in ("[40]", "[]", '""', "{}", "[1.5]", "[true]", "nonsense"):
        file.write_text(f"[1]\n{bad}\n")
        with pytest.raises(UsageError, match="line 2"):
            prompts.of_files([file], lambda text: [], 40, 0)


# pairs and rows


def test_the_sign_test_is_the_binomial_one():
    for below, above in ((0, 8), (3, 9), (10, 10), (0, 0), (1, 30)):
        expected = scipy_stats.binomtest(below, below + above).pvalue if below + above else 1.0
        assert stats.sign_test(below, above) == pytest.approx(expected)


def test_pairs_see_through_what_differs_between_prompts():
    """Prompts differ by a factor of five, the two sides by a tenth."""
    rng = np.random.default_rng(0)
    prompt = rng.uniform(1, 5, 12)
    a, b = (prompt * (1 + 0.02 * rng.standard_normal(12)) for _ in range(2))
    assert stats.compare_pairs(0.9 * a, b).verdict == "faster"
    assert stats.compare_pairs(a, 0.9 * b).verdict == "slower"
    assert stats.compare_pairs(a, a).verdict == "same"
    assert stats.compare(0.9 * a, b, paired=True).verdict == "unclear"  # a rank test is lost between prompts
    assert stats.compare_pairs(a[: MIN_VISITS - 1], 2 * b[: MIN_VISITS - 1]).verdict == "unclear"
    assert stats.compare_pairs(a[:MIN_VISITS], 2 * b[:MIN_VISITS]).verdict == "faster"


def test_pairs_find_a_difference_where_there_is_none_at_most_one_time_in_a_hundred():
    rng = np.random.default_rng(0)
    verdicts = [stats.compare_pairs(*rng.lognormal(0, 0.3, (2, 12))).verdict for _ in range(1000)]
    assert sum(v in ("faster", "slower") for v in verdicts) <= 20


def row_of(job, status="ok", visits=8, turns=8, note=""):
    progress, seen = Progress(job.id, 0.1), Seen(turns=turns)
    for i in range(visits):
        progress.add([100.0 + i], 0.1)
        seen.visits.append({"us_per_token": 100.0 + i, "tokens": 8, "peak_mib": None, "prompts": str(i)})
    return make_row(job, status, note, common={}, target=0.1, seen=seen, progress=progress)


def test_imposed_acceptance_is_never_ok_and_what_was_not_compared_neither():
    _, chain = jobs_of(("chain",))
    assert row_of(chain)["status"] == "ok"
    assert row_of(chain, turns=7)["status"] == "unchecked"
    for job in jobs_of(("chain",), accepts=("0.8",)):
        row = row_of(job)
        assert (row["status"], row["acceptance"]) == ("imposed", "imposed 0.8")
    assert row_of(chain)["figures"]["us_per_token"] == pytest.approx((103.5, 100.0, 107.0))
    assert "peak_mib" not in row_of(chain)["figures"]  # unknown in some visit
    assert row_of(chain, status="wrong")["median_us"] is None


def test_a_difference_is_told_by_its_earliest_token():
    seen = Seen()
    seen.check([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]])
    assert seen.difference() == ""
    seen.check([[1, 2, 3], [4, 5]], [[1, 2, 9], [4, 5, 6]])
    seen.check([[1, 8, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]])
    assert (seen.requests, seen.identical, seen.turns) == (6, 3, 3)
    assert "3 of 6" in seen.difference()
    assert "token 1 (visit 2, request 0)" in seen.difference()


# whole runs


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    write_target(folder / "target")
    write_drafter(folder / "drafter")
    rng = np.random.default_rng(0)
    lines = [json.dumps(rng.integers(3, TARGET["vocab_size"], 8).tolist()) for _ in range(20)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


class Quiet:
    def __init__(self):
        self.plans = []

    def phase(self, name, total):
        pass

    def step(self, what, done):
        pass

    def warn(self, message):
        pass

    def plan(self, plan, states, left_s):
        self.plans.append(plan)


@pytest.fixture(scope="module")
def faulty(pair):
    """A batch of one and of two in every mode, on an engine with two faults."""
    models = Models(
        "cpu",
        model=str(pair / "target"),
        drafter=str(pair / "drafter"),
        prompts=(str(pair / "prompts.jsonl"),),
    )
    jobs = jobs_of(batch=("1", "2"), budget=("auto", "4"))
    config = {"models": models.to_json(), "jobs": [job.to_json() for job in jobs]}
    path = pair / "faulty.jsonl"
    run = GenerateSuite(
        jobs,
        Options(device="cpu", budget_s=240.0, target=20.0, vs="plain"),
        lambda rest: Worker(config, FAULTY),
        Countdown(240.0, age_s=0.0),
        store.Store(path),
        Quiet(),
    )
    return run.run(), path, store.read_run(path)


def rows_of(run, impl):
    return sorted((r for r in run.rows if r["impl"] == impl), key=lambda r: r["case"]["batch"])


def test_a_crash_costs_its_case_and_the_neighbours_go_on(faulty):
    code, _, run = faulty
    assert code == 3
    assert len(run.rows) == 8
    one, two = rows_of(run, "chain")
    assert one["status"] == "ok"
    assert two["status"] == "crash"
    assert "SIGABRT" in two["note"]
    assert "last words of the engine" in two["note"]
    assert two["median_us"] is None
    assert [r["status"] for r in rows_of(run, "tree:auto") + rows_of(run, "plain")] == ["ok"] * 4


def test_a_lossy_engine_has_no_time(faulty):
    _, _, run = faulty
    for row in rows_of(run, "tree:4"):
        assert row["status"] == "wrong"
        assert "at token 5 (visit 0" in row["note"]
        assert row["median_us"] is None
        assert "figures" not in row
    assert "tree:4" not in {v["impl"] for v in run.versus}


def test_sound_rows_have_every_figure_over_the_same_prompts(faulty):
    _, _, run = faulty
    assert run.header["suite"] == "generate"
    assert run.header["model_facts"]["exact"]
    plain, chain = (rows_of(run, impl)[0] for impl in ("plain", "chain"))
    assert [v["prompts"] for v in plain["visits"]] == [v["prompts"] for v in chain["visits"]]
    assert len({v["prompts"] for v in plain["visits"]}) == plain["n"] >= MIN_VISITS
    assert chain["identical"] == chain["compared"] == chain["n"]
    for row in (plain, chain):
        f = {name: median for name, (median, _, _) in row["figures"].items()}
        assert f["tokens"] == 8
        assert f["us_per_token"] == row["median_us"]
        for visit in row["visits"]:
            assert visit["tokens_per_s"] == pytest.approx(1e6 / visit["us_per_token"])
            assert visit["tokens_per_s_with_prefill"] < visit["tokens_per_s"]
            stages = sum(visit[f"{s}_ms"] for s in ("draft", "build", "verify", "accept", "commit", "rest"))
            assert stages == pytest.approx(visit["round_ms"])
            assert visit["rounds"] * visit["round_ms"] + visit["prefill_ms"] == pytest.approx(
                visit["wall_ms"]
            )
            assert visit["rest_ms"] >= 0
            assert visit["ttft_p50_ms"] < visit["wall_ms"]
        assert f["itl_p50_ms"] <= f["itl_p99_ms"]
    assert plain["figures"]["tokens_per_round"] == [1, 1, 1]
    assert plain["figures"]["expected_per_round"] == [1, 1, 1]
    assert chain["figures"]["slots"][0] > 1
    line = next(v for v in run.versus if v["impl"] == "chain")
    sides = zip(chain["visits"], plain["visits"], strict=True)
    ratios = [a["us_per_token"] / b["us_per_token"] for a, b in sides]
    assert line["ratio"] == chain["vs_plain_ratio"] == pytest.approx(np.median(ratios))


def bench(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_stored_runs_are_shown_compared_and_made_a_page(faulty, tmp_path):
    _, path, _ = faulty
    shown = bench("show", path, "--section", "stages", "--impl", "chain")
    assert "verify ms" in shown.stdout
    assert len(shown.stdout.splitlines()) == 3
    csv = bench("show", path, "--format", "csv").stdout
    assert "itl_p99_ms_high" in csv
    assert bench("show", path, "--columns", "speed").exit_code == 2
    compared = bench("compare", path, path)
    assert compared.exit_code == 0
    assert compared.stdout.count("same (") == 5  # of the eight rows, three have no time
    other = tmp_path / "other.jsonl"
    other.write_text(path.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    assert bench("compare", path, other).exit_code == 2
    page = bench("report", path, "--out", tmp_path / "page.html")
    assert page.exit_code == 0
    html = (tmp_path / "page.html").read_text()
    assert not re.search(r"https?://|<script|<link|@import|url\(", html)
    svgs = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(svgs) >= 5
    for svg in svgs:
        for e in ET.fromstring(svg).iter():
            assert all(np.isfinite(float(v)) for k, v in e.attrib.items() if k in ("x", "y", "cx", "width"))


def test_imposed_acceptance_is_written_over_every_table(faulty, tmp_path):
    _, path, _ = faulty
    imposed = tmp_path / "imposed.jsonl"
    imposed.write_text(path.read_text().replace('"acceptance": null', '"acceptance": "imposed 0.8"'))
    for form in ("table", "md"):
        assert bench("show", imposed, "--format", form).stdout.startswith("imposed acceptance (imposed 0.8)")
    assert bench("compare", imposed, imposed).stdout.count("imposed acceptance)") == 5
    bench("report", imposed, "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().count("imposed acceptance (imposed 0.8)") >= 5


def test_a_model_that_cannot_be_had_is_a_wrong_argument():
    start = worker_of(Models("cpu", model="/nowhere", drafter="/nowhere"))
    with pytest.raises(WorkerLost, match="/nowhere") as lost:
        Slot(start, jobs_of(), lambda: 200.0).hello()
    assert lost.value.status == "invalid"


def test_killed_in_mid_run_then_resumed(pair, tmp_path):
    """Twenty prompts: ten visits of a batch of two, none of thirty-two."""
    out = tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "draftwood.bench", "generate", "--device", "cpu", "--budget", "240"]
    command += ["--model", str(pair / "target"), "--drafter", str(pair / "drafter")]
    command += ["--prompts", str(pair / "prompts.jsonl"), "-a", "new=8", "-a", "batch=1,2,32"]
    command += ["--mode", "chain", "--target", "2000"]
    process = subprocess.Popen([*command, "--out", str(out)], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None and len(whole_rows(out)) < 4:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    ok = [r for r in whole_rows(out) if r["status"] == "ok"]
    batches = [r["case"]["batch"] for r in ok]
    before = [r for r in ok if batches.count(r["case"]["batch"]) == 2]  # a pair is kept whole
    assert before
    with out.open("a") as f:
        f.write('{"type": "row", "ker')  # as if killed while writing
    done = subprocess.run(
        [*command, "--resume", str(out)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(before)} of 6 rows are still valid" in done.stderr
    rows = whole_rows(out)
    assert [r for r in rows if r in before] == before
    final = store.read_run(out)
    assert [r["status"] for r in final.rows].count("ok") == 4
    skipped = [r for r in final.rows if r["case"]["batch"] == 32]
    assert {r["status"] for r in skipped} == {"skipped"}
    assert "32 prompts are needed, the file has 20" in skipped[0]["note"]
    assert len({(v["impl"], v["case"]["batch"]) for v in final.versus}) == 2
    assert "of 240 s" in done.stdout.splitlines()[-1]


def whole_rows(path):
    rows = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        rows += [entry] if entry["type"] == "row" else []
    return rows
