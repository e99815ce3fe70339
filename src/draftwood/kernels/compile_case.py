"""Triton configurations as they are launched, so that each can be compiled for a chip that is not there.

A `triton_impl` module, or a `triton_fixed` with kernels of its own, offers `compile_cases(capability: int) ->
list[CompileCase]`: for compute capability 80, 90, 100 or 120, what its config chooser would launch there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CAPABILITIES = (80, 90, 100, 120)
"""Compute capabilities, as Triton writes them, that the portable kernels are made for."""

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that one block can have."""


@dataclass(frozen=True)
class CompileCase:
    """One specialisation of one `@triton.jit` function."""

    name: str  # unique in its module
    kernel: Any  # the jitted function
    arguments: Mapping[str, str | int | tuple[str, ...]]
    """Each run-time argument's type ("*bf16", "i32", "fp32"; pointers are 16-byte aligned) or those of a tuple, or an integer as an
    example, specialised as a launch would: 1 becomes a constant, a multiple of 16 is known as one."""
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
