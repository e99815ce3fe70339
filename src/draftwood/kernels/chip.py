"""The chip that a Triton kernel is configured for: what the choice of tiles and of the grid needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftwood.kernels.compile_case import SHARED_LIMIT


@dataclass(frozen=True)
class Chip:
    capability: int  # as Triton writes it: 90 for compute capability 9.0
    n_sms: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory that one block can have; of the nearest older chip for one not listed."""
        return SHARED_LIMIT[max(c for c in SHARED_LIMIT if c <= max(self.capability, min(SHARED_LIMIT)))]

    @property
    def overlaps(self) -> bool:
        """Whether a launch may begin before the one ahead of it has ended: see `triton_overlap`."""
        return self.capability >= 90

    @property
    def has_wgmma(self) -> bool:
        return self.capability // 10 == 9


INTERPRETED = Chip(80, 5)
"""Stands for the CPU, where Triton kernels run interpreted: few programs, yet enough that work is shared and split."""

off_gpu = INTERPRETED
"""What tensors on the CPU are configured for. Who compiles for a GPU without opening it sets this to that GPU's chip."""


def chip_of(device: torch.device) -> Chip:
    if device.type != "cuda":
        return off_gpu
    properties = torch.cuda.get_device_properties(device)
    return Chip(10 * properties.major + properties.minor, properties.multi_processor_count)
