"""The dialogue with a scripted model: entries, commands, and what a terminal or a pipe shows."""

from __future__ import annotations

import io
import json
import signal

import pytest

from draftwood.chat.cli import _talk
from draftwood.chat.conversation import ChatError, Conversation
from draftwood.chat.layout import Piece
from draftwood.chat.repl import Entry, Repl, read_entry
from draftwood.chat.screen import Interrupt, Pipe, Terminal
from draftwood.chat.session import NO_LIMIT, Session
from draftwood.engine.sampling_params import SamplingParams
from support.scripted_chat import CharacterLayout, ScriptedModel


class ScriptedScreen:
    """Types lines; what it is told and shown is in `seen`."""

    def __init__(self, *lines, interactive=True):
        self.lines, self.interactive, self.seen = list(lines), interactive, []

    def ask(self, prompt):
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    def say(self, text):
        self.seen.append(text)

    def reply(self, pieces, *, continued, reasoning):
        self.seen.append("".join(p.text for p in pieces if reasoning or p.kind == "content"))


def chat(*lines, replies=(), interactive=True):
    session = Session(
        ScriptedModel(*replies), CharacterLayout(), SamplingParams(seed=1, max_new_tokens=NO_LIMIT)
    )
    repl = Repl(session, ScriptedScreen(*lines, interactive=interactive))
    repl.run()
    return repl


@pytest.mark.parametrize(
    ("lines", "entry"),
    [
        (["a b"], Entry("a b")),
        (["a\\", "b\\", ""], Entry("a\nb\n")),
        (['"""/help"""'], Entry("/help", fenced=True)),
        (['"""', "a\\", "", 'b"""'], Entry("a\\\n\nb", fenced=True)),
        (['"""a', '"""'], Entry("a", fenced=True)),
    ],
)
def test_entries_of_one_line_and_several(lines, entry):
    screen = ScriptedScreen(*lines)
    assert read_entry(screen.ask) == entry
    assert screen.lines == []


@pytest.mark.parametrize("line", ['"""a', "a\\"])
def test_input_that_ends_within_an_entry_is_an_error(line):
    with pytest.raises(ChatError, match="the input ended"):
        read_entry(ScriptedScreen(line).ask)


def test_a_chat_goes_on_after_errors_and_dropped_lines():
    repl = chat("/nope", "", KeyboardInterrupt, "hi", "/exit", "never", replies=[["<hm>yes\0"]])
    said = "\n".join(repl.screen.seen)
    assert "error: /nope: no such command" in said
    assert "hmyes" in said
    assert "4.0 tokens/s" not in said  # 8 tokens in rounds of half a second
    assert "8 tokens · 16.0 tokens/s · 8.00 tokens/round · first after" in said
    assert repl.screen.lines == ["never"]


def test_a_script_stops_at_the_first_error():
    with pytest.raises(ChatError, match="/nope"):
        chat("/nope", "hi", interactive=False)


def test_commands_change_the_conversation(tmp_path):
    file = tmp_path / "chat.json"
    repl = chat(
        "/system be brief",
        "/seed 5",
        "/thinking off",
        "/think hide",
        "one",
        "two",
        "/regenerate",
        f"/save {file}",
        "/undo",
        f"/save {file}",  # its own file, so it may
        "/clear",
        f"/load {file}",
        "/stats",
        "/system -",
        "three",
        replies=[["<hm>1\0"], ["2\0"], ["2b\0"], ["3\0"]],
    )
    prompts = ["S:be brief|U:one|-", *["S:be brief|U:one|A:1|U:two|-"] * 2, "U:one|A:1|U:three|-"]
    assert repl.session.model.prompts == prompts
    assert [p.seed for p in repl.session.model.params] == [5, 5, 6, 5]
    assert [m["content"] for m in json.loads(file.read_text())] == ["be brief", "one", "1"]
    said = repl.screen.seen
    assert "1" in said
    assert "taken back: two" in said
    assert any("1 turn, 0 interrupted; 3 replies" in s for s in said)
    assert any("at temperature 0 the seed changes nothing" in s for s in said)
    assert not any(s.startswith("error") for s in said)


def test_files_of_others_are_not_replaced(tmp_path):
    file = tmp_path / "thesis.txt"
    file.write_text("thesis")
    repl = chat(f"/save {file}", f"/load {file}", "/save", f"/load {tmp_path / 'none'}")
    assert file.read_text() == "thesis"
    errors = [s for s in repl.screen.seen if s.startswith("error")]
    assert len(errors) == 4
    assert "is no file of this chat" in errors[0]


def test_ctrl_c_while_a_reply_comes_stops_it_after_the_round():
    class Pressing(ScriptedScreen):
        def reply(self, pieces, **how):
            self.seen.append(next(pieces).text)
            signal.raise_signal(signal.SIGINT)
            self.seen += [p.text for p in pieces]

    session = Session(ScriptedModel(["ab", "cd"]), CharacterLayout(), SamplingParams())
    repl = Repl(session, Pressing("go"))
    handler = signal.getsignal(signal.SIGINT)
    repl.run()
    assert signal.getsignal(signal.SIGINT) is handler
    assert session.conversation.messages[-1].content == "ab"
    assert session.model.running == 0
    assert any("interrupted; what there is" in s for s in repl.screen.seen)


