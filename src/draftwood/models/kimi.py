"""Kimi's tokenizer: BPE by rank from `tiktoken.model`, on the `tiktoken` library.

The file holds the base tokens, ranks 0..n-1. The next 256 ids are special; `added_tokens_decoder` of tokenizer_config.json
names some of them. The pre-tokeniser is Kimi's own: other published patterns split Han text and contractions differently.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import tiktoken

from draftwood.models.errors import ModelError
from draftwood.models.json_config import read_json
from draftwood.models.tokenizer import CONFIG_FILE, KIMI_FILE, Tokenizer, bos_token_id

SPECIAL_SLOTS = 256

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"\p{Han}+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# The published tokenizer cuts long text before it encodes it, so the ids depend on where.
MAX_CHARS, MAX_RUN = 400_000, 25_000
_RUN = re.compile(r"\s+|\S+")


class KimiTokenizer(Tokenizer):
    """Base tokens and 256 special slots. A slot without a name is called `<|reserved_token_ID|>`."""

    def __init__(
        self,
        base: Sequence[bytes],
        names: Mapping[int, str],
        special: set[int],
        bos_token_id: int | None,
        source: str = KIMI_FILE,
    ) -> None:
        """`base`: every rank's bytes; `names`: of all special slots; `special`: the slots that have no text."""
        control = {name: i for i, name in names.items()}
        super().__init__([*base, *(names[i].encode() for i in sorted(names))], special, control, bos_token_id)
        self._ranks = {token: rank for rank, token in enumerate(base)}
        self._library = tiktoken.Encoding(
            source, pat_str=PATTERN, mergeable_ranks=self._ranks, special_tokens=control
        )

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Raises `ModelError` naming the file, and the line or key, that is wrong."""
        folder = Path(path)
        base = _read_base(folder / KIMI_FILE)
        names, special = _read_special(folder / CONFIG_FILE, len(base))
        bos = bos_token_id(folder, {name: i for i, name in names.items()}, CONFIG_FILE)
        return cls(base, names, special, bos, str(folder / KIMI_FILE))

    def token_id(self, token: str) -> int:
        found = self.control_tokens.get(token)
        return self._ranks[token.encode()] if found is None else found

    def _encode(self, parts: Sequence[str | int]) -> list[int]:
        texts = [part if isinstance(part, str) else self._bytes[part].decode() for part in parts]
        cuts, start, ids = list(_cuts("".join(texts))), 0, list[int]()
        for part, text in zip(parts, texts, strict=True):
            end = start + len(text)
            if isinstance(part, int):
                ids.append(part)
            else:
                text.encode()  # lone surrogates raise; the library would replace them
                inside = [start, *(c for c in cuts if start < c < end), end]
                for a, b in pairwise(inside):
                    ids += self._library.encode_ordinary(text[a - start : b - start])
            start = end
        return ids


def _cuts(text: str) -> Iterator[int]:
    """Where long text is cut: every `MAX_CHARS`, and every `MAX_RUN` of a longer run of space or of anything else."""
    if len(text) <= MAX_RUN:
        return
    for start in range(0, len(text), MAX_CHARS):
        yield start
        for run in _RUN.finditer(text, start, start + MAX_CHARS):
            yield from range(run.start() + MAX_RUN, run.end(), MAX_RUN)


def _read_base(file: Path) -> list[bytes]:
    """The tokens of `tiktoken.model` by rank: a line each of base64 and rank."""
    lines: dict[int, int] = {}  # rank -> line
    tokens: dict[bytes, int] = {}  # token -> rank
    try:
        text = file.read_text(encoding="ascii")
    except UnicodeDecodeError as e:
        raise ModelError(f"{file}: expected lines of base64 and rank: {e}") from e
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            token, rank = _read_line(line, f"{file}: line {number}")
            if rank in lines:
                raise ModelError(f"{file}: line {number}: rank {rank} is also that of line {lines[rank]}")
            if token in tokens:
                raise ModelError(
                    f"{file}: line {number}: the same token as in line {lines[tokens[token]]}: {token!r}"
                )
            lines[rank], tokens[token] = number, rank
    for rank, number in lines.items():
        if rank >= len(lines):
            missing = next(r for r in range(len(lines)) if r not in lines)
            raise ModelError(
                f"{file}: line {number}: rank {rank}, but rank {missing} is missing; "
                f"the {len(lines)} tokens need ranks 0..{len(lines) - 1}"
            )
    for byte in range(256):
        if bytes([byte]) not in tokens:
            raise ModelError(
                f"{file}: no token for the single byte {byte}; text with it could not be encoded"
            )
    return sorted(tokens, key=tokens.__getitem__)


def _read_line(line: str, where: str) -> tuple[bytes, int]:
    fields = line.split()
    rank = _number(fields[1]) if len(fields) == 2 else None
    if rank is None:
        raise ModelError(f"{where}: expected base64 and a rank, got {line[:80]!r}")
    try:
        token = base64.b64decode(fields[0], validate=True)
    except binascii.Error as e:
        raise ModelError(f"{where}: {fields[0][:80]!r} is not base64: {e}") from e
    if not token:
        raise ModelError(f"{where}: the token is empty")
    return token, rank


def _number(text: str) -> int | None:
    """None for what is not a number in its one usual spelling, or is far beyond any id."""
    return int(text) if re.fullmatch("0|[1-9][0-9]{0,8}", text) else None


def _read_special(file: Path, n_base: int) -> tuple[dict[int, str], set[int]]:
    """Names of all special slots, and the slots that are special to a decoder too (have no text)."""
    values = read_json(file)
    added = values.get("added_tokens_decoder")
    if not isinstance(added, dict):
        raise ModelError(f"{file}: key `added_tokens_decoder` must be an object, it names the special tokens")
    slots = range(n_base, n_base + SPECIAL_SLOTS)
    names = {i: f"<|reserved_token_{i}|>" for i in slots}
    special = set(slots)
    for key, entry in added.items():
        where = f"{file}: key `added_tokens_decoder.{key}`"
        token, text_too = _read_entry(entry, where)
        i = _number(key)
        if i is not None and i < n_base:
            raise ModelError(f"{where}: is the id of a base token; {KIMI_FILE} holds {n_base} of them")
        if i is None or i not in slots:
            raise ModelError(f"{where}: not one of the special slots {slots.start}..{slots.stop - 1}")
        names[i] = token
        if text_too:
            special.discard(i)
    by_name: dict[str, int] = {}
    for i, name in names.items():
        if name in by_name:
            raise ModelError(
                f"{file}: key `added_tokens_decoder`: ids {by_name[name]} and {i} are both {name!r}"
            )
        by_name[name] = i
    return names, special


def _read_entry(entry: Any, where: str) -> tuple[str, bool]:
    content = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(content, str) or not content:
        raise ModelError(f"{where}: expected an object with the token's name as `content`")
    return content, entry.get("special") is False
