"""The commands of a chat: lines that begin with a slash and a word."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftwood.chat.conversation import ChatError, Conversation
from draftwood.chat.session import NO_LIMIT, Session

if TYPE_CHECKING:
    from draftwood.chat.repl import Repl

_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
MULTI_LINE = 'A trailing \\ goes on to the next line; """ begins and ends a text of several lines.'


@dataclass(frozen=True)
class Command:
    """What follows the name is its argument; `run` gets it stripped."""

    usage: str
    help: str
    run: Callable[[Repl, str], None]


def parse(line: str) -> tuple[str, str] | None:
    """Name and argument of a command, or None for text to the model."""
    match = _COMMAND.fullmatch(line.rstrip())
    return match and (match[1], (match[2] or "").strip())


def run(repl: Repl, name: str, argument: str) -> None:
    """Run a command. Raises `ChatError` if there is none of that name."""
    command = COMMANDS.get(name)
    if command is None:
        raise ChatError(f'/{name}: no such command; `/help` lists them; text that begins so goes between """')
    command.run(repl, argument)


def _help(repl: Repl, argument: str) -> None:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:{width}}  {command.help}" for command in COMMANDS.values()]
    keys = "Ctrl-C stops a reply and keeps what there is of it; Ctrl-D leaves."
    repl.screen.say("\n".join([*lines, MULTI_LINE, keys]))


def _regenerate(repl: Repl, argument: str) -> None:
    session = repl.session
    newest = session.conversation.asked_again()[-1].content
    repl.show(session.regenerate, newest)
    if session.params.temperature == 0:
        repl.screen.say("at temperature 0 the seed changes nothing; `/temperature 1` would")


def _undo(repl: Repl, argument: str) -> None:
    repl.screen.say(f"taken back: {_short(repl.session.conversation.undo())}")


def _clear(repl: Repl, argument: str) -> None:
    repl.session.conversation.clear()
    repl.screen.say("the conversation starts anew")


def _trim(repl: Repl, argument: str) -> None:
    session = repl.session
    if session.layout.continues:
        raise ChatError("/trim: the model sees the newest text only, so there is nothing to trim")
    n = session.trim()
    repl.screen.say(f"{_count(n, 'turn')} forgotten; context {session.context()}/{session.model.max_context}")


def _system(repl: Repl, argument: str) -> None:
    session = repl.session
    if session.layout.continues:
        raise ChatError("/system: a model that only continues text takes no system message")
    if argument:
        session.conversation.set_system(None if argument == "-" else argument)
    text = session.conversation.system
    repl.screen.say("no system message" if text is None else f"system: {text}")


def _save(repl: Repl, argument: str) -> None:
    path = _path("save", argument)
    if path.exists() and path not in repl.own_files:
        raise ChatError(f"/save: {path} exists and is no file of this chat; choose another name")
    conversation = repl.session.conversation
    conversation.save(path)
    repl.own_files.add(path)
    repl.screen.say(f"{_count(len(conversation.messages), 'message')} saved to {path}")


def _load(repl: Repl, argument: str) -> None:
    path = _path("load", argument)
    conversation = repl.session.conversation = Conversation.load(path)
    repl.own_files.add(path)
    repl.screen.say(f"{_count(len(conversation.messages), 'message')} loaded from {path}")


def _stats(repl: Repl, argument: str) -> None:
    session, conversation = repl.session, repl.session.conversation
    outputs = [reply.output for reply in session.replies]
    turns = f"{_count(conversation.n_turns, 'turn')}, {conversation.n_interrupted} interrupted"
    repl.screen.say(f"{turns}; {_count(len(outputs), 'reply', 'replies')} in this session")
    repl.screen.say(_settings(session))
    if not outputs:
        return
    tokens, rounds = sum(len(o.token_ids) for o in outputs), sum(len(o.rounds) for o in outputs)
    prefill = sum(o.prefill_seconds for o in outputs)
    decode = sum(sum(o.stage_seconds.values()) for o in outputs) - prefill
    speed = f"{tokens / rounds:.2f} tokens/round, {tokens / decode:.1f} tokens/s"
    repl.screen.say(f"{tokens} tokens in {_count(rounds, 'round')}: {speed}; prefill {prefill:.2f} s")
    repl.screen.say(f"latest reply: {session.replies[-1].stats}, seed {outputs[-1].seed}")


def _setting(field: str) -> Callable[[Repl, str], None]:
    def run(repl: Repl, argument: str) -> None:
        if argument:
            repl.session.configure(field, argument)
        repl.screen.say(_settings(repl.session))

    return run


def _thinking(repl: Repl, argument: str) -> None:
    if repl.session.layout.continues:
        raise ChatError("/thinking: a model that only continues text does not think first")
    repl.session.thinking = _choice("thinking", argument, "on", "off")
    repl.screen.say(_settings(repl.session))


def _think(repl: Repl, argument: str) -> None:
    repl.show_reasoning = _choice("think", argument, "show", "hide")
    latest = repl.session.latest
    if repl.show_reasoning and latest is not None and latest.message.reasoning_content:
        repl.screen.say(latest.message.reasoning_content.strip("\n"))


def _exit(repl: Repl, argument: str) -> None:
    repl.leaving = True


COMMANDS = {
    "help": Command("/help", "this list", _help),
    "regenerate": Command("/regenerate", "another reply to the newest message, with a new seed", _regenerate),
    "undo": Command("/undo", "take back the newest message and its reply", _undo),
    "trim": Command("/trim", "forget the oldest turns until half of the context is free", _trim),
    "clear": Command("/clear", "forget all turns; the system message stays", _clear),
    "system": Command("/system [TEXT]", "show or set the system message; `-` removes it", _system),
    "save": Command("/save FILE", "write the messages as JSON", _save),
    "load": Command("/load FILE", "go on with saved messages", _load),
    "stats": Command("/stats", "numbers and settings of this session", _stats),
    "seed": Command("/seed [N]", "show or set the seed of every reply", _setting("seed")),
    "temperature": Command("/temperature [X]", "show or set it; 0 is greedy", _setting("temperature")),
    "max": Command("/max [N]", "show or set how many tokens a reply may have", _setting("max_new_tokens")),
    "thinking": Command("/thinking on|off", "whether the model thinks before it answers", _thinking),
    "think": Command("/think show|hide", "unfold or fold what it thinks", _think),
    "exit": Command("/exit", "leave", _exit),
}


def _settings(session: Session) -> str:
    p = session.params
    limit = "what fits" if p.max_new_tokens == NO_LIMIT else str(p.max_new_tokens)
    seed = "a new one each time" if p.seed is None else str(p.seed)
    thinking = {None: "the model's default", True: "on", False: "off"}[session.thinking]
    parts = [f"temperature {p.temperature:g}", f"top-p {p.top_p:g}", f"max {limit}", f"seed: {seed}"]
    return ", ".join(parts if session.layout.continues else [*parts, f"thinking: {thinking}"])


def _choice(name: str, argument: str, yes: str, no: str) -> bool:
    if argument not in (yes, no):
        raise ChatError(f"/{name}: expected `{yes}` or `{no}`, got `{argument}`")
    return argument == yes


def _path(name: str, argument: str) -> Path:
    if not argument:
        raise ChatError(f"/{name}: expected a file name")
    return Path(argument).expanduser().absolute()


def _count(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
