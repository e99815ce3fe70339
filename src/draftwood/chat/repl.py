"""The dialogue: read, run a command or send, show the reply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from draftwood.cache.pages import OutOfPagesError
from draftwood.chat import commands
from draftwood.chat.conversation import ChatError
from draftwood.chat.layout import Piece
from draftwood.chat.screen import Interrupt, Screen
from draftwood.chat.session import Session

FENCE = '"""'
Stop = Callable[[], bool]


@dataclass(frozen=True)
class Entry:
    """What was typed. `fenced`: between triple quotes, so never a command."""

    text: str
    fenced: bool = False


def read_entry(ask: Callable[[str], str]) -> Entry:
    """One entry: a line, lines that end with a backslash and the one after them, or a block between triple quotes.

    Raises:
        EOFError: there is no more input. ChatError: the input ends within an entry.
    """
    line = ask("> ")
    fenced = line.startswith(FENCE)
    lines = [line.removeprefix(FENCE)] if fenced else [line]
    try:
        if fenced:
            while not lines[-1].endswith(FENCE):
                lines.append(ask("... "))
            lines[-1] = lines[-1].removesuffix(FENCE)
        else:
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1].removesuffix("\\")
                lines.append(ask("... "))
    except EOFError:
        raise ChatError(
            f"the input ended before the closing {FENCE}" if fenced else "the input ended after a \\"
        ) from None
    text = "\n".join(lines)
    return Entry(text.removeprefix("\n").removesuffix("\n") if fenced else text, fenced)


class Repl:
    """Reads entries and acts on them until the input ends or `/exit`."""

    def __init__(self, session: Session, screen: Screen) -> None:
        self.session, self.screen = session, screen
        self.show_reasoning = screen.interactive
        self.own_files: set[Path] = set()
        """Files this chat has saved or loaded, which it may replace."""
        self.leaving = False

    def run(self) -> None:
        """Raises, if the screen is not interactive, what a command or reply raises: a script must not go on."""
        while not self.leaving:
            try:
                self._step()
            except KeyboardInterrupt:  # what was typed is thrown away, as in a shell
                if not self.screen.interactive:
                    raise
            except (ValueError, OSError, OutOfPagesError) as e:
                if not self.screen.interactive or isinstance(e, BrokenPipeError):
                    raise
                self.screen.say(f"error: {e}")

    def show(self, reply: Callable[[Stop], Iterator[Piece]], asked: str) -> None:
        """Show a reply to `asked` as it comes, then its numbers."""
        continued = asked if self.session.layout.continues else ""
        interrupt = Interrupt()
        with interrupt if self.screen.interactive else nullcontext():
            self.screen.reply(reply(interrupt), continued=continued, reasoning=self.show_reasoning)
        latest = self.session.latest
        if latest is None:
            self.screen.say("stopped before it said anything; your message is taken back")
            return
        if latest.message.interrupted:
            self.screen.say("interrupted; what there is of the reply stays in the conversation")
        self.screen.say(latest.stats)
        if latest.fills_context and not self.session.layout.continues:
            self.screen.say("the context is full: `/trim` forgets the oldest turns, `/clear` all of them")

    def _step(self) -> None:
        try:
            entry = read_entry(self.screen.ask)
        except EOFError:
            self.leaving = True
            return
        command = None if entry.fenced else commands.parse(entry.text)
        if command is not None:
            commands.run(self, *command)
        elif entry.text.strip():
            self.show(lambda stop: self.session.send(entry.text, stop), entry.text)
