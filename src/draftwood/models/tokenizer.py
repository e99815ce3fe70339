"""Text to token ids and back, whatever the folder's kind of tokenizer; decoded byte by byte.

What all kinds share. Their files are read in `byte_level.py` and `kimi.py`. Knows nothing of chat layouts or stop strings.
"""

from __future__ import annotations

import codecs
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from draftwood.models.errors import ModelError
from draftwood.models.json_config import read_json

CONFIG_FILE, BYTE_LEVEL_FILE, KIMI_FILE = "tokenizer_config.json", "tokenizer.json", "tiktoken.model"


class Tokenizer(ABC):
    """A folder's tokenizer. Text given by users never turns into special tokens; `token_id` names those.

    Args:
        token_bytes: the bytes of every id, names of special tokens included.
        special: ids that have no text of their own.
        control: name -> id of every token that `encode` finds in no text, however it is spelt.
        bos_token_id: what `encode(..., bos=True)` puts first.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special: Collection[int],
        control: Mapping[str, int],
        bos_token_id: int | None,
    ) -> None:
        self._bytes, self._special, self._bos = token_bytes, frozenset(special), bos_token_id
        self.control_tokens = dict(control)

    @staticmethod
    def from_folder(path: str | Path) -> Tokenizer:
        """The tokenizer in a model folder: Kimi's `tiktoken.model`, or else a byte-level `tokenizer.json`.

        Raises `ModelError` if there is neither, or the file is not what its name says.
        """
        if (Path(path) / KIMI_FILE).exists():
            from draftwood.models.kimi import KimiTokenizer

            return KimiTokenizer.from_folder(path)
        from draftwood.models.byte_level import ByteLevelTokenizer

        return ByteLevelTokenizer.from_folder(path)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; a model's vocabulary may be larger, padded."""
        return len(self._bytes)

    @abstractmethod
    def token_id(self, token: str) -> int:
        """The id of a token given by its exact name, special ones included. Raises `KeyError`."""

    @abstractmethod
    def _encode(self, parts: Sequence[str | int]) -> list[int]:
        """Ids of texts with control tokens between them; no two texts are neighbours."""

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """Token ids of plain text. `bos` puts the beginning-of-sequence token first, if the folder names one."""
        ids = self._encode([text])
        if not bos:
            return ids
        if self._bos is None:
            raise ValueError("this tokenizer has no bos token")
        return [self._bos, *ids]

    def encode_parts(self, parts: Iterable[str | int]) -> list[int]:
        """Token ids of plain texts with control tokens, given by id, between them; neighbouring texts are one."""
        merged: list[str | int] = []
        for part in parts:
            if isinstance(part, str) and merged and isinstance(merged[-1], str):
                merged[-1] += part
            elif part != "":
                merged.append(part)
        return self._encode(merged)

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
        token_bytes, special = self._tokenizer.token_bytes, self._special
        data = b"".join([token_bytes(i, special=special) for i in token_ids])
        if not self._utf8.getstate()[0]:  # no beginning of a character is held back
            with contextlib.suppress(UnicodeDecodeError):  # most tokens are whole characters
                return data.decode()
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What is held back, as U+FFFD. The decoder starts anew."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def named_token(folder: Path, key: str) -> str | None:
    """The token that a key of tokenizer_config.json names: null, a string, or an object with `content`."""
    file = folder / CONFIG_FILE
    token = read_json(file).get(key) if file.exists() else None
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None and not isinstance(token, str):
        raise ModelError(f"{file}: key `{key}`: expected the name of a token, got {token!r}")
    return token


def bos_token_id(folder: Path, ids: Mapping[str, int], tokens_file: str) -> int | None:
    """The id of the folder's `bos_token`, None if it names none. Raises `ModelError` if there is no such token."""
    token = named_token(folder, "bos_token")
    if token is not None and token not in ids:
        raise ModelError(f"{folder / CONFIG_FILE}: key `bos_token`: `{token}` is not in {tokens_file}")
    return None if token is None else ids[token]
