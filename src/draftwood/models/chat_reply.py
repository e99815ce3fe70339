"""A reply's tokens read back: reasoning, content and tool calls, piece by piece as they arrive.

Told apart by the ids of control tokens alone, so the same text typed as ordinary tokens stays text. No text is lost: what begins
like a tool call and isn't one ends up in the content, with an error that says why.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from draftwood.models.tokenizer import StreamDecoder, Tokenizer

THINK, END_THINK = "<think>", "</think>"
CALLS, END_CALLS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

_CALL_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)


@dataclass(frozen=True)
class ReplyDelta:
    """What some tokens added to a reply.

    kind "reasoning" or "content": `text` goes there. "tool_call": call number `index` begins, `id` and `name` say which.
    "arguments": `text` goes to the arguments of call number `index`.
    """

    kind: Literal["reasoning", "content", "tool_call", "arguments"]
    text: str = ""
    index: int | None = None
    id: str | None = None
    name: str | None = None


@dataclass
class ToolCall:
    """A call that the model asks for. `arguments` is what it wrote: a JSON object, unless `error` says otherwise."""

    id: str
    name: str
    arguments: str = ""
    error: str | None = None

    def as_message(self) -> dict[str, Any]:
        """The form it has in `tool_calls` of an assistant message."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass
class ChatReply:
    """A reply so far. `errors`: what was wrong with its tool calls, one sentence each."""

    reasoning_content: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def as_message(self) -> dict[str, Any]:
        """The assistant message to continue the conversation with."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.as_message() for call in self.tool_calls]
        return message


class ReplyParser:
    """Reads one reply. `push` and `finish` return what is new; `reply` holds all of it.

    Args:
        prompt: the tokens before the reply; if they end inside a `<think>`, the reply begins with reasoning.
        stop_token_ids: tokens that end a turn; they have no text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop_token_ids: Sequence[int]) -> None:
        self.reply = ChatReply()
        self._marks = {i: name for name in _HANDLERS if (i := _token_id(tokenizer, name)) is not None}
        self._stops = frozenset(stop_token_ids)
        control = self._stops.union(tokenizer.control_tokens.values())
        self._place = "reasoning" if self._ends_in_reasoning(prompt, control) else "content"
        self._in_section = False  # of tool calls
        self._held = ""  # text whose meaning the next mark decides
        self._decoder = StreamDecoder(tokenizer)
        self._new: list[ReplyDelta] = []

    def push(self, token_ids: Sequence[int]) -> list[ReplyDelta]:
        """What these tokens add; an unfinished UTF-8 character is held back."""
        for token in token_ids:
            mark = self._marks.get(token)
            if mark is not None:
                self._text(self._decoder.flush())
                _HANDLERS[mark](self)
            elif token not in self._stops:
                self._text(self._decoder.push([token]))
        return self._take()

    def finish(self) -> list[ReplyDelta]:
        """What was held back, once no more tokens come. A call still open is an error."""
        self._text(self._decoder.flush())
        self._leave()
        return self._take()

    def _ends_in_reasoning(self, prompt: Sequence[int], control: Collection[int]) -> bool:
        """Whether `<think>` is its latest mark. Beyond a control token is another turn, and what users wrote."""
        for token in reversed(prompt):
            mark = self._marks.get(token)
            if mark == THINK:
                return True
            if mark == END_THINK or token in control:
                return False
        return False

    def _take(self) -> list[ReplyDelta]:
        new, self._new = self._new, []
        return new

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._place in ("section", "header"):
            self._held += text
        elif self._place == "arguments":
            self.reply.tool_calls[-1].arguments += text
            self._add(ReplyDelta("arguments", text, len(self.reply.tool_calls) - 1))
        elif self._place == "reasoning":
            self.reply.reasoning_content += text
            self._add(ReplyDelta("reasoning", text))
        else:
            self.reply.content += text
            self._add(ReplyDelta("content", text))

    def _add(self, delta: ReplyDelta) -> None:
        last = self._new[-1] if self._new else None
        if last is not None and (last.kind, last.index) == (delta.kind, delta.index):
            self._new[-1] = replace(last, text=last.text + delta.text)
        else:
            self._new.append(delta)

    def _leave(self, place: str = "content", *, closed: bool = False) -> None:
        """End what is open, a call among it, and go on in `place`. `closed`: the model itself ended the call."""
        left, held, self._place, self._held = self._place, self._held, "content", ""
        if left == "arguments":
            call = self.reply.tool_calls[-1]
            call.error = _json_problem(call.arguments) if closed else "its end is missing"
            if call.error is not None:
                self.reply.errors.append(f"tool call {call.id}: {call.error}")
        elif left == "header":
            self.reply.errors.append(f"tool call {held.strip()!r} has no arguments")
            self._text(held)
        elif not held.isspace():  # space between calls is nothing
            self._text(held)
        self._place = place

    def _begin_call(self) -> None:
        self._leave("header")

    def _begin_arguments(self) -> None:
        if self._place != "header":
            self.reply.errors.append("arguments of a tool call that has not begun")
            return
        held, self._held = self._held, ""
        id = held.strip()
        found = _CALL_ID.fullmatch(id)
        if found is None:
            self.reply.errors.append("a tool call has no name")
            self._place = "content"
            self._text(held)
            return
        self._place = "arguments"
        self.reply.tool_calls.append(ToolCall(id, found[1]))
        self._new.append(ReplyDelta("tool_call", index=len(self.reply.tool_calls) - 1, id=id, name=found[1]))

    def _end_call(self) -> None:
        self._leave("section" if self._in_section else "content", closed=True)

    def _begin_section(self) -> None:
        self._leave("section")
        self._in_section = True

    def _end_section(self) -> None:
        self._leave()
        self._in_section = False


_HANDLERS = {
    THINK: lambda parser: parser._leave("reasoning"),
    END_THINK: ReplyParser._leave,
    CALLS: ReplyParser._begin_section,
    END_CALLS: ReplyParser._end_section,
    CALL: ReplyParser._begin_call,
    ARGUMENTS: ReplyParser._begin_arguments,
    END_CALL: ReplyParser._end_call,
}


def _token_id(tokenizer: Tokenizer, name: str) -> int | None:
    try:
        return tokenizer.token_id(name)
    except KeyError:
        return None


def _json_problem(arguments: str) -> str | None:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError) as e:
        return f"its arguments are not JSON: {e}"
    return None if isinstance(value, dict) else "its arguments are not a JSON object"
