"""Where a chat is read from and written to: a terminal, or a pipe. Knows nothing of models or commands."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol, Self

from draftwood.chat.layout import Piece
from draftwood.control_characters import fit_for, shown

HISTORY_LINES = 2000

ENDINGS = (signal.SIGTERM, signal.SIGHUP) if hasattr(signal, "SIGHUP") else (signal.SIGTERM,)


class Screen(Protocol):
    """What the dialogue needs of its surroundings."""

    interactive: bool
    """Whether somebody sits there: then an error is shown and the dialogue goes on."""

    def ask(self, prompt: str) -> str:
        """One line of input. Raises EOFError at the end of all input, KeyboardInterrupt on Ctrl-C."""
        ...

    def say(self, text: str) -> None:
        """A remark of the program's own."""
        ...

    def reply(self, pieces: Iterator[Piece], *, continued: str, reasoning: bool) -> None:
        """Show a reply as it comes.

        Args:
            pieces: the reply.
            continued: text that the reply goes on from, or nothing.
            reasoning: whether to show the pieces that are reasoning.
        """
        ...


class Pipe:
    """Input line by line from stdin, replies to stdout, remarks to stderr."""

    interactive = False

    def ask(self, prompt: str) -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def say(self, text: str) -> None:
        print(fit_for(sys.stderr, text), file=sys.stderr)

    def reply(self, pieces: Iterator[Piece], *, continued: str, reasoning: bool) -> None:
        kind = None
        for piece in pieces:
            if piece.kind == "reasoning" and not reasoning:
                continue
            if kind not in (None, piece.kind):
                sys.stdout.write("\n\n")
            kind = piece.kind
            sys.stdout.write(fit_for(sys.stdout, piece.text))
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()


class Terminal:
    """A person at a terminal: line editing, dimmed remarks, reasoning dimmed or folded."""

    interactive = True

    def __init__(self, *, colours: bool) -> None:
        self._colours = colours
        self._at_start = True  # of a line

    def ask(self, prompt: str) -> str:
        try:
            return input(prompt)
        except (EOFError, KeyboardInterrupt):
            self._write("\n")
            raise

    def say(self, text: str) -> None:
        self._write(text, dim=True)
        self._write("\n")

    def reply(self, pieces: Iterator[Piece], *, continued: str, reasoning: bool) -> None:
        self._write(continued, dim=True)
        kind, folded_at = None, 0.0
        try:
            for piece in pieces:
                folded = piece.kind == "reasoning" and not reasoning
                text = piece.text
                if piece.kind != kind:
                    if kind is not None:
                        self._next_part(folded_at)
                        text = text.lstrip("\n")
                    folded_at = time.monotonic() if folded else 0.0
                    self._write("thinking …" if folded else "", dim=True)
                kind = piece.kind
                if not folded:
                    self._write(text, dim=kind != "content")
        finally:
            if not self._at_start:
                self._write("\n")

    def _next_part(self, folded_at: float) -> None:
        """Part reasoning from what comes after it."""
        if folded_at:
            sys.stdout.write("\r\x1b[K" if self._colours else " ")
            seconds = time.monotonic() - folded_at
            self._write(f"thought for {seconds:.1f} s, `/think show` shows it", dim=True)
        self._write("\n" if self._at_start else "\n\n")

    def _write(self, text: str, *, dim: bool = False) -> None:
        if not text:
            return
        self._at_start = text.endswith("\n")
        text = shown(text)
        sys.stdout.write(f"\x1b[2m{text}\x1b[0m" if dim and self._colours else text)
        sys.stdout.flush()


def wants_colours() -> bool:
    """Whether the terminal on stdout can dim text, and its owner does not mind."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def history_file() -> Path:
    """Where input lines are kept: in the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "draftwood" / "chat_history"


@contextmanager
def line_history(path: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Arrow keys recall earlier lines, of earlier chats too; new ones are added to the file at the end.

    A file that cannot be used is a warning: the chat goes on with a history of its own.
    """
    if importlib.util.find_spec("readline") is None:
        warn("this Python has no readline: no line editing and no history")
        yield
        return
    import readline

    readline.set_history_length(HISTORY_LINES)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.chmod(0o600)  # of an older one too
        readline.read_history_file(path)
    except OSError as e:
        warn(f"no history from earlier chats: {e}")
    known = readline.get_current_history_length()
    try:
        yield
    finally:
        try:
            readline.append_history_file(readline.get_current_history_length() - known, path)
        except OSError as e:
            warn(f"history not saved: {e}")


@contextmanager
def orderly_ending() -> Iterator[None]:
    """While entered, SIGTERM and the closing of the terminal raise `SystemExit`, unless they are ignored."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = {s: signal.getsignal(s) for s in ENDINGS}
    before = {s: handler for s, handler in before.items() if handler is not signal.SIG_IGN}
    for s in before:
        signal.signal(s, leave)
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


class Interrupt:
    """While entered, Ctrl-C asks the reply to stop once the model's pass under way has ended; the third one leaves.

    An exception in the midst of a pass could leave pages or ranks of the engine in disorder, so none is raised before,
    and after one the program ends.
    """

    def __init__(self) -> None:
        self._presses = 0

    def __call__(self) -> bool:
        """Whether a stop was asked for."""
        return self._presses > 0

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        if kind is KeyboardInterrupt:
            raise SystemExit(130)

    def _pressed(self, signum: int, frame: FrameType | None) -> None:
        self._presses += 1
        if self._presses == 2:
            os.write(2, b"\nstopping after this pass of the model; Ctrl-C once more leaves\n")
        elif self._presses > 2:
            raise KeyboardInterrupt
