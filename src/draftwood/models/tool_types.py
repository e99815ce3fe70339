"""Function declarations as types, the form in which Kimi K2.5 and K2.6 were trained to see tools.

A function becomes `type NAME = (_: {...}) => any;`, its JSON schema an object type whose descriptions, limits and defaults are
comments; `$defs` become interfaces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_INDENT = "  "
_LIMITS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_NAMES: dict[str, str] = {"integer": "number", "object": "{}", "array": "Array<any>"}
_UNION_MEMBERS = {"string", "number", "integer", "boolean", "null", "object", "array"}


def tool_types(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The declaration of all functions among `tools` (the OpenAI API's objects). None if there is none, or a schema has no such form.

    None is what Kimi's own tokenizer answers then too, and its template falls back to JSON.
    """
    functions = [
        tool["function"] for tool in tools if tool.get("type") == "function" and tool.get("function")
    ]
    if not functions:
        return None
    try:
        declared = "\n".join(_Function(function).declaration() for function in functions)
    except (
        AttributeError,
        KeyError,
        RecursionError,
        TypeError,
        ValueError,
    ):  # whatever an odd schema leads to
        return None
    return f"# Tools\n\n## functions\nnamespace functions {{\n{declared}\n}}\n"


class _Function:
    def __init__(self, function: Mapping[str, Any]) -> None:
        self._function = function
        self._definitions: dict[str, Any] = {}
        self._refers_to_itself = False

    def declaration(self) -> str:
        schema = self._function.get("parameters") or {}
        parameters = self._object(schema, "")
        interfaces = []
        if self._refers_to_itself:
            interfaces.append(f"interface parameters {_braced(list(self._properties(schema, '')), '')}")
            parameters = "parameters"
        for name, definition in list(self._definitions.items()):
            comment = _comment(definition.get("description") or "", "")
            interfaces.append(f"{comment}interface {name} {self._type(definition, '')}")
        comment = _comment(self._function.get("description") or "", "")
        name = self._function.get("name", "function")
        return "".join(f"{i}\n" for i in interfaces) + f"{comment}type {name} = (_: {parameters}) => any;"

    def _type(self, schema: Any, indent: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self._type(member, indent) for member in schema["anyOf"])
        if "enum" in schema:
            return _enum(schema)
        if not schema:
            return "any"
        kind = schema["type"]
        if isinstance(kind, list):
            if not set(kind) <= _UNION_MEMBERS:
                raise ValueError(f"unknown type among {kind}")
            return " | ".join(_NAMES.get(str(k), str(k)) for k in kind)
        if kind == "object":
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        return str(_NAMES.get(kind, kind))

    def _reference(self, target: str) -> str:
        if target == "#":
            self._refers_to_itself = True
            return "parameters"
        name = target.removeprefix("#/$defs/")
        if name == target or name not in self._definitions:
            raise ValueError(f"no such definition: {target}")
        return name

    def _object(self, schema: Mapping[str, Any], indent: str) -> str:
        self._definitions |= schema.get("$defs") or {}
        required = schema.get("required", [])
        members = list(self._properties(schema, indent, lambda name: (name not in required, name)))
        more = schema.get("additionalProperties")
        if more is not None:
            of = (
                {True: "any", False: "never"}[more]
                if isinstance(more, bool)
                else self._type(more, indent + _INDENT)
            )
            members.append(f"{indent}{_INDENT}[k: string]: {of}")
        return _braced(members, indent)

    def _properties(
        self, schema: Mapping[str, Any], indent: str, key: Callable[[str], Any] | None = None
    ) -> Iterator[str]:
        """A member for each property; in the schema's order unless there is a `key` to sort their names by."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        inner = indent + _INDENT
        for name in sorted(properties, key=key) if key else properties:
            member = properties[name]
            default = member.get("default") if isinstance(member, dict) else None
            comment = _notes(member, inner)
            if default is not None:
                text = (
                    repr(default)
                    if isinstance(default, int | float)
                    else json.dumps(default, ensure_ascii=False)
                )
                comment += f"{inner}// Default: {text}\n"
            optional = "" if name in required else "?"
            yield f"{comment}{inner}{name}{optional}: {self._type(member, inner)}"

    def _array(self, schema: Mapping[str, Any], indent: str) -> str:
        item = schema.get("items") or {}
        inner = indent + _INDENT
        notes = _notes(item, inner)
        if not notes:
            return f"Array<{self._type(item, indent)}>"
        return f"Array<\n{notes}{inner}{self._type(item, inner)}\n{indent}>"


def _braced(members: list[str], indent: str) -> str:
    return "{\n" + ",\n".join(members) + f"\n{indent}}}" if members else "{}"


def _notes(schema: Any, indent: str) -> str:
    """Description and limits of a schema, as comments."""
    if isinstance(schema, bool):
        return ""
    plain = not ({"$ref", "anyOf", "enum"} & schema.keys()) and isinstance(schema.get("type"), str)
    limits = [k for k in _LIMITS.get(schema["type"], ()) if k in schema] if plain else []
    text = ", ".join(f"{k}: {schema[k]}" for k in limits)
    return _comment(schema.get("description") or "", indent) + (f"{indent}// {text}\n" if text else "")


def _comment(text: str, indent: str) -> str:
    if not text:
        return ""
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n")) + "\n"


def _enum(schema: Mapping[str, Any]) -> str:
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", [])
    if len(kinds) > 1 and not (len(kinds) == 2 and "null" in kinds):
        raise ValueError(f"an enum of the types {kinds}")
    kind = next((k for k in kinds if k != "null"), None)
    allowed = {"string": str, "number": int | float, "integer": int, "boolean": bool}.get(kind or "", object)
    for value in schema["enum"]:
        if value is not None and not isinstance(value, allowed):
            raise ValueError(f"enum value {value!r} is not of type {kind}")
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])
