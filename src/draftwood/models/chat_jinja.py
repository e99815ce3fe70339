"""A folder's chat template, run in a sandbox, with its control tokens kept apart from all other text.

A template makes one string. So that a control token in it can only come from the template, the template is compiled with each
one it names replaced by a stand-in: a private-use character that the conversation doesn't hold. What the conversation says is
left as it is, so the template compares, trims and escapes the real thing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftwood.models.errors import ChatError, ModelError

PRIVATE_USE = range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)
_PROBES = ("user",), ("user", "assistant", "user")


class JinjaLayout:
    """Implements `draftwood.models.chat.Layout`."""

    def __init__(
        self, source: str, file: Path, control: Mapping[str, int], names: Mapping[str, str | None]
    ) -> None:
        """`names`: variables that hold a token's name, e.g. `bos_token`. Raises `ModelError` if the template is unsound."""
        self._source, self._file, self._names = source, file, names
        self._control = {n: i for n, i in control.items() if n in source or n in names.values()}
        self._compile = lru_cache(maxsize=4)(self._compile_with)
        self._check(control)

    def parts(self, conversation: dict[str, Any]) -> list[str | int]:
        """Raises `ChatError` if the template refuses the conversation."""
        stand_ins = self._stand_ins(json.dumps(conversation, ensure_ascii=False))
        char_of = dict(zip(self._control, stand_ins, strict=True))
        names = {key: char_of.get(name or "", name or "") for key, name in self._names.items()}
        template = self._compile(stand_ins)
        try:
            text = template.render(names | conversation)
        except Exception as e:  # a template is a program: any error may come out of it
            raise ChatError(f"{self._file}: cannot render this conversation: {e}") from e
        id_of = dict(zip(stand_ins, self._control.values(), strict=True))
        pieces = re.split(f"([{stand_ins}])", text) if stand_ins else [text]
        return [id_of.get(piece, piece) for piece in pieces]

    def _stand_ins(self, text: str) -> str:
        """A character per control token, none of them in `text` or the template."""
        used = set(text) | set(self._source)
        free = (c for c in map(chr, chain(*PRIVATE_USE)) if c not in used)
        chosen = "".join(islice(free, len(self._control)))
        if len(chosen) < len(self._control):
            raise ChatError(
                "messages: they hold so many private-use characters that none is left to stand for control tokens"
            )
        return chosen

    def _compile_with(self, stand_ins: str) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation, _StandIns]
        )
        environment.extend(stand_ins=dict(zip(self._control, stand_ins, strict=True)))
        environment.filters["tojson"] = _tojson
        del environment.filters["striptags"]  # it would make stand-ins out of `&#xE000;`
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        return environment.from_string(self._source)

    def _check(self, control: Mapping[str, int]) -> None:
        """Render harmless conversations: a control token among the text is one that the template builds from pieces."""
        for roles in _PROBES:
            messages = [{"role": role, "content": "a"} for role in roles]
            try:
                parts = self.parts({"messages": messages, "tools": None, "add_generation_prompt": True})
            except TemplateSyntaxError as e:
                raise ModelError(f"{self._file}: line {e.lineno}: {e.message}") from e
            except ChatError as e:
                raise ModelError(str(e)) from e
            for name in control:
                if any(name in part for part in parts if isinstance(part, str)):
                    raise ModelError(
                        f"{self._file}: makes the token {name} out of pieces, which cannot be told from text of users; "
                        "only templates that spell their tokens out are supported"
                    )


class _StandIns(Extension):
    """Replaces control tokens in a template's text and string literals as it is compiled."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        stand_ins: dict[str, str] = self.environment.stand_ins  # type: ignore[attr-defined]
        names = re.compile("|".join(map(re.escape, sorted(stand_ins, key=len, reverse=True))) or "(?!)")
        for token in stream:
            value = token.value
            if token.type in ("data", "string"):
                value = names.sub(lambda found: stand_ins[found[0]], value)
            yield Token(token.lineno, token.type, value)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012, typed by the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As templates of models expect it: Jinja's own would escape HTML and sort keys."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
