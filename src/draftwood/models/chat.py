"""Conversations to prompt tokens: the folder's own chat template, or Kimi's layout where it has none.

What users write never becomes a control token, however it is spelt: only the template's own text may name those. docs/chat.md
says how that is kept. Replies are read back by `chat_reply.py`. Knows nothing of engines or sampling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from draftwood.models.chat_jinja import JinjaLayout
from draftwood.models.chat_kimi import KimiLayout
from draftwood.models.chat_reply import ChatReply, ReplyParser
from draftwood.models.errors import ChatError, ModelError
from draftwood.models.json_config import read_json
from draftwood.models.kimi import KimiTokenizer
from draftwood.models.tokenizer import CONFIG_FILE, Tokenizer, named_token
from draftwood.models.tool_types import tool_types

TEMPLATE_FILE = "chat_template.jinja"
END_TOKENS = ("<|im_end|>", "[EOS]", "[EOT]")

Message = Mapping[str, Any]
Parts = list[str | int]


class Layout(Protocol):
    """What turns a conversation (plain JSON data) into texts and the ids of control tokens between them."""

    def parts(self, conversation: dict[str, Any]) -> Parts: ...


class ChatTemplate:
    """How a model wants to see a conversation, and where its replies end."""

    def __init__(self, tokenizer: Tokenizer, layout: Layout, stop_token_ids: Sequence[int]) -> None:
        self.tokenizer, self._layout = tokenizer, layout
        self.stop_token_ids = tuple(stop_token_ids)

    @classmethod
    def from_folder(cls, path: str | Path, tokenizer: Tokenizer) -> Self:
        """The chat layout of a model folder: `chat_template.jinja`, else `chat_template` in tokenizer_config.json, else Kimi's.

        Raises `ModelError` if the folder has no chat template and is not Kimi's, or its template is unsound.
        """
        folder = Path(path)
        eos = named_token(folder, "eos_token")
        control = tokenizer.control_tokens
        ends = {control[name] for name in (*END_TOKENS, eos) if name in control}
        return cls(tokenizer, _layout(folder, tokenizer), sorted(ends))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            messages: as in the OpenAI API: `role`, `content`, and where they apply `name`, `reasoning_content`, `tool_calls`,
                `tool_call_id`.
            tools: function declarations, as in the OpenAI API.
            thinking: whether the reply begins by reasoning; None leaves it to the template.
            add_generation_prompt: end with the start of the assistant's reply.
            variables: further ones for the template, e.g. `preserve_thinking=True` of Kimi K2.6.

        Raises:
            ChatError: the messages are not of this form, or the template refuses them.
        """
        given = variables | ({} if thinking is None else {"thinking": thinking})
        conversation = _plain_data({"messages": list(messages), "tools": list(tools or []) or None, **given})
        for i, message in enumerate(conversation["messages"]):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ChatError(f"messages[{i}]: expected an object with a string `role`")
        for i, tool in enumerate(conversation["tools"] or []):
            if not isinstance(tool, dict):
                raise ChatError(f"tools[{i}]: expected an object, got {tool!r}")
        if conversation["tools"] and isinstance(self.tokenizer, KimiTokenizer):
            conversation = _with_sorted_tools(conversation)
        conversation["add_generation_prompt"] = add_generation_prompt
        return self.tokenizer.encode_parts(self._layout.parts(conversation))

    def parser(self, prompt: Sequence[int]) -> ReplyParser:
        """A reader for the tokens generated after `prompt`, which says whether the reply starts inside its reasoning."""
        return ReplyParser(self.tokenizer, prompt, self.stop_token_ids)

    def parse(self, prompt: Sequence[int], reply: Sequence[int]) -> ChatReply:
        """A whole reply."""
        parser = self.parser(prompt)
        parser.push(reply)
        parser.finish()
        return parser.reply


def _layout(folder: Path, tokenizer: Tokenizer) -> Layout:
    file = folder / TEMPLATE_FILE
    source = None
    if file.exists():
        try:
            source = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as e:
            raise ModelError(f"{file}: not UTF-8 text: {e}") from e
    elif (folder / CONFIG_FILE).exists():
        file = folder / CONFIG_FILE
        source = _configured_template(file)
    if source is not None:
        names = {
            key: named_token(folder, key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        return JinjaLayout(source, file, tokenizer.control_tokens, names)
    if isinstance(tokenizer, KimiTokenizer) and KimiLayout.fits(tokenizer.control_tokens):
        return KimiLayout.from_folder(folder, tokenizer.control_tokens)
    raise ModelError(f"{folder}: has no chat template, so chat is not available for this model")


def _configured_template(file: Path) -> str | None:
    """`chat_template` of tokenizer_config.json: one, or several by name of which `default` counts."""
    template = read_json(file).get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default", named)
    if template is not None and not isinstance(template, str):
        raise ModelError(
            f"{file}: key `chat_template`: expected a string, or a list with one named `default`"
        )
    return template


def _plain_data(values: dict[str, Any]) -> dict[str, Any]:
    """A deep copy as JSON data, so that templates see dicts, lists, strings and numbers alone."""
    try:
        text = json.dumps(values, ensure_ascii=False)
        text.encode()  # half of a surrogate pair is no character
        copy: dict[str, Any] = json.loads(text)
    except (TypeError, ValueError, RecursionError) as e:
        raise ChatError(f"messages, tools and variables must be JSON data: {e}") from e
    return copy


def _with_sorted_tools(conversation: dict[str, Any]) -> dict[str, Any]:
    """Tools as Kimi's tokenizer hands them to its template: keys sorted, and declared as types in `tools_ts_str`."""
    tools = json.loads(json.dumps(conversation["tools"], sort_keys=True))
    types = tool_types(tools)
    return ({} if types is None else {"tools_ts_str": types}) | conversation | {"tools": tools}
