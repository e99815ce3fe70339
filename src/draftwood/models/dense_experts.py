"""All experts of a layer at once, as one packed SwiGLU block whose inner columns carry the routing weights.

The sparse way runs a pair of products per expert that some row chose, each with few rows: it is right for many experts or
many rows. Where a draft tree chooses most of few experts anyway, two products over all of them read half the bytes
once and add up the weighted outputs on the way. `most_rows` says where that ends.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftwood.models.packed import PackedMatrix

SPARSE_READ = 9.0
"""Time for one expert with a row or a few by fp32 products, over that of streaming the packed expert.

Measured on two cores with AVX2 (24 GB/s of halves; 5.6 GB/s of fp32, which MKL copies before it multiplies).
"""
ROW = 0.2
"""Time of one more row through an expert, over that of streaming the packed expert: 120 GFLOP/s at 24 GB/s."""
LARGEST = 128
"""Rows up to which the costs are compared, the slots of the largest tree."""


def most_rows(n_experts: int, top_k: int) -> int:
    """The most rows, all fewer ones included, for which computing every expert is the quicker way; 0 for none.

    Costs are in packed experts streamed. N rows that choose at random read n_experts (1 - (1 - top_k / n_experts)^N).
    """
    for rows in range(1, LARGEST + 1):
        dense = n_experts * (1 + ROW * rows)
        chosen = n_experts * (1 - (1 - top_k / n_experts) ** rows)
        if dense > chosen * SPARSE_READ + ROW * rows * top_k:
            return rows - 1
    return LARGEST


class DenseExperts:
    """Routed and shared experts; see `of`."""

    def __init__(
        self, gate_up: PackedMatrix, down: PackedMatrix, inner: int, own: range, n_experts: int
    ) -> None:
        self._gate_up, self._down, self._inner = gate_up, down, inner
        self._n_routed, self._n_experts = len(own), n_experts
        self._own = None if len(own) == n_experts else slice(own.start, own.stop)

    @classmethod
    def of(
        cls,
        gate_up: Tensor,
        down: Tensor,
        shared: tuple[Tensor, Tensor] | None,
        own: range | None = None,
        n_experts: int | None = None,
    ) -> Self | None:
        """Of gate_up [E, 2 I, d], down [E, d, I] and the shared experts' gate_up [2 S, d] and down [d, S].

        `own` are the numbers of these among `n_experts`, where there are more. None where the weights cannot be packed.
        """
        E, _, inner = down.shape
        gate, up = (part.flatten(0, 1) for part in gate_up.chunk(2, 1))
        columns = down.transpose(0, 1).flatten(1)  # [d, E I]
        if shared is not None:
            shared_gate, shared_up = shared[0].chunk(2)
            gate, up = torch.cat((gate, shared_gate)), torch.cat((up, shared_up))
            columns = torch.cat((columns, shared[1]), 1)
        packed_gate_up, packed_down = PackedMatrix.of(torch.cat((gate, up))), PackedMatrix.of(columns)
        if packed_gate_up is None or packed_down is None:
            return None
        return cls(packed_gate_up, packed_down, inner, own or range(E), n_experts or E)

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [N, d], weights and experts [N, k] as `route` gives them -> [N, d].

        An unchosen expert's output is multiplied by 0: it is finite for every finite x that a chosen one survives in practice.
        """
        gate, up = self._gate_up(x).chunk(2, -1)
        h = F.silu(gate).mul_(up)
        scale = x.new_zeros(len(x), self._n_experts).scatter_(1, experts.long(), weights)
        if self._own is not None:
            scale = scale[:, self._own]
        routed = h[:, : self._n_routed * self._inner]
        routed.view(len(x), self._n_routed, self._inner).mul_(scale[..., None])
        return self._down(h)
