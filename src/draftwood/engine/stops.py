"""Stop strings over streamed text: cut before the first one, hold back what may become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Text goes in piece by piece; what comes out never holds a stop string, nor the start of one still possible."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    @property
    def any(self) -> bool:
        """Whether there is a string to stop at; if not, all text may be shown at once."""
        return bool(self._stops)

    def push(self, piece: str) -> str:
        """Text now safe to show. After a hit (see `hit`) nothing more comes out."""
        if self.hit is not None:
            return ""
        text = self._held + piece
        found = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, _, self.hit = min(found)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back, once no more is to come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
