"""The trace page: it stands alone, holds every round, and no token text can break out of it."""

from __future__ import annotations

import html.parser
import json
import math
import re
import shutil
import subprocess
from dataclasses import asdict, replace

import pytest

from draftwood.engine.outputs import RequestOutput, RoundRecord, TracedTree
from draftwood.trace import write_trace

HOSTILE = {
    1: "</script><script>document.title = 'owned'</script>",
    2: "<!--<script>",
    3: "]]>\u2028&lt;<b>",
    4: "{{js}}",
    5: "",
    6: "\u202e\n\t    ",
}


def record(tree, *, kept=None):
    slots = len(tree.tokens)
    return RoundRecord(
        slots=slots,
        padded_slots=max(8, slots),
        accepted=len(tree.path) - 1,
        emitted=len(tree.emitted) if kept is None else kept,
        batch=2,
        expected=1.75,
        seconds={"draft": 0.001, "verify": 0.004},
        trace=tree,
    )


def output_of(records, prompt=(1, 2)):
    tokens = [t for r in records for t in r.trace.emitted[: r.emitted]]
    return RequestOutput(
        list(prompt), 2**63 - 2, token_ids=tokens, finish_reason="length", rounds=records, prefill_seconds=0.5
    )


def branching():
    """Accepts 3 then 4 of a tree whose siblings were 5 and 6; the bonus is 1."""
    tree = TracedTree(
        tokens=[2, 3, 4, 5, 6],
        parents=[-1, 0, 1, 0, 1],
        scores=[0.0, -0.123456789, -0.5, -2.0, -3.0],
        path=[0, 1, 2],
        emitted=[3, 4, 1],
    )
    return record(tree)


def plain(root, token):
    return record(TracedTree([root], [-1], [0.0], [0], [token]))


def hostile(ids):
    return "".join(HOSTILE[i] for i in ids)


def from_bytes(ids):
    return bytes(ids).decode("utf-8", errors="replace")


