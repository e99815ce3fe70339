"""Where prompts come from: windows of text, a list in a file, or random tokens. Prompt number i is the same in every run.

Batch 8 visits prompts 0..7 where batch 1 makes eight visits of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import draftwood
from draftwood.bench.catalog import UsageError

OWN_FILES = 32
"""Source files of this package that prompts are cut from by default."""


class Prompts(Protocol):
    def count(self, length: int) -> float:
        """How many prompts of this length there are; infinite where they are drawn."""
        ...

    def take(self, first: int, count: int, length: int) -> list[list[int]]:
        """Prompts number `first` and on. Raises NotImplementedError where there are no such."""
        ...

    def longest(self, length: int) -> int:
        """Tokens of the longest one."""
        ...


class Drawn:
    """Prompts of a length, each made from its own random generator."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def count(self, length: int) -> float:
        return float("inf")

    def longest(self, length: int) -> int:
        return length

    def take(self, first: int, count: int, length: int) -> list[list[int]]:
        if length < 1:
            raise NotImplementedError("prompt=0: only prompts of a .jsonl file have a length of their own")
        return [self.draw(np.random.default_rng([self.seed, i]), length) for i in range(first, first + count)]

    def draw(self, rng: np.random.Generator, length: int) -> list[int]:
        raise NotImplementedError


class Uniform(Drawn):
    """Random tokens, all alike: text that no drafter can foresee."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        super().__init__(seed)
        self.vocab_size = vocab_size

    def draw(self, rng: np.random.Generator, length: int) -> list[int]:
        return [int(t) for t in rng.integers(0, self.vocab_size, length)]


class Windows(Drawn):
    """Windows at random places of documents, none across a border."""

    def __init__(self, documents: Sequence[Sequence[int]], seed: int) -> None:
        super().__init__(seed)
        self.documents = documents

    def draw(self, rng: np.random.Generator, length: int) -> list[int]:
        places = np.array([max(0, len(d) - length + 1) for d in self.documents])
        if not places.sum():
            raise NotImplementedError(f"no text is {length} tokens long")
        place = int(rng.integers(places.sum()))
        document = int(np.searchsorted(places.cumsum(), place, side="right"))
        start = place - int(places[:document].sum())
        return list(self.documents[document][start : start + length])


class Listed:
    """Prompts as a file lists them, each cut to the length asked for; shorter ones are left out."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prompts = prompts

    def count(self, length: int) -> float:
        return len(self._fitting(length))

    def longest(self, length: int) -> int:
        return max((len(p) for p in self._fitting(length)), default=0)

    def take(self, first: int, count: int, length: int) -> list[list[int]]:
        fitting = self._fitting(length)
        if first + count > len(fitting):
            kind = f" of {length} tokens or more" if length else ""
            raise NotImplementedError(
                f"{first + count} prompts{kind} are needed, the file has {len(fitting)}"
            )
        return fitting[first : first + count]

    def _fitting(self, length: int) -> list[list[int]]:
        return [list(p[: length or None]) for p in self.prompts if len(p) >= length]


def own_source() -> list[Path]:
    """Files of this package, evenly from all of it: text that the bundled pair was not trained on."""
    files = sorted(p for p in Path(draftwood.__file__).parent.rglob("*.py") if p.stat().st_size > 4000)
    return [files[i * len(files) // OWN_FILES] for i in range(min(OWN_FILES, len(files)))]


def of_files(
    files: Sequence[Path], encode: Callable[[str], list[int]], vocab_size: int, seed: int
) -> Prompts:
    """`Listed` from .jsonl files, `Windows` of anything else. Raises `UsageError` naming the file and line."""
    kinds = {path.suffix == ".jsonl" for path in files}
    if len(kinds) > 1:
        raise UsageError("`--prompts`: expected .jsonl files or texts, not both")
    if kinds == {True}:
        return Listed([p for path in files for p in _lines(path, encode, vocab_size)])
    return Windows([encode(_text(path)) for path in files], seed)


def _lines(path: Path, encode: Callable[[str], list[int]], vocab_size: int) -> list[list[int]]:
    prompts = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        where = f"`--prompts {path}` line {number}"
        try:
            value: Any = json.loads(line)
        except ValueError as e:
            raise UsageError(f"{where}: expected JSON: {e}") from e
        try:
            ids = encode(value) if isinstance(value, str) else value
        except (TypeError, UnicodeEncodeError) as e:
            raise UsageError(f"{where}: half of a surrogate pair is no text: {e}") from e
        sound = isinstance(ids, list) and ids and all(type(t) is int and 0 <= t < vocab_size for t in ids)
        if not sound:
            raise UsageError(
                f"{where}: expected a string, or a list of token ids below {vocab_size}; not empty"
            )
        prompts.append(ids)
    return prompts


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"`--prompts {path}`: expected UTF-8 text: {e}") from e
