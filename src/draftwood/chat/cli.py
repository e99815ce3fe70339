"""`draftwood chat`: its options, and the parts put together."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from draftwood.config import Mode, parse_budget

if TYPE_CHECKING:
    from draftwood.chat.layout import Layout
    from draftwood.chat.session import Session
    from draftwood.engine.llm import LLM

RAW_TOKENS = 128
"""Tokens of a continuation unless told otherwise: models that continue text seldom come to an end."""


def chat(
    model: Annotated[Path | None, typer.Option(help="Target folder; default: the bundled pair.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="DFlash drafter folder.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: continue each input.")] = False,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    thinking: Annotated[bool | None, typer.Option(help="Default: as the template says.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's own.")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 keeps all tokens; default: the model's own.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help=f"Per reply; default: what fits, {RAW_TOKENS} with --raw.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of every reply; default: a new one each time.")] = None,
    mode: Annotated[Mode, typer.Option(help="How to draft; the text is the same in all three.")] = "tree",
    budget: Annotated[str, typer.Option(help="Slots per tree, root included, or `auto`.")] = "auto",
    tp: Annotated[int, typer.Option(help="Ranks that share the weights, a GPU each.")] = 1,
    max_context: Annotated[int | None, typer.Option(help="Tokens; default: the model's limit.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float64.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Talk with a model. Piped input is taken line by line, each a message, with the replies on stdout."""
    from draftwood import bundled
    from draftwood.chat.conversation import ChatError
    from draftwood.chat.session import NO_LIMIT, Session, sampling
    from draftwood.models.folder import resolve

    if raw and (system is not None or thinking is not None):
        raise ChatError("--raw: a model that only continues text takes neither --system nor --thinking")
    limit = max_new_tokens if max_new_tokens is not None else RAW_TOKENS if raw else NO_LIMIT
    folder = resolve(model or bundled.pair()[0])
    params = sampling(
        folder,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=limit,
        seed=seed,
    )
    layout = _layout(folder, raw)
    with Console(stderr=True).status("loading the model"):
        settings: dict[str, Any] = {
            "mode": mode,
            "budget": parse_budget(budget),
            "max_context": max_context,
            "tp": tp,
        }
        llm = _load(model, drafter, dtype=dtype, device=device, **settings)
    with llm:
        session = Session(llm, layout, params, thinking=thinking)
        if system is not None:
            session.conversation.set_system(system)
        _talk(session, "the bundled model" if model is None else str(model))


def _layout(folder: Path, raw: bool) -> Layout:
    """Read before the model is loaded, so that a folder without a template is known at once."""
    from draftwood.chat.layout import RawLayout, TemplateLayout
    from draftwood.models.chat import ChatTemplate
    from draftwood.models.errors import ModelError
    from draftwood.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(folder)
    if raw:
        return RawLayout(tokenizer)
    try:
        return TemplateLayout(ChatTemplate.from_folder(folder, tokenizer))
    except ModelError as e:
        raise ModelError(f"{e}; `draftwood chat --raw` continues each input instead") from e


def _load(model: Path | None, drafter: Path | None, **settings: Any) -> LLM:
    """Load, and decode a little, so that the first reply does not wait for what is measured and built once."""
    from draftwood.engine.llm import LLM
    from draftwood.engine.sampling_params import SamplingParams

    llm = LLM(model, drafter, max_batch=1, **settings)
    llm.generate([[0]], SamplingParams(max_new_tokens=2, ignore_eos=True))
    return llm


def _talk(session: Session, name: str) -> None:
    from draftwood.chat.repl import Repl
    from draftwood.chat.screen import (
        Pipe,
        Terminal,
        history_file,
        line_history,
        orderly_ending,
        wants_colours,
    )

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        Repl(session, Pipe()).run()
        return
    screen = Terminal(colours=wants_colours())
    does = "continues what you type" if session.layout.continues else "answers"
    screen.say(f"{name} {does}; `/help` lists commands, Ctrl-D leaves")
    history = history_file()
    with line_history(history, screen.say), orderly_ending():
        try:
            Repl(session, screen).run()
        except BaseException:
            if session.conversation.n_turns:
                name = f"chat_rescued-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
                screen.say(_rescue(session, history.with_name(name)))
            raise


def _rescue(session: Session, path: Path) -> str:
    """Keep the conversation; what to say about it."""
    try:
        session.conversation.save(path)
    except OSError as e:
        return f"the conversation so far could not be kept: {e}"
    return f"the conversation so far is kept: `/load {path}`"
