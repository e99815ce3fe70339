"""Philox4x32-10 and the Gumbel noise made of it, in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _WORD = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(counter: Sequence[np.ndarray], key: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The four u32 words of the block `counter` (four words) under `key` (two words); all broadcast together."""
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = (np.asarray(k, np.uint64) for k in key)
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> _WORD) ^ c1 ^ k0, p1 & _LOW, (p0 >> _WORD) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return [word.astype(np.uint32) for word in np.broadcast_arrays(c0, c1, c2, c3)]


def random_bits(seed: np.ndarray, position: np.ndarray, token: np.ndarray) -> np.ndarray:
    """u32, of the broadcast shape. seed i64; position and token non-negative integers below 2^31."""
    key = np.asarray(seed, np.int64).view(np.uint64)
    token = np.asarray(token, np.int64)
    zero = np.zeros((), np.uint64)
    words = philox4x32((token // 4, np.asarray(position), zero, zero), (key & _LOW, key >> _WORD))
    bits: np.ndarray = np.choose(token % 4, words)
    return bits


def gumbel_of_bits(bits: np.ndarray) -> np.ndarray:
    """f32 standard Gumbel value of 32 random bits; it falls as the bits rise."""
    v = (np.asarray(bits, np.float64) + 0.5) * 2.0**-32
    return (-np.log(-np.log1p(-v))).astype(np.float32)


def gumbel(seed: np.ndarray, position: np.ndarray, token: np.ndarray) -> np.ndarray:
    """f32 noise of the broadcast shape; arguments as in `random_bits`."""
    return gumbel_of_bits(random_bits(seed, position, token))
