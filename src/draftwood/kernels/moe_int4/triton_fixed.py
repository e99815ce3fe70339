"""moe_int4 in Triton, cut as for one number of tokens whatever their number: see `draftwood.kernels.moe.triton_fixed`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftwood.kernels.moe.triton_fixed import TOKENS
from draftwood.kernels.moe_int4.triton_impl import run


def moe_int4(
    x: Tensor,
    router: Tensor,
    bias: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    first_expert: int = 0,
    **routing: Any,
) -> Tensor:
    """See `draftwood.kernels.moe_int4.moe_int4`; raises as the ordinary one does."""
    experts = gate_up_packed, gate_up_scale, down_packed, down_scale
    return run(x, router, bias, *experts, first_expert, planned_for=TOKENS, **routing)
