"""Tile shapes of the Triton verify_attn: the first of a list, best first, whose shared memory the chip has."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.kernels.chip import Chip


@dataclass(frozen=True)
class Tiles:
    """How `attend` cuts rows (slot, head) and keys, and how its widths are padded."""

    block_m: int  # rows
    block_n: int  # keys
    num_warps: int
    num_stages: int  # 2: the next block of keys is loaded during the arithmetic on this one; 1: it is not
    latent_pad: int
    rope_pad: int

    def shared(self, item_size: int, chip: Chip) -> int:
        """Bytes of shared memory of a program, an upper bound."""
        row = (self.latent_pad + self.rope_pad) * item_size
        keys, queries = self.block_n * row, self.block_m * row
        weights = self.block_m * self.block_n * item_size
        output = self.block_m * self.latent_pad * 4  # on its way to another layout, when the keys are gone
        if chip.has_wgmma and self.block_n >= 64:  # operands stay in shared memory
            working = queries + self.num_stages * keys + weights
        else:  # they pass through it to registers
            working = max(queries, keys + weights)
        return max(working, output) + _REDUCTIONS


_REDUCTIONS = 2048
"""Bytes for reductions across warps, generously."""

# block_m, block_n, num_warps, num_stages
_HOPPER = ((64, 64, 8, 2), (32, 64, 8, 2), (16, 64, 8, 2))
_ANY = ((16, 32, 8, 1), (16, 16, 8, 1))
_FP32 = ((16, 16, 8, 1),)

_WGMMA_ROWS = 64
"""Narrower latents leave wgmma in the second product alone, and then the pipeliner gives them one buffer: it sees them go
to registers for that product, not that the first, in a branch, still reads them while the next block is loaded."""

_FEW_BLOCKS = 12
"""Up to so many blocks of 64 x 64 per multiprocessor, tiles of half the rows end sooner, though each key is loaded more often."""


def choose_tiles(
    chip: Chip, item_size: int, B: int, rows: int, keys: int, value_dim: int, rope_dim: int
) -> Tiles:
    """Tiles for `rows` = T H rows per request, which have `keys` keys at most.

    Raises `ValueError` where nothing fits, naming the widths.
    """
    latent_pad, rope_pad = padded(value_dim), padded(rope_dim)
    if item_size == 4:
        shapes: tuple[tuple[int, int, int, int], ...] = _FP32
    elif chip.has_wgmma:
        latent_pad = max(latent_pad, _WGMMA_ROWS)
        few = B * -(-rows // 64) * -(-keys // 64) <= _FEW_BLOCKS * chip.n_sms
        most = min(32 if few else 64, max(16, 1 << (rows - 1).bit_length()))
        shapes = tuple(s for s in _HOPPER if s[0] <= most) + _ANY
    else:
        shapes = _ANY
    for block_m, block_n, num_warps, num_stages in shapes:
        tiles = Tiles(block_m, block_n, num_warps, num_stages, latent_pad, rope_pad)
        if tiles.shared(item_size, chip) <= chip.shared:
            return tiles
    raise ValueError(
        f"verify_attn: no tile of latents {value_dim} + {rope_dim} wide fits {chip.shared} bytes of shared memory"
    )


def has_few_blocks(chip: Chip, tiles: Tiles, B: int, T: int, H: int, capacity: int) -> bool:
    """Whether no program has more than two blocks, whatever the lengths are: then less code takes less time than a pipeline."""
    blocks = -(-capacity // tiles.block_n) - (-T // tiles.block_n)
    return B * -(-T * H // tiles.block_m) * blocks <= 2 * chip.n_sms


def padded(width: int) -> int:
    """A power of two that tensor cores take, at least `width`."""
    return max(16, 1 << (width - 1).bit_length())


def merge_rows(rows: int, n_sms: int) -> int:
    """Rows per program of `merge_parts`: as many as leave every multiprocessor four programs, 1 to 8."""
    return 1 << max(0, min(3, (rows // (4 * n_sms)).bit_length() - 1))
