"""A chat session: a conversation, the model that answers, and how it is asked to. Knows no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from draftwood.chat.conversation import ChatError, Conversation, Message
from draftwood.chat.layout import Layout, Piece, ReplyReader
from draftwood.engine.outputs import RequestOutput, StreamEvent
from draftwood.engine.sampling_params import MAX_INT32, MAX_SEED, SamplingParams
from draftwood.models.errors import ModelError
from draftwood.models.json_config import read_json

NO_LIMIT = MAX_INT32
"""`max_new_tokens` for replies that may take all the context leaves."""

_SUGGESTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling(folder: Path, **chosen: Any) -> SamplingParams:
    """How to sample: as chosen, else as the model's `generation_config.json` suggests, else at temperature 1.

    Args:
        folder: the model's.
        chosen: fields of `SamplingParams`; None leaves one to the model.

    Raises:
        ModelError: the file is no JSON object, or a value taken from it is out of its range. ValidationError: a chosen one is.
    """
    file = folder / "generation_config.json"
    suggested = read_json(file) if file.exists() else {}
    fields = {name: suggested.get(name) for name in _SUGGESTED}
    if suggested.get("do_sample") is False:
        fields = {"temperature": 0.0}
    elif fields["temperature"] is None:
        fields["temperature"] = 1.0
    given = {name: value for name, value in chosen.items() if value is not None}
    fields = {name: value for name, value in fields.items() if value is not None and name not in given}
    try:
        SamplingParams.model_validate(fields)
    except ValidationError as e:
        error = e.errors()[0]
        raise ModelError(f"{file}: key `{error['loc'][0]}`: {error['msg']}, got {error['input']!r}") from e
    return SamplingParams.model_validate(fields | given)


class Model(Protocol):
    """The part of `LLM` that a chat needs."""

    max_context: int

    def stream(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Iterator[StreamEvent]: ...


@dataclass(frozen=True)
class Reply:
    """A reply that has ended."""

    message: Message
    output: RequestOutput
    first_token_seconds: float
    """From the call to the first token, prefill included."""
    max_context: int

    @property
    def context(self) -> int:
        """Tokens of prompt and reply."""
        return len(self.output.prompt_token_ids) + len(self.output.token_ids)

    @property
    def fills_context(self) -> bool:
        return self.output.finish_reason == "length" and self.context >= self.max_context

    @property
    def stats(self) -> str:
        """One line of numbers."""
        out = self.output
        cut = out.finish_reason == "length" and not self.fills_context
        return " · ".join(
            [
                f"{len(out.token_ids)} tokens" + (", cut there" if cut else ""),
                f"{out.tokens_per_second:.1f} tokens/s",
                f"{out.tokens_per_round:.2f} tokens/round",
                f"first after {self.first_token_seconds:.2f} s",
                f"context {self.context}/{self.max_context}",
            ]
        )


class Session:
    """One person's conversation with one model.

    The conversation changes only when a reply has ended: an error, or a generator left early, changes nothing.
    """

    def __init__(
        self,
        model: Model,
        layout: Layout,
        params: SamplingParams,
        *,
        thinking: bool | None = None,
        conversation: Conversation | None = None,
    ) -> None:
        self.model, self.layout, self.params, self.thinking = model, layout, params, thinking
        self.conversation = conversation or Conversation()
        self.replies: list[Reply] = []
        """Every reply of this session, those taken back included."""
        self.latest: Reply | None = None
        self._attempt = 0  # replies asked for with the present seed and turn

    def send(self, text: str, stop: Callable[[], bool]) -> Iterator[Piece]:
        """Say `text`; yields the reply as it comes. Afterwards `latest` is the reply, or None if it was stopped before
        it said anything; then `text` is taken back too.

        Args:
            text: what the user says.
            stop: asked after every round; true ends the reply, and what there is of it is kept and marked.

        Raises:
            ChatError: the conversation does not fit the context, or the model failed.
        """
        self._attempt = 0
        yield from self._answer(self.conversation.asking(text), stop)

    def regenerate(self, stop: Callable[[], bool]) -> Iterator[Piece]:
        """Another reply in place of the newest one, with the next seed, or the one set since; as `send`."""
        yield from self._answer(self.conversation.asked_again(), stop)

    def configure(self, field: str, value: object) -> None:
        """Set a sampling parameter. Raises `ChatError` if the value is out of its range."""
        try:
            self.params = SamplingParams.model_validate(self.params.model_dump() | {field: value})
        except ValidationError as e:
            raise ChatError(f"{field}: {e.errors()[0]['msg']}, got {value}") from e
        if field == "seed":
            self._attempt = 0

    def context(self) -> int:
        """Tokens of the conversation so far, as the next prompt would have them."""
        messages = self.conversation.messages
        return len(self.layout.prompt(messages, thinking=self.thinking)) if messages else 0

    def trim(self) -> int:
        """Forget the oldest turns, but never the newest, until half of the context is free; how many went."""
        before = self.conversation.n_turns
        while self.conversation.n_turns > 1 and self.context() > self.model.max_context // 2:
            self.conversation.drop_oldest()
        return before - self.conversation.n_turns

    def _answer(self, messages: tuple[Message, ...], stop: Callable[[], bool]) -> Iterator[Piece]:
        prompt = self.layout.prompt(messages, thinking=self.thinking)
        seed = self.params.seed
        params = self.params.model_copy(
            update={
                "seed": None if seed is None else (seed + self._attempt) % (MAX_SEED + 1),
                "max_new_tokens": min(self.params.max_new_tokens, self._room(prompt)),
                "stop_token_ids": (*self.params.stop_token_ids, *self.layout.stop_token_ids),
            }
        )
        self._attempt += 1
        self.latest = None
        draft = _Draft(self.layout.reader(prompt))
        yield from draft.follow(self.model.stream([prompt], params), stop)
        if draft.said_something:
            self.latest = draft.reply(self.model.max_context)
            self.conversation = Conversation((*messages, self.latest.message))
            self.replies.append(self.latest)

    def _room(self, prompt: Sequence[int]) -> int:
        """Tokens that the context leaves for a reply. Raises `ChatError` if none."""
        room = self.model.max_context - len(prompt)
        if room >= 1:
            return room
        size = f"{len(prompt)} tokens, and the context holds {self.model.max_context}, reply included"
        if self.layout.continues or self.conversation.n_turns == 0:
            raise ChatError(f"not sent: the message has {size}; shorten it")
        raise ChatError(
            f"not sent: the conversation has {size}; `/trim` forgets the oldest turns, `/clear` all of them, "
            "then say it again"
        )


class _Draft:
    """A reply that is still coming."""

    def __init__(self, reader: ReplyReader) -> None:
        self._reader = reader
        self._text: dict[str, str] = {"reasoning": "", "content": ""}
        self._first_token_seconds = 0.0
        self._interrupted = False
        self.output: RequestOutput | None = None

    def follow(self, events: Iterator[StreamEvent], stop: Callable[[], bool]) -> Iterator[Piece]:
        started = time.perf_counter()
        try:
            for event in events:
                if self.output is None:
                    self._first_token_seconds = time.perf_counter() - started
                self.output = event.output
                yield from self._kept(self._reader.push(event.token_ids))
                if event.output.finish_reason is None and stop():
                    self._interrupted = True
                    break
        finally:
            if isinstance(events, Generator):
                events.close()  # the engine gives the request's pages back
        yield from self._kept(self._reader.finish())
        if self.output is not None and self.output.error is not None:
            raise ChatError(self.output.error)

    @property
    def said_something(self) -> bool:
        return not self._interrupted or any(self._text.values()) or bool(self._reader.tool_calls)

    def reply(self, max_context: int) -> Reply:
        assert self.output is not None
        message = Message(
            role="assistant",
            content=self._text["content"],
            reasoning_content=self._text["reasoning"] or None,
            tool_calls=tuple(self._reader.tool_calls) or None,
            interrupted=self._interrupted,
        )
        return Reply(message, self.output, self._first_token_seconds, max_context)

    def _kept(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if piece.kind in self._text:
                self._text[piece.kind] += piece.text
            yield piece
