"""The budget of a whole command: counted from the start of the process, imports included."""

from __future__ import annotations

import os
import time
from pathlib import Path

CLOSING_S = 0.4
"""Kept back for the last rows, the table and the worker's end."""


class Countdown:
    """Seconds used since the process started, and left until `seconds` are up."""

    def __init__(self, seconds: float, age_s: float | None = None) -> None:
        self.seconds = seconds
        self._start = time.monotonic() - (process_age() if age_s is None else age_s)

    def used(self) -> float:
        return time.monotonic() - self._start

    def left(self) -> float:
        """Until the time to close down: a little before the end."""
        return self.seconds - CLOSING_S - 0.01 * self.seconds - self.used()


def process_age() -> float:
    """Seconds since this process started, from /proc where it is believable, else its processor time."""
    try:
        fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # no such file or clock outside Linux
        return time.process_time()
    return age if 0 <= age < 3600 else time.process_time()
