"""Byte-level BPE from `tokenizer.json`, on the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Self

import tokenizers

from draftwood.models.errors import ModelError
from draftwood.models.json_config import read_json
from draftwood.models.tokenizer import BYTE_LEVEL_FILE, Tokenizer, bos_token_id


class ByteLevelTokenizer(Tokenizer):
    """Added tokens that the file does not call special are text like any other, found wherever they are spelt."""

    def __init__(self, library: tokenizers.Tokenizer, bos_token_id: int | None) -> None:
        self._library = library
        self._library.encode_special_tokens = True  # "special tokens are encoded" as plain text
        self._library.no_truncation()
        self._library.no_padding()
        added, vocab = library.get_added_tokens_decoder(), library.get_vocab(with_added_tokens=True)
        table = [b""] * (1 + max(vocab.values()))
        for text, i in vocab.items():
            table[i] = added[i].content.encode() if i in added else token_bytes(text)
        control = {token.content: i for i, token in added.items() if token.special}
        self._takes_left = {i for i, token in added.items() if token.lstrip}
        self._takes_right = {i for i, token in added.items() if token.rstrip}
        super().__init__(table, control.values(), control, bos_token_id)

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Raises `ModelError` if there is no `tokenizer.json` or it is not a byte-level one."""
        file = Path(path) / BYTE_LEVEL_FILE
        decoder = read_json(file).get("decoder")
        kind = decoder.get("type") if isinstance(decoder, dict) else decoder
        if kind != "ByteLevel":
            raise ModelError(f"{file}: decoder is {kind}; only ByteLevel is supported")
        try:
            library = tokenizers.Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises nothing narrower
            raise ModelError(f"{file}: not a tokenizer: {e}") from e
        return cls(library, bos_token_id(Path(path), library.get_vocab(), BYTE_LEVEL_FILE))

    def token_id(self, token: str) -> int:
        found = self._library.token_to_id(token)
        if found is None:
            raise KeyError(token)
        return int(found)

    def _encode(self, parts: Sequence[str | int]) -> list[int]:
        ids: list[int] = []
        for before, part, after in zip([None, *parts], parts, [*parts[1:], None], strict=False):
            if isinstance(part, int):
                ids.append(part)
                continue
            text = part.lstrip() if before in self._takes_right else part
            text = text.rstrip() if after in self._takes_left else text
            ids += self._library.encode(text, add_special_tokens=False).ids
        return ids


@cache
def _byte_of() -> dict[str, int]:
    """Byte-level BPE's printable stand-in for each byte (GPT-2): itself if printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def token_bytes(text: str) -> bytes:
    """The bytes that a token of byte-level BPE, written in stand-ins, is made of; any other text as UTF-8."""
    table = _byte_of()
    return bytes(table[c] for c in text) if all(c in table for c in text) else text.encode()
