"""Points in time by a device's own clock, in the order of its work."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

Moment = float | torch.cuda.Event


def now(device: str) -> Moment:
    """When the device has done what it was given so far."""
    if not device.startswith("cuda"):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True)
class Span:
    """From one moment to a later one of the same device."""

    began: Moment
    ended: Moment

    def seconds(self) -> float:
        """Waits until the later moment has come."""
        if isinstance(self.began, float) or isinstance(self.ended, float):
            assert isinstance(self.began, float)
            assert isinstance(self.ended, float)
            return self.ended - self.began
        self.ended.synchronize()
        return float(self.began.elapsed_time(self.ended)) / 1e3
