"""How messages become the tokens of a prompt, and a reply's tokens become text.

Two layouts: a model's own chat template, and the plain text of the newest message, for models that only continue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from draftwood.chat.conversation import Message
from draftwood.models.chat import ChatTemplate
from draftwood.models.chat_reply import ReplyDelta, ReplyParser
from draftwood.models.tokenizer import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class Piece:
    """Some of a reply's text, as it arrives."""

    kind: Literal["reasoning", "content", "tool_call"]
    text: str


class ReplyReader(Protocol):
    """Reads one reply, token by token."""

    @property
    def tool_calls(self) -> Sequence[dict[str, Any]]:
        """The calls so far, as the OpenAI API has them."""
        ...

    def push(self, token_ids: Sequence[int]) -> Iterator[Piece]: ...

    def finish(self) -> Iterator[Piece]:
        """What was held back, once no more tokens come."""
        ...


class Layout(Protocol):
    """What a conversation looks like to the model."""

    continues: bool
    """Whether a reply is the rest of the user's text rather than an answer to it."""
    stop_token_ids: Sequence[int]

    def prompt(self, messages: Sequence[Message], *, thinking: bool | None) -> list[int]: ...

    def reader(self, prompt: Sequence[int]) -> ReplyReader:
        """For the tokens generated after `prompt`."""
        ...


class TemplateLayout:
    """The model's own chat template."""

    continues = False

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.stop_token_ids: Sequence[int] = template.stop_token_ids

    def prompt(self, messages: Sequence[Message], *, thinking: bool | None) -> list[int]:
        return self._template.render([m.as_dict(own=False) for m in messages], thinking=thinking)

    def reader(self, prompt: Sequence[int]) -> ReplyReader:
        return TemplateReader(self._template.parser(prompt))


class TemplateReader:
    """Reasoning and content as they are, tool calls as a line each."""

    def __init__(self, parser: ReplyParser) -> None:
        self._parser = parser

    @property
    def tool_calls(self) -> Sequence[dict[str, Any]]:
        return [call.as_message() for call in self._parser.reply.tool_calls]

    def push(self, token_ids: Sequence[int]) -> Iterator[Piece]:
        return map(_piece, self._parser.push(token_ids))

    def finish(self) -> Iterator[Piece]:
        return map(_piece, self._parser.finish())


def _piece(delta: ReplyDelta) -> Piece:
    if delta.kind == "tool_call":
        return Piece("tool_call", ("\n" if delta.index else "") + f"calls {delta.name} ")
    return Piece("tool_call" if delta.kind == "arguments" else delta.kind, delta.text)


class RawLayout:
    """The newest message alone, to be continued; the model sees nothing of what came before."""

    continues = True
    stop_token_ids: Sequence[int] = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message], *, thinking: bool | None) -> list[int]:
        return self._tokenizer.encode(messages[-1].content)

    def reader(self, prompt: Sequence[int]) -> ReplyReader:
        return RawReader(self._tokenizer)


class RawReader:
    """All text is content."""

    tool_calls: Sequence[dict[str, Any]] = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoder = StreamDecoder(tokenizer)

    def push(self, token_ids: Sequence[int]) -> Iterator[Piece]:
        yield from _content(self._decoder.push(token_ids))

    def finish(self) -> Iterator[Piece]:
        yield from _content(self._decoder.flush())


def _content(text: str) -> Iterator[Piece]:
    if text:
        yield Piece("content", text)
