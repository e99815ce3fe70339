"""Text to token ids and back: byte-level BPE from `tokenizer.json`, decoded byte by byte.

Knows nothing of chat layouts or stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Self

import tokenizers

from draftwood.models.errors import ModelError
from draftwood.models.json_config import read_json

FILE, TIKTOKEN_FILE = "tokenizer.json", "tiktoken.model"


class Tokenizer:
    """A folder's tokenizer. Text given by users never turns into special tokens; `token_id` names those."""

    def __init__(self, library: tokenizers.Tokenizer, bos_token_id: int | None) -> None:
        self._library, self._bos = library, bos_token_id
        self._library.encode_special_tokens = True  # "special tokens are encoded" as plain text
        self._library.no_truncation()
        self._library.no_padding()
        added, vocab = library.get_added_tokens_decoder(), library.get_vocab(with_added_tokens=True)
        self._special = {i for i, token in added.items() if token.special}
        self._bytes = [b""] * (1 + max(vocab.values()))
        for text, i in vocab.items():
            self._bytes[i] = added[i].content.encode() if i in added else _token_bytes(text)

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Raises `ModelError` if there is no `tokenizer.json` or it is not a byte-level one."""
        file = Path(path) / FILE
        if not file.exists() and file.with_name(TIKTOKEN_FILE).exists():
            raise ModelError(f"{path}: has only {TIKTOKEN_FILE}, which is not supported; expected {FILE}")
        decoder = (read_json(file).get("decoder") or {}).get("type")
        if decoder != "ByteLevel":
            raise ModelError(f"{file}: decoder is {decoder}; only ByteLevel is supported")
        try:
            library = tokenizers.Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises nothing narrower
            raise ModelError(f"{file}: not a tokenizer: {e}") from e
        return cls(library, _bos_token_id(Path(path), library))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; a model's vocabulary may be larger, padded."""
        return len(self._bytes)

    def token_id(self, token: str) -> int:
        """The id of a token given by its exact name, special ones included. Raises `KeyError`."""
        found = self._library.token_to_id(token)
        if found is None:
            raise KeyError(token)
        return int(found)

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """Token ids of plain text. `bos` puts the beginning-of-sequence token first, if the folder names one."""
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        if not bos:
            return ids
        if self._bos is None:
            raise ValueError("this tokenizer has no bos token")
        return [self._bos, *ids]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of token ids; invalid UTF-8 becomes U+FFFD, special tokens become nothing unless asked for."""
        return b"".join(self.token_bytes(i, special=special) for i in ids).decode(errors="replace")

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        """The bytes of one token: nothing for an id that only pads the model's vocabulary, or a special one."""
        if token_id < 0:
            raise ValueError(f"token id must not be negative, got {token_id}")
        if token_id >= len(self._bytes) or (token_id in self._special and not special):
            return b""
        return self._bytes[token_id]


class StreamDecoder:
    """Text piece by piece as tokens arrive; the pieces joined are `Tokenizer.decode` of all tokens."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete; an unfinished UTF-8 character is held back."""
        data = b"".join(self._tokenizer.token_bytes(i, special=self._special) for i in token_ids)
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is held back, as U+FFFD. The decoder starts anew."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


@cache
def _byte_of() -> dict[str, int]:
    """Byte-level BPE's printable stand-in for each byte (GPT-2): itself if printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _token_bytes(text: str) -> bytes:
    table = _byte_of()
    return bytes(table[c] for c in text) if all(c in table for c in text) else text.encode()


def _bos_token_id(folder: Path, library: tokenizers.Tokenizer) -> int | None:
    """The id of `bos_token` in tokenizer_config.json: null, a string, or an object with `content`."""
    file = folder / "tokenizer_config.json"
    token = read_json(file).get("bos_token") if file.exists() else None
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    found = library.token_to_id(token)
    if found is None:
        raise ModelError(f"{file}: key `bos_token`: `{token}` is not in {FILE}")
    return int(found)