def test_the_third_ctrl_c_leaves(capfd):
    def press_thrice():
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)

    interrupt, handler = Interrupt(), signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit, match="130"), interrupt:
        press_thrice()
    assert interrupt()
    assert "once more leaves" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is handler


THOUGHT = "thought for 0.0 s, `/think show` shows it"
PIECES = [
    Piece("reasoning", "hm"),
    Piece("content", "\n\n"),
    Piece("content", "yes\x1b[2J"),
    Piece("content", "!"),
]


@pytest.mark.parametrize(
    ("colours", "reasoning", "shown"),
    [
        (True, True, "\x1b[2mhm\x1b[0m\n\nyes␛[2J!\n"),
        (False, True, "hm\n\nyes␛[2J!\n"),
        (True, False, "\x1b[2mthinking …\x1b[0m\r\x1b[K\x1b[2m" + THOUGHT + "\x1b[0m\n\nyes␛[2J!\n"),
        (False, False, "thinking … " + THOUGHT + "\n\nyes␛[2J!\n"),
    ],
)
def test_a_terminal_dims_or_folds_reasoning_and_is_not_driven_by_the_model(
    capsys, monkeypatch, colours, reasoning, shown
):
    monkeypatch.setattr("draftwood.chat.screen.time.monotonic", lambda: 100.0)
    Terminal(colours=colours).reply(iter(PIECES), continued="", reasoning=reasoning)
    assert capsys.readouterr().out == shown


def test_a_pipe_gets_the_text_as_it_is(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo"))
    pipe = Pipe()
    assert [pipe.ask("> "), pipe.ask("> ")] == ["one", "two"]
    with pytest.raises(EOFError):
        pipe.ask("> ")
    pipe.reply(iter(PIECES), continued="", reasoning=False)
    pipe.say("remark")
    assert capsys.readouterr() == ("\n\nyes\x1b[2J!\n", "remark\n")


def test_a_pipe_into_a_terminal_does_not_let_the_model_drive_it(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    Pipe().reply(iter(PIECES), continued="", reasoning=False)
    Pipe().say("\x1b[2J")
    assert capsys.readouterr() == ("\n\nyes␛[2J!\n", "\x1b[2J\n")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    Pipe().say("a\tb\x9b2J\r\x7f")
    assert capsys.readouterr().err == "a\tb\ufffd2J␍␡\n"


@pytest.fixture
def on_terminal(tmp_path, monkeypatch):
    """Talk, typing lines, until one of them is an exception; what is in the state folder afterwards."""

    class Typed(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def talk(lines, *replies):
        def typed(prompt):
            line = next(lines)
            return signal.raise_signal(line) if isinstance(line, int) else line

        lines = iter(lines)
        monkeypatch.setattr("sys.stdin", Typed())
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setattr("builtins.input", typed)
        _talk(Session(ScriptedModel(*replies), CharacterLayout(), SamplingParams()), "m")

    return talk, tmp_path / "state" / "draftwood"


@pytest.mark.parametrize(
    ("last", "ending"), [("and then?", TypeError), (signal.SIGHUP, SystemExit), (signal.SIGTERM, SystemExit)]
)
def test_what_ends_a_chat_by_force_keeps_the_conversation(last, ending, on_terminal, capsys):
    talk, state = on_terminal
    handlers = [signal.getsignal(s) for s in (signal.SIGHUP, signal.SIGTERM)]
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it may be ignored where the tests run
        with pytest.raises(ending):
            talk(["hi", last], ["yes\0"], [["no token"]])
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, handlers[0])
    assert signal.getsignal(signal.SIGTERM) is handlers[1]
    (rescued,) = state.glob("chat_rescued-*.json")
    assert f"/load {rescued}" in capsys.readouterr().out
    assert [m.content for m in Conversation.load(rescued).messages] == ["hi", "yes"]


def test_a_conversation_that_cannot_be_kept_is_no_other_error(on_terminal, capsys):
    talk, state = on_terminal
    state.parent.write_text("in the way of a folder")
    with pytest.raises(TypeError):
        talk(["hi", "and then?"], ["yes\0"], [["no token"]])
    said = capsys.readouterr().out
    assert "no history from earlier chats" in said
    assert "the conversation so far could not be kept" in said


def test_what_was_typed_is_for_the_user_alone(on_terminal):
    talk, state = on_terminal
    for loosened in (False, True):
        if loosened:
            (state / "chat_history").chmod(0o644)
        talk(["hi", "/exit"], ["yes\0"])
        assert state.stat().st_mode & 0o777 == 0o700
        assert (state / "chat_history").stat().st_mode & 0o777 == 0o600
