"""DFlash as a source of draft logits: the drafter, its paged context and the target's embedding and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from draftwood.cache.pools import DraftContext
from draftwood.kernels import Kernels
from draftwood.models.drafter import Drafter
from draftwood.models.layers import ramp
from draftwood.models.target import Target
from draftwood.round import Drafting, RoundState
from draftwood.scores import NEUTRAL, ScoreRule

MOST_WAITING = 64
"""Plain rounds whose features wait to be projected together."""


RING = 16
"""Plain rounds whose features a ring holds."""


class DFlashDrafting:
    """`draftwood.round.Drafting` over a DFlash drafter.

    Rounds that draft nothing leave one feature vector per request. They wait, so that rounds without drafts cost what
    they do without a drafter, and enter the context together, in order, before the next block is drafted.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        context: DraftContext,
        kernels: Kernels,
        rule: ScoreRule = NEUTRAL,
    ) -> None:
        self.drafter, self.target, self.context, self.kernels = drafter, target, context, kernels
        self.rule = rule
        self.taps: tuple[int, ...] = drafter.config.target_layer_ids
        self.max_depth: int = drafter.config.block_size - 1
        self._waiting: list[torch.Tensor] = []  # [B, 1, F], of successive positions
        self._where: tuple[torch.Tensor, torch.Tensor] | None = None  # page table, start of the first

    def logits(self, state: RoundState, depth: int) -> torch.Tensor:
        """[B, depth, V] f32 from one drafter pass over a block of depth + 1 positions."""
        self.catch_up()
        hidden = self.drafter(
            state.root,
            state.prefix_len,
            self.context.k_pages,
            self.context.v_pages,
            state.page_table,
            self.target.embed,
            depth=depth,
        )
        return self.target.logits(hidden)

    def extend(
        self, features: torch.Tensor, page_table: torch.Tensor, start: torch.Tensor, count: torch.Tensor
    ) -> None:
        """Project features to K/V once per committed token and write them into its page.

        A single position per request (count 1) waits for others as long as the page table stays the same tensor.
        """
        full = len(self._waiting) == MOST_WAITING
        if full or features.shape[1] > 1 or (self._where is not None and self._where[0] is not page_table):
            self.catch_up()
        if features.shape[1] > 1:
            self._write(features, page_table, start, count)
            return
        self._where = self._where or (page_table, start.clone())  # `start` will move on
        self._waiting.append(features)

    def project(
        self, taps: tuple[torch.Tensor, ...], start: torch.Tensor, depths: torch.Tensor
    ) -> torch.Tensor:
        """K/V [Ld, B, T, 2 Hkv hd] of all slots of a tree."""
        every = ramp(depths.shape[1], depths.device).expand(depths.shape)
        features = self.kernels.path_features(taps, every)
        return self.drafter.context(features, start, depths).flatten(-3)

    def commit(
        self,
        projected: torch.Tensor,
        page_table: torch.Tensor,
        start: torch.Tensor,
        path: torch.Tensor,
        count: torch.Tensor,
    ) -> None:
        """Write what `project` gave for the slots of each path into its pages."""
        self.kernels.commit_kv(self.context.as_layers(), projected, page_table, start, path, count)

    def copy_page(self, source: int, target: int) -> None:
        """Give page `target` the context of page `source`; what waits for either must be in it."""
        self.context.copy_page(source, target)

    def catch_up(self) -> None:
        """Bring what waits into the context; due before a page of the batch goes to another request."""
        if self._where is None:
            return
        features, (page_table, start) = torch.cat(self._waiting, 1), self._where
        self._waiting, self._where = [], None
        self._write(features, page_table, start, torch.full_like(start, features.shape[1]))

    def _write(
        self, features: torch.Tensor, page_table: torch.Tensor, start: torch.Tensor, count: torch.Tensor
    ) -> None:
        kv = self.drafter.context(features, start).flatten(-3)  # [Ld, B, N, 2 Hkv hd]
        rows = ramp(features.shape[1], features.device).expand(features.shape[:2])
        self.kernels.commit_kv(self.context.as_layers(), kv, page_table, start, rows, count)


@dataclass(frozen=True)
class Ring:
    """Features of plain rounds that wait for projection, where a replayed round finds them."""

    features: torch.Tensor  # [B, RING, F]
    start: torch.Tensor  # [B] i32, position of the first
    count: torch.Tensor  # [B] i32


@runtime_checkable
class ReplayableDrafting(Drafting, Protocol):
    """Drafting for rounds that are replayed: all it remembers lies in `ring`, on the device.

    Whoever replays the rounds counts them, and has `empty_ring` run before a block is drafted and before the ring is full.
    """

    room: int
    """Plain rounds that a ring has room for."""
    ring: Ring | None
    """Where features of plain rounds go; without one, single positions are written at once like all others."""

    def new_ring(self, rows: int) -> Ring: ...

    def empty_ring(self, page_table: torch.Tensor) -> None:
        """Bring what waits into the context."""


class RingDrafting(DFlashDrafting):
    """DFlash as `ReplayableDrafting`."""

    room = RING
    ring: Ring | None = None

    def new_ring(self, rows: int) -> Ring:
        width = len(self.taps) * self.target.config.hidden_size
        device = self.target.device
        nothing = torch.zeros(rows, dtype=torch.int32, device=device)
        features = torch.zeros(rows, RING, width, dtype=self.target.dtype, device=device)
        return Ring(features, nothing, nothing.clone())

    def extend(
        self, features: torch.Tensor, page_table: torch.Tensor, start: torch.Tensor, count: torch.Tensor
    ) -> None:
        ring = self.ring
        if features.shape[1] > 1 or ring is None:
            self._write(features, page_table, start, count)
            return
        self.kernels.keep_features(ring.features, ring.start, ring.count, features, start)

    def catch_up(self) -> None:
        """Nothing: see `empty_ring`."""

    def empty_ring(self, page_table: torch.Tensor) -> None:
        """Bring what waits into the context."""
        ring = self.ring
        if ring is None:
            raise RuntimeError("no ring is in use")
        self._write(ring.features, page_table, ring.start, ring.count)
        ring.count.zero_()
