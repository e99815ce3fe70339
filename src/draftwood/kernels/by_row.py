"""Functions of single numbers, so computed that a number's result does not depend on its place in a tensor.

On a CPU torch works on vectors of numbers, and the few left over at the end of a tensor, or of a thread's share of it, go through
scalar code whose exponential may differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) for x [N, ...], on a CPU one row at a time."""
    return torch.stack([function(row) for row in x]) if x.is_cpu else function(x)
