"""Control characters in text of others, such as a model's or a file's: shown on a terminal, for it must not drive it."""

from __future__ import annotations

from typing import TextIO

# Tab and newline stay. C0 and delete have pictures, C1 has none.
_SHOWN = {c: 0x2400 + c for c in range(0x20) if c not in (0x09, 0x0A)} | {0x7F: 0x2421}
_SHOWN |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def shown(text: str) -> str:
    """The text with characters that a terminal prints in place of those that it obeys."""
    return text.translate(_SHOWN)


def fit_for(stream: TextIO, text: str) -> str:
    """What to write to a stream: the text as it is, but `shown` if a terminal reads it."""
    return shown(text) if stream.isatty() else text
