"""Tiles of the CUDA verify_attn: how many rows, and how many thread blocks share one; and where that is the thing to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

TIMES = {64: (6.0, 1.6), 32: (4.2, 1.68), 16: (2.7, 1.7)}
"""Microseconds of a tile of so many rows, and per block of 64 keys of a thread block, on an H200; of equally good ones the first is taken."""

CLUSTERS = (12, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1)
"""Up to 16 are possible, but merge longer than their shorter shares save."""

MOST_BLOCKS = 10
"""Of keys for a thread block, up to which this was measured to be as fast as Gluon or faster; that goes through many faster."""

ROW_BYTES = 576 * 2  # a query, or a key
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

    The rows that take the least time by `TIMES`, and as few thread blocks as leave none more keys than the largest clusters that the
    chip holds at once would.
    """
    blocks = max(1, -(-keys // 64))

    def tile(tile_rows: int) -> Tile:
        count = B * -(-rows // tile_rows)
        largest = next((c for c in CLUSTERS if count <= resident_clusters(c)), 1)
        most_blocks = -(-blocks // largest)
        cluster = min(c for c in CLUSTERS if c * most_blocks >= blocks)
        return Tile(tile_rows, cluster, count, most_blocks, count <= resident_clusters(1))

    def time(tile: Tile) -> float:
        waves = -(-tile.count // resident_clusters(1))
        start, each = TIMES[tile.rows]
        return waves * (start + each * tile.most_blocks)

    return min(map(tile, TIMES), key=time)


def shared_bytes(rows: int, cluster: int) -> int:
    """Shared memory of a thread block, as `cuda_kernel.cu` lays it out, or `cuda_kernel_64.cu`."""
    share = -(-rows // cluster)  # rows that it merges
    part_bytes = 4 * (256 + 16) if rows == 64 else 512 * 2 + 16  # a row of a partial result
    queries = max(rows * ROW_BYTES, share * cluster * part_bytes)
    small = rows * (4 + 16 + 32) + 17 * 8 if rows == 64 else rows * (128 + 16 + 8 + 4) + 11 * 8
    return -(-queries // 1024) * 1024 + 2 * BLOCK_BYTES + small + share * cluster * 8


def threads(rows: int) -> int:
    """Of a thread block: two warpgroups that compute, and one warp that loads; or a warpgroup, which lends registers to the others."""
    return 384 if rows == 64 else 288
