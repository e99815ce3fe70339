"""What the pages hold, on the device: the target's latents and the drafter's context K/V, under one page table."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LatentPool:
    """Latents of every target layer; key = all C = R + P numbers of a position, value = the first R."""

    pages: torch.Tensor  # [L, n_pages, page, C]

    @classmethod
    def allocate(
        cls, layers: int, n_pages: int, page: int, width: int, *, dtype: torch.dtype, device: str
    ) -> LatentPool:
        return cls(torch.zeros(layers, n_pages, page, width, dtype=dtype, device=device))

    def copy_page(self, source: int, target: int) -> None:
        self.pages[:, target] = self.pages[:, source]


@dataclass(frozen=True)
class DraftContext:
    """Context K/V of every draft layer: after k_norm and RoPE, for committed positions only."""

    kv: torch.Tensor  # [Ld, n_pages, page, 2, Hkv, hd], keys first

    @classmethod
    def allocate(
        cls, layers: int, n_pages: int, page: int, heads: int, width: int, *, dtype: torch.dtype, device: str
    ) -> DraftContext:
        return cls(torch.zeros(layers, n_pages, page, 2, heads, width, dtype=dtype, device=device))

    def copy_page(self, source: int, target: int) -> None:
        self.kv[:, target] = self.kv[:, source]

    @property
    def k_pages(self) -> torch.Tensor:  # [Ld, n_pages, page, Hkv, hd]
        return self.kv[:, :, :, 0]

    @property
    def v_pages(self) -> torch.Tensor:
        return self.kv[:, :, :, 1]

    def as_layers(self) -> torch.Tensor:
        """[Ld, n_pages, page, 2 Hkv hd]: a view in the form that `commit_kv` writes."""
        return self.kv.flatten(-3)
