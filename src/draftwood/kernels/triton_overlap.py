"""Launches of one operation that follow each other: the next one's programs are there when the last of this one's end.

Programmatic dependent launch, from compute capability 9.0 on. All launches of an operation but the first are made with
`launch_pdl`, so the first one begins when all that comes before the operation has ended.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from draftwood.kernels.chip import Chip


def overlapped(chip: Chip) -> dict[str, bool]:
    """Arguments of a launch that is not an operation's first, and whose kernel calls `await_previous` in every program."""
    return {"OVERLAP": chip.overlaps, "launch_pdl": chip.overlaps}


@triton.jit
def begin_next(OVERLAP: tl.constexpr):
    """Let the next launch's programs take places that are free. In a launch that is not the first: after `await_previous`."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def await_previous(OVERLAP: tl.constexpr):
    """Wait until the launch ahead has ended and what it wrote can be read. Before, only what the operation was given may be read."""
    if OVERLAP:
        gdc_wait()
