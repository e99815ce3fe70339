"""Tiles of the CUDA verify_attn: how many rows, and how many thread blocks share one; and where that is the thing to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

COST = {32: 1.5, 16: 1.0}
"""Microseconds per block of 64 keys of a tile of so many rows, on an H200; of equally good ones the first is taken."""

CLUSTERS = (12, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1)
"""Up to 16 are possible, but merge longer than their shorter shares save."""

MOST_BLOCKS = 10
"""Of keys for a thread block, up to which this was measured to be as fast as Gluon or faster; that goes through many faster."""

ROW_BYTES = 576 * 2  # a query, or a key
PART_BYTES = 512 * 2 + 16  # a row of a partial result
BLOCK_BYTES = 64 * ROW_BYTES


@dataclass(frozen=True)
class Tile:
    rows: int  # (slot, head) of one request
    cluster: int  # thread blocks
    count: int  # of tiles, of all requests
    most_blocks: int  # of 64 keys for one thread block
    resident: bool  # whether the chip holds all of them at once

    @property
    def is_fast(self) -> bool:
        """Whether this is what to run, not Gluon."""
        return self.resident and self.most_blocks <= MOST_BLOCKS


def choose_tile(B: int, rows: int, keys: int, resident_clusters: Callable[[int], int]) -> Tile:
    """Of B requests of `rows` rows with `keys` keys at most; the function tells how many clusters of a size the chip holds at once.

    As many rows as let the chip go through many keys fastest, and as many thread blocks as it holds at once or there are blocks of
    keys.
    """
    blocks = max(1, -(-keys // 64))

    def tile(tile_rows: int) -> Tile:
        count = B * -(-rows // tile_rows)
        cluster = next((c for c in CLUSTERS if count <= resident_clusters(c)), 1)
        return Tile(tile_rows, cluster, count, -(-blocks // cluster), count <= resident_clusters(1))

    def cost(tile: Tile) -> float:
        waves = -(-tile.count // resident_clusters(1))
        return COST[tile.rows] * waves / tile.cluster

    best = min(map(tile, COST), key=cost)
    return replace(best, cluster=next(c for c in CLUSTERS if c <= min(best.cluster, blocks)))


def shared_bytes(rows: int, cluster: int) -> int:
    """Shared memory of a thread block, as `cuda_kernel.cu` lays it out."""
    share = -(-rows // cluster)  # rows that it merges
    queries = max(rows * ROW_BYTES, share * cluster * PART_BYTES)
    small = rows * (128 + 16 + 8 + 4) + share * cluster * 8 + 11 * 8
    return -(-queries // 1024) * 1024 + 2 * BLOCK_BYTES + small
