"""Prompts from files: JSON lines or plain text, every unusable line reported by file and number.

A `.jsonl` line is an object with `prompt` (text) or `prompt_token_ids`; in any other file each line is a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

OnBad = Literal["skip", "refuse"]
"""What happens to a file or line that cannot be used: left out and reported, or the end of the run."""


class DataError(ValueError):
    """The data cannot be used; the message names file and line of what is wrong."""


def read_prompts(
    files: Sequence[Path],
    encode: Callable[[str], list[int]],
    *,
    vocab_size: int,
    max_tokens: int,
    on_bad: OnBad = "refuse",
) -> tuple[list[list[int]], list[str]]:
    """Token ids of every prompt, and the problems found, each as `file:line: what`.

    Args:
        encode: text -> token ids.
        max_tokens: longest prompt that leaves room for a continuation.

    Raises:
        DataError: a problem with `on_bad="refuse"`, or nothing usable left.
    """
    prompts: list[list[int]] = []
    problems: list[str] = []
    for file in files:
        for where, found in _lines(file):
            try:
                if isinstance(found, DataError):
                    raise found
                ids = _prompt(found, file.suffix == ".jsonl", encode, vocab_size)
                if len(ids) > max_tokens:
                    raise DataError(f"the prompt has {len(ids)} tokens; at most {max_tokens} leave room")
            except DataError as e:
                problems.append(f"{where}: {e}")
            else:
                prompts.append(ids)
    if problems and on_bad == "refuse":
        shown = "\n  ".join(problems[:10])
        more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise DataError(f"{len(problems)} unusable files or lines:\n  {shown}{more}")
    if not prompts:
        raise DataError("no usable prompt in " + ", ".join(map(str, files)))
    return prompts, problems


def _lines(file: Path) -> Iterator[tuple[str, str | DataError]]:
    """(`file:line`, text) of every line that is not blank; a file without any is one problem."""
    try:
        data = file.read_bytes()
    except OSError as e:
        yield str(file), DataError(f"cannot be read: {e.strerror}")
        return
    if not data.strip():
        yield str(file), DataError("the file is empty")
        return
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield f"{file}:{number}", line.decode("utf-8").rstrip("\r")
        except UnicodeDecodeError as e:
            yield (
                f"{file}:{number}",
                DataError(f"not UTF-8: byte {line[e.start]:#04x} at column {e.start + 1}"),
            )


def _prompt(line: str, is_json: bool, encode: Callable[[str], list[int]], vocab_size: int) -> list[int]:
    value: Any = line
    if is_json:
        try:
            value = json.loads(line)
        except json.JSONDecodeError as e:
            raise DataError(f"not JSON: {e.msg} at column {e.colno}") from e
        if not isinstance(value, dict) or not ({"prompt", "prompt_token_ids"} & value.keys()):
            raise DataError("expected an object with `prompt` or `prompt_token_ids`")
        value = value.get("prompt", value.get("prompt_token_ids"))
    if isinstance(value, str):
        value = encode(value)
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise DataError("`prompt` must be text, `prompt_token_ids` a list of integers")
    if not value:
        raise DataError("the prompt is empty")
    for i in value:
        if not 0 <= i < vocab_size:
            raise DataError(f"token id {i} is outside the vocabulary 0..{vocab_size - 1}")
    return value
