"""`draftwood chat` as it is run: through a pipe and on a terminal, with the bundled pair."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import sys
import time

import pytest
from typer.testing import CliRunner

from draftwood.cli import app
from draftwood.models.miniature import write_drafter, write_target
from draftwood.models.miniature_config import drafter_config, target_config

SECONDS = 200
"""To wait for what must come on a terminal, however slow the machine."""


def chat(*args, text=""):
    return CliRunner().invoke(app, ["chat", *args], input=text)


def test_piped_lines_are_continued_on_stdout(tmp_path):
    lines = [
        "def f(x):",
        "",
        '"""import numpy as',
        'import os"""',
        f"/save {tmp_path / 'c.json'}",
        "/exit",
        "x",
    ]
    args = ["--raw", "--max-new-tokens", "6", "--temperature", "0", "--budget", "8"]
    result = chat(*args, text="\n".join(lines))
    assert result.exit_code == 0, result.output
    saved = [m["content"] for m in json.loads((tmp_path / "c.json").read_text())]
    assert saved[::2] == ["def f(x):", "import numpy as\nimport os"]
    assert result.stdout == saved[1] + "\n" + saved[3] + "\n"
    assert result.stderr.count("tokens/round") == 2


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """The options for a pair of K2.6's layout: INT4, shards, tiktoken, template, drafter."""
    root = tmp_path_factory.mktemp("kimi")
    config = target_config("k2.6", layers=2)
    write_target(root / "target", config, shard_bytes=2_000_000, seed=0)
    write_drafter(root / "drafter", drafter_config("k2.6", config), shard_bytes=10**9, seed=0)
    return "--model", str(root / "target"), "--drafter", str(root / "drafter")


@pytest.mark.timeout(900)
def test_two_ranks_say_what_one_says(kimi, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the second rank
    lines = ["hello", "/thinking off", "日本 and a < b?"]
    args = ["--temperature", "0", "--dtype", "float64", "--max-new-tokens", "10", "--max-context", "256"]
    said = []
    for tp in ("1", "2"):
        file = tmp_path / f"{tp}.json"
        result = chat(*kimi, *args, "--budget", "8", "--tp", tp, text="\n".join([*lines, f"/save {file}"]))
        assert result.exit_code == 0, result.output
        said.append((result.stdout, json.loads(file.read_text())))
    assert said[0] == said[1]
    thought, answer = said[0][1][1::2]
    assert min(len(thought["reasoning_content"]), len(answer["content"])) > 10
    assert said[0][0].endswith(f"{answer['content']}\n")


def test_a_chat_with_a_model_of_kimi_k26_layout(kimi, tmp_path):
    file = tmp_path / "c.json"
    lines = ["hello", "/think show", "again", "/thinking off", "and now?", f"/save {file}"]
    limits = ["--max-new-tokens", "8", "--max-context", "256", "--budget", "8"]
    result = chat(*kimi, "--system", "be brief", "--seed", "1", *limits, text="\n".join(lines))
    assert result.exit_code == 0, result.output
    system, *turns = json.loads(file.read_text())
    assert system == {"role": "system", "content": "be brief"}
    assert [t["content"] for t in turns[::2]] == ["hello", "again", "and now?"]
    first, second, third = turns[1::2]
    assert first["reasoning_content"]  # the layout opens with it
    assert "reasoning_content" not in third
    unfolded = "\n\n".join(filter(None, [second["reasoning_content"], second["content"]]))
    folded = first["reasoning_content"] + "\n"
    assert result.stdout == "".join(f"{text}\n" for text in (first["content"], unfolded, third["content"]))
    assert folded in result.stderr  # `/think show` shows what was thought before


@pytest.mark.parametrize(
    ("args", "text", "message"),
    [
        ([], "hi", "`draftwood chat --raw` continues each input"),
        (["--raw", "--system", "x"], "hi", "neither --system nor --thinking"),
        (["--raw", "--max-new-tokens", "0"], "hi", "max_new_tokens"),
        (["--raw", "--budget", "8", "--max-context", "8"], "a b c d e f g h i j k", "the context holds 8"),
    ],
)
def test_what_cannot_be_done_is_one_error_and_exit_code_2(args, text, message):
    result = chat(*args, text=text)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


class OnTerminal:
    """`draftwood chat` on a pseudo-terminal."""

    def __init__(self, *args, state):
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ |= {"XDG_STATE_HOME": str(state), "TERM": "xterm", "OMP_NUM_THREADS": "1"}
            os.environ |= {"NO_COLOR": "", "INPUTRC": os.devnull}  # whatever holds where the tests run
            code = "from draftwood.cli import main; main()"
            os.execv(sys.executable, [sys.executable, "-c", code, "chat", *args])
        self._unread = ""

    def read_until(self, pattern):
        """What came up to and with the pattern."""
        deadline = time.monotonic() + SECONDS
        while not (match := re.search(pattern, self._unread)):
            assert time.monotonic() < deadline, f"no {pattern} in {self._unread!r}"
            if select.select([self._fd], [], [], 1.0)[0]:
                self._unread += os.read(self._fd, 65536).decode(errors="replace")
        seen, self._unread = self._unread[: match.end()], self._unread[match.end() :]
        return seen

    def type(self, keys):
        self.read_until(r"> $")
        os.write(self._fd, keys.encode())

    def press(self, key):
        os.write(self._fd, key.encode())

    def exit_code(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.timeout(900)
def test_a_terminal_stops_replies_recalls_lines_and_is_left_by_ctrl_d(tmp_path):
    terminal = OnTerminal("--raw", "--budget", "8", "--max-new-tokens", "900", "--seed", "2", state=tmp_path)
    terminal.type("def fib(n):\n")
    terminal.read_until("return")
    terminal.press("\x03")
    assert "\x1b[2minterrupted" in terminal.read_until("interrupted")
    terminal.type("/max 3\n")
    terminal.type("\x1b[A\x1b[A\n")  # two lines up: the engine goes on
    assert "3 tokens, cut there" in terminal.read_until("tokens/round")
    terminal.type("/nope\n")
    terminal.read_until("error: /nope: no such command")
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    assert (tmp_path / "draftwood" / "chat_history").read_text().split("\n")[:2] == ["def fib(n):", "/max 3"]
