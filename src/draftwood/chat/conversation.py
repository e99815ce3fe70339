"""A conversation: its messages, and the file they are kept in. Knows neither model nor terminal."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError


class ChatError(ValueError):
    """Something the person chatting can mend; the message says how."""


class Message(BaseModel):
    """One message, with the names of the OpenAI API, and whether it was cut off by hand."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[dict[str, Any], ...] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    interrupted: bool = False

    def as_dict(self, *, own: bool = True) -> dict[str, Any]:
        """The fields that say something; without those that are our `own` if so asked."""
        return self.model_dump(mode="json", exclude_defaults=True, exclude=None if own else {"interrupted"})


_MESSAGES = TypeAdapter(list[Message])


class Conversation:
    """Messages in order: at most one system message, which is first, then turns that each begin with the user."""

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self.messages = tuple(messages)

    @property
    def system(self) -> str | None:
        return self.messages[0].content if self._head else None

    def set_system(self, text: str | None) -> None:
        """Replace the system message; None removes it."""
        head = () if text is None else (Message(role="system", content=text),)
        self.messages = head + self.messages[self._head :]

    @property
    def n_turns(self) -> int:
        return sum(m.role == "user" for m in self.messages)

    @property
    def n_interrupted(self) -> int:
        return sum(m.interrupted for m in self.messages)

    def asking(self, text: str) -> tuple[Message, ...]:
        """The messages with one more from the user; the conversation itself stays as it is."""
        return (*self.messages, Message(role="user", content=text))

    def asked_again(self) -> tuple[Message, ...]:
        """The messages up to the user's newest. Raises `ChatError` if there is none."""
        return self.messages[: self._starts()[-1] + 1]

    def undo(self) -> str:
        """Take the newest turn back; what the user had said. Raises `ChatError` if there is none."""
        start = self._starts()[-1]
        text = self.messages[start].content
        self.messages = self.messages[:start]
        return text

    def drop_oldest(self) -> None:
        """Forget the oldest turn. Raises `ChatError` if there is none."""
        starts = [*self._starts(), len(self.messages)]
        self.messages = self.messages[: starts[0]] + self.messages[starts[1] :]

    def clear(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages = self.messages[: self._head]

    def save(self, path: Path) -> None:
        """Write a JSON list of messages, for the user alone to read; the file appears complete or not at all."""
        text = json.dumps([m.as_dict() for m in self.messages], ensure_ascii=False, indent=1)
        handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            os.replace(unfinished, path)
        except BaseException:
            os.unlink(unfinished)
            raise

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote. Raises `ChatError` naming the message and field; OSError."""
        try:
            messages = _MESSAGES.validate_json(path.read_bytes())
        except ValidationError as e:
            error = e.errors()[0]
            where = ".".join(str(part) for part in error["loc"])
            raise ChatError(f"{path}: {f'message {where}: ' if where else ''}{error['msg']}") from e
        for i, message in enumerate(messages):
            if message.role == "system" and i > 0:
                raise ChatError(f"{path}: message {i}: a system message must be the first")
        conversation = cls(messages)
        first = messages[conversation._head :][:1]
        if first and first[0].role != "user":
            raise ChatError(f"{path}: a conversation begins with the user, got {first[0].role}")
        return conversation

    @property
    def _head(self) -> int:
        """How many messages come before the turns: 1 or 0."""
        return int(bool(self.messages) and self.messages[0].role == "system")

    def _starts(self) -> list[int]:
        """Where the turns begin."""
        starts = [i for i, m in enumerate(self.messages) if m.role == "user"]
        if not starts:
            raise ChatError("the conversation has no turn yet")
        return starts