class Page(html.parser.HTMLParser):
    """Elements and the text of the scripts, as an HTML parser sees them."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.lasttag == "script":
            self.scripts[-1] += data


def write(tmp_path, output, decode=hostile, **options):
    path = tmp_path / "run.html"
    write_trace(path, output, decode, **options)
    return path.read_text(encoding="utf-8")


def data_of(page):
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(block[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_page_loads_nothing(tmp_path):
    page = write(tmp_path, output_of([branching()]))
    assert "default-src 'none'" in page
    assert not re.search(r"https?:|//\w+\.\w|@import|url\(|\bfetch\(|\bimport\b|\bsrc=|\bhref=", page)
    assert {"link", "img", "iframe", "base", "object"}.isdisjoint(tag for tag, _ in Page(page).elements)


def test_token_text_cannot_break_out(tmp_path):
    page = Page(write(tmp_path, output_of([branching()]), title="</title><script>x</script> {{data}} &"))
    quiet = Page(write(tmp_path, output_of([branching()]), lambda ids: "x" * len(ids), title="quiet"))
    assert page.elements == quiet.elements
    assert len(page.scripts) == 2
    assert page.scripts[1] == quiet.scripts[1]
    assert "<" not in page.scripts[0]
    data = json.loads(page.scripts[0])
    assert data["vocab"] == {str(i): HOSTILE[i] for i in (1, 2, 3, 4, 5, 6)}
    assert data["prompt"] == HOSTILE[1] + HOSTILE[2]
    assert data["title"].startswith("</title><script>")


def test_rounds_survive_the_page(tmp_path):
    output = output_of([branching(), *(plain(1, 3) for _ in range(600)), branching()])
    rounds = data_of(write(tmp_path, output))["rounds"]
    assert len(rounds) == 602
    assert "".join(r["text"] for r in rounds) == hostile(output.token_ids)
    for made, shown in zip(output.rounds, rounds, strict=True):
        expected = asdict(made)
        assert shown["trace"]["scores"] == pytest.approx(expected["trace"].pop("scores"), rel=1e-5)
        del shown["trace"]["scores"], shown["text"]
        assert shown == expected


def test_summary_numbers(tmp_path):
    output = output_of([branching(), plain(1, 3)])
    data = data_of(write(tmp_path, output))
    assert data["seed"] == str(2**63 - 2)
    assert (data["output_tokens"], data["prompt_tokens"]) == (4, 2)
    assert data["tokens_per_round"] == 2
    assert data["tokens_per_second"] == pytest.approx(400)
    assert data["stage_seconds"] == pytest.approx({"prefill": 0.5, "draft": 0.002, "verify": 0.008})


def test_scores_that_are_not_finite_become_null(tmp_path):
    made = branching()
    scores = [0.0, -math.inf, math.nan, -2.0, -3.0]
    made = replace(made, expected=math.nan, trace=replace(made.trace, scores=scores))
    (shown,) = data_of(write(tmp_path, output_of([made])))["rounds"]
    assert shown["trace"]["scores"] == [0.0, None, None, -2.0, -3.0]
    assert shown["expected"] is None


def test_character_split_between_rounds_goes_to_the_last_of_them(tmp_path):
    tree = list("a🪵é\ufffd".encode())
    output = output_of([plain(0, token) for token in tree], prompt=b"p")
    texts = [r["text"] for r in data_of(write(tmp_path, output, from_bytes))["rounds"]]
    assert texts == ["a", "", "", "", "🪵", "", "é", "", "", "\ufffd"]


def test_character_that_never_completes_is_shown_at_the_end(tmp_path):
    prefix = "🪵".encode()[:3]
    output = output_of([plain(0, token) for token in (*b"ab", *prefix)], prompt=b"p")
    texts = [r["text"] for r in data_of(write(tmp_path, output, from_bytes))["rounds"]]
    assert "".join(texts) == from_bytes([*b"ab", *prefix])
    assert texts[:2] == ["a", "b"]


def test_tokens_after_a_stop_string_are_not_text(tmp_path):
    made = replace(branching(), emitted=2)
    (shown,) = data_of(write(tmp_path, output_of([made])))["rounds"]
    assert shown["text"] == HOSTILE[3] + HOSTILE[4]
    assert shown["trace"]["emitted"] == [3, 4, 1]


def test_output_made_without_trace_is_refused(tmp_path):
    output = output_of([branching(), branching()])
    output.rounds[1] = replace(output.rounds[1], trace=None)
    with pytest.raises(ValueError, match=r"rounds\[1\]\.trace.*trace=True"):
        write(tmp_path, output)
    with pytest.raises(ValueError, match=r"output\.rounds: empty"):
        write(tmp_path, RequestOutput([1], 0))
    assert list(tmp_path.iterdir()) == []


def test_write_is_atomic(tmp_path, monkeypatch):
    write(tmp_path, output_of([branching()]), title="first")
    before = (tmp_path / "run.html").read_bytes()

    def disk_full(path, *_args, **_options):
        path.write_bytes(b"<half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("draftwood.trace.Path.write_text", disk_full)
    with pytest.raises(OSError, match=r"No space left.*run\.html"):
        write(tmp_path, output_of([branching()]), title="second")
    assert (tmp_path / "run.html").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["run.html"]


def test_unwritable_path_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"cannot write the trace.*missing/run\.html"):
        write_trace(tmp_path / "missing" / "run.html", output_of([branching()]), hostile)
    with pytest.raises(IsADirectoryError, match="cannot write the trace"):
        write_trace(tmp_path, output_of([branching()]), hostile)
    assert list(tmp_path.parent.glob(f".{tmp_path.name}.*")) == []


PROBE = """<script>
document.body.dataset.probe = JSON.stringify([null, "ArrowRight", "ArrowRight", "Home"].map((key) => {
  if (key) dispatchEvent(new KeyboardEvent("keydown", { key }));
  const nodes = [...document.querySelectorAll("#tree g")];
  return [document.getElementById("heading").textContent, nodes.map((g) => g.getAttribute("class")).sort()];
}));
</script></body>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_browser_draws_the_round_of_the_hash_and_follows_the_keys(tmp_path):
    whole = branching().trace
    cut = record(replace(whole, path=whole.path[:2], emitted=whole.emitted[:2]))  # a limit ended it at slot 2
    page = write(tmp_path, output_of([plain(2, 3), branching(), cut]), title="honest")
    path = tmp_path / "probed.html"
    path.write_text(page.replace("</body>", PROBE), encoding="utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    command += ["--disable-background-networking", "--disable-component-update"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"{path.as_uri()}#round=2"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "<title>honest</title>" in dom
    body = next(attributes for tag, attributes in Page(dom).elements if tag == "body")
    second, third, still_third, first = json.loads(body["data-probe"])
    assert first == ["Round 1 of 3", ["bonus", "root"]]
    assert second == [
        "Round 2 of 3",
        ["accepted", "accepted", "bonus", "rejected", "rejected", "root"],
    ]
    assert third == ["Round 3 of 3", ["accepted", "bonus", "rejected", "rejected", "root"]]
    assert still_third == third
