"""Kimi's chat layout, for folders of Kimi K2 to K2.6 that come without a template.

A turn is ROLE_TOKEN name <|im_middle|> content <|im_end|>, with nothing between turns and no [BOS].
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from draftwood.models.errors import ChatError
from draftwood.models.json_config import read_json

DEFAULT_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."
ROLE_TOKENS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}
OTHER_ROLE_TOKEN = "<|im_system|>"
TURN_TOKENS = (*ROLE_TOKENS.values(), OTHER_ROLE_TOKEN, "<|im_middle|>", "<|im_end|>")
VARIABLES = {"messages", "tools", "tools_ts_str", "thinking", "preserve_thinking", "add_generation_prompt"}

Parts = Iterator[str | int]


class KimiLayout:
    """Implements `draftwood.models.chat.Layout`.

    K2.5 and K2.6 (a wrapper config, model_type kimi_k25) have no default system line, declare tools as types and open the
    reply's reasoning unless told not to; K2 and K2-Thinking have the line, declare tools as JSON and open nothing.
    """

    def __init__(self, control: Mapping[str, int], *, wrapper: bool) -> None:
        self._id, self._wrapper = control, wrapper
        self._thinks = "<think>" in control and "</think>" in control

    @staticmethod
    def fits(control: Mapping[str, int]) -> bool:
        """Whether a tokenizer with these control tokens can write this layout."""
        return all(name in control for name in TURN_TOKENS)

    @classmethod
    def from_folder(cls, folder: Path, control: Mapping[str, int]) -> Self:
        file = folder / "config.json"
        model_type = read_json(file).get("model_type") if file.exists() else None
        return cls(control, wrapper=model_type == "kimi_k25")

    def parts(self, conversation: dict[str, Any]) -> list[str | int]:
        """Raises `ChatError` for content that is not text, or a variable this layout doesn't have."""
        for name in conversation.keys() - VARIABLES:
            raise ChatError(f"{name}: the built-in chat layout has no such variable")
        return list(self._conversation(conversation))

    def _conversation(self, c: dict[str, Any]) -> Parts:
        messages: list[dict[str, Any]] = c["messages"]
        thinking = c.get("thinking")
        if thinking and not self._thinks:
            raise ChatError("thinking: this model has no thinking tokens")
        if c["tools"]:
            types = c.get("tools_ts_str") if self._wrapper else None
            yield from self._turn("system", "tool_declare", [types or _compact(c["tools"])])
        if not self._wrapper and (not messages or messages[0]["role"] != "system"):
            yield from self._turn("system", "system", [DEFAULT_SYSTEM])
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and not m.get("tool_calls")]
        for i, message in enumerate(messages):
            recent = i > max(answers, default=-1) and thinking is not False
            keep = bool(c.get("preserve_thinking")) or recent
            body = self._body(message, f"messages[{i}]", keep_reasoning=keep)
            name = _field(message, "name", f"messages[{i}]") if message.get("name") else message["role"]
            yield from self._turn(message["role"], name, body)
        if c["add_generation_prompt"]:
            yield from self._opening("assistant", "assistant")
            yield from self._start_of_reply(thinking)

    def _opening(self, role: str, name: str) -> Parts:
        yield self._id[ROLE_TOKENS.get(role, OTHER_ROLE_TOKEN)]
        yield name
        yield self._id["<|im_middle|>"]

    def _turn(self, role: str, name: str, body: Iterator[str | int] | list[str]) -> Parts:
        yield from self._opening(role, name)
        yield from body
        yield self._id["<|im_end|>"]

    def _start_of_reply(self, thinking: bool | None) -> Parts:
        if self._thinks and (self._wrapper if thinking is None else True):
            yield self._id["<think>"]
            if thinking is False:
                yield self._id["</think>"]

    def _body(self, message: dict[str, Any], where: str, *, keep_reasoning: bool) -> Parts:
        if message["role"] == "assistant" and self._thinks:
            yield self._id["<think>"]
            yield (
                _text(message.get("reasoning_content"), f"{where}.reasoning_content")
                if keep_reasoning
                else ""
            )
            yield self._id["</think>"]
        if message["role"] == "tool":
            yield f"## Return of {_field(message, 'tool_call_id', where)}\n"
        yield _text(message.get("content"), f"{where}.content")
        if message["role"] == "assistant" and message.get("tool_calls"):
            yield from self._calls(message["tool_calls"], f"{where}.tool_calls")

    def _calls(self, calls: Any, where: str) -> Parts:
        if not isinstance(calls, list):
            raise ChatError(f"{where}: expected a list")
        yield self._id["<|tool_calls_section_begin|>"]
        for i, call in enumerate(calls):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                raise ChatError(f"{where}[{i}]: expected an object with a `function`")
            arguments = function.get("arguments", "")
            yield self._id["<|tool_call_begin|>"]
            yield _field(call, "id", f"{where}[{i}]")
            yield self._id["<|tool_call_argument_begin|>"]
            yield arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            yield self._id["<|tool_call_end|>"]
        yield self._id["<|tool_calls_section_end|>"]


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _field(values: dict[str, Any], key: str, where: str) -> str:
    value = values.get(key)
    if not isinstance(value, str):
        raise ChatError(f"{where}.{key}: expected a string, got {value!r}")
    return value


def _text(content: Any, where: str) -> str:
    """A string, None for nothing, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatError(f"{where}: expected a string or a list of text parts, got {content!r}")
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ChatError(
                f"{where}[{i}]: expected a part of type text with a string `text`; images are not supported"
            )
    return "".join(part["text"] for part in content)
