"""The same noise in torch, on any device: u32 arithmetic in the low half of int64.

On CPU the hundred elementwise steps of Philox run on numpy views of the tensors, which costs half as much.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.tree import Array

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def philox4x32(counter: Sequence[Array], key: Sequence[Array]) -> list[Array]:
    """Four words as in the reference; all arguments and results hold u32 in i64, tensors or numpy arrays.

    Nothing is expanded before it must be: words that do not depend on an axis stay small on it in early rounds.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for i in range(10):
        p0, p1 = c0 * _M0, c2 * _M1  # wraps; bits 32..63 are the high word all the same
        # c1 and c3 keep the whole products: the mask after the xor drops their high words
        c0, c1 = ((p1 >> 32) ^ c1 ^ (k0 + i * _W0)) & _LOW, p1
        c2, c3 = ((p0 >> 32) ^ c3 ^ (k1 + i * _W1)) & _LOW, p0
    return [c0, c1 & _LOW, c2, c3 & _LOW]


def random_bits(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """i64 holding u32, of the broadcast shape. seed i64; position and token non-negative integers."""
    token = token.long()[..., None]  # at least one axis: numpy scalars would warn where arrays wrap
    words = torch.broadcast_tensors(*_blocks(seed[..., None], position[..., None], token >> 2), token)
    return torch.cat(words[:4], -1).gather(-1, words[4] & 3).squeeze(-1)


def slice_bits(seed: Tensor, position: Tensor, offset: int, size: int) -> Tensor:
    """[..., size] i64: `random_bits` of the tokens offset..offset+size-1, four per block computed.

    seed and position are integers of shape [...].
    """
    block = torch.arange(offset // 4, (offset + size + 3) // 4, device=seed.device)
    words = torch.stack(_blocks(seed[..., None], position[..., None], block), -1)
    return words.flatten(-2)[..., offset % 4 : offset % 4 + size]


def gumbel_of_bits(bits: Tensor) -> Tensor:
    """f32 standard Gumbel value of 32 random bits held in i64."""
    minus_v = bits.double().add_(0.5).mul_(-(2.0**-32))
    return minus_v.log1p_().neg_().log_().float().neg_()


def gumbel(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """f32 noise of the broadcast shape; arguments as in `random_bits`."""
    return gumbel_of_bits(random_bits(seed, position, token))


def slice_gumbel(seed: Tensor, position: Tensor, offset: int, size: int) -> Tensor:
    """[..., size] f32: `gumbel` of the tokens offset..offset+size-1; seed and position broadcast to [...].

    On CPU rows are remembered for a while: drafting, sampling and the next rounds ask for the same ones.
    """
    seed, position = torch.broadcast_tensors(seed, position)
    if not seed.is_cpu or seed.numel() == 0:
        return gumbel_of_bits(slice_bits(seed, position, offset, size))
    keys = [
        (s, p, offset, size)
        for s, p in zip(seed.flatten().tolist(), position.flatten().tolist(), strict=True)
    ]
    return torch.stack(_recent.rows(keys)).view(*seed.shape, size)


class RecentRows:
    """Rows of `slice_gumbel`, which is a pure function, the newest `most_bytes` of them."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._rows: dict[_Key, Tensor] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, keys: Sequence[_Key]) -> list[Tensor]:
        """One [size] f32 per (seed, position, offset, size), not to be written to; offset and size are the same in all."""
        found = {key: self._rows.get(key) for key in keys}
        missing = [key for key, row in found.items() if row is None]
        if missing:
            seeds, positions = torch.tensor([key[:2] for key in missing]).unbind(1)
            made = gumbel_of_bits(slice_bits(seeds, positions, *missing[0][2:]))
            found |= zip(missing, made, strict=True)
            self._keep(missing, made)
        return [found[key] for key in keys]  # type: ignore[misc]

    def _keep(self, keys: Sequence[_Key], rows: Tensor) -> None:
        row_bytes = rows.shape[1] * rows.element_size()
        for key, row in zip(keys, rows, strict=True):
            self._rows[key] = row.clone()
            self._bytes += row_bytes
        while self._bytes > self._most_bytes:
            self._bytes -= self._rows.pop(next(iter(self._rows))).nbytes


_Key = tuple[int, int, int, int]
"""seed, position, offset, size"""

_recent = RecentRows(16 << 20)


def _blocks(seed: Tensor, position: Tensor, block: Tensor) -> list[Tensor]:
    position = position.long()
    if seed.is_cpu:
        words = _words(seed.numpy(), position.numpy(), block.numpy())
        return [torch.from_numpy(word) for word in words]
    return _words(seed, position, block)


def _words(seed: Array, position: Array, block: Array) -> list[Array]:
    zero = block[..., :1] & 0
    return philox4x32((block, position, zero, zero), (seed & _LOW, (seed >> 32) & _LOW))
