"""Held-out prompts, and what counts as an output that loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from packed import read_tokens

LOOPS_BELOW = 0.7
"""An output loops when at most this share of its 4-grams is distinct."""


def held_windows(folder: Path, count: int, length: int) -> list[list[int]]:
    """`count` windows at random places of the held-out text in held.xz, none across a document border."""
    held = read_tokens([folder], "held")
    rng, found = np.random.default_rng(7), []
    while len(found) < count:
        at = int(rng.integers(0, len(held) - length))
        if (held[at : at + length] > 1).all():
            found.append(held[at : at + length].tolist())
    return found
