"""moe in Triton, cut as for one number of tokens whatever their number: so a token's sums have one order in every batch.

Within a tile rows do not meet, and a token's place in it changes nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftwood.kernels.moe.triton_impl import run

TOKENS = 16
"""What tiles and splits are chosen for: a small draft tree."""


def moe(
    x: Tensor,
    router: Tensor,
    bias: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    first_expert: int = 0,
    **routing: Any,
) -> Tensor:
    """See `draftwood.kernels.moe.moe`; raises as the ordinary one does."""
    return run(x, router, bias, gate_up, down, first_expert, planned_for=TOKENS, **routing)
