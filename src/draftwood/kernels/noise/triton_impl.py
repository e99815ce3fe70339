"""The same noise inside Triton kernels, exact for a few tokens and bounded for many.

`gumbel` needs fp64 logarithms, which some chips run at a sixty-fourth of their fp32 speed. So kernels rank all tokens by
fp32 stand-ins with a known error first (`approximate_rate`, `upper_bound`) and compute `gumbel` for those that can win.
"""

from __future__ import annotations

import triton
import triton.language as tl

RATE_ERROR = tl.constexpr(2.0**-17)
"""-log(approximate_rate(bits)) differs from the fp64 value by less."""

_UNIT = tl.constexpr(2.0**-32)


@triton.jit
def random_bits(seed, position, token):
    """u32 of the i32 tokens; seed i64 and position i32 are scalars or broadcast with them."""
    block = (token // 4).to(tl.uint32)
    zero = block * 0
    w0, w1, w2, w3 = tl.philox(seed, block, zero + position.to(tl.uint32), zero, zero)
    word = token % 4
    return tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))


@triton.jit
def tile_bits(seed, position, first, SIZE: tl.constexpr):
    """[SIZE] u32: `random_bits` of the tokens first..first + SIZE - 1; first and SIZE are multiples of 4."""
    block = (first // 4 + tl.arange(0, SIZE // 4)).to(tl.uint32)
    zero = block * 0
    w0, w1, w2, w3 = tl.philox(seed, block, zero + position.to(tl.uint32), zero, zero)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [SIZE])


@triton.jit
def gumbel(bits):
    """f32 noise; 1 - v is exact in fp64, so that its logarithm is log1p(-v)."""
    v = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(1.0 - v))).to(tl.float32)


@triton.jit
def approximate_rate(bits):
    """f32 close to -log1p(-v), whose negative logarithm is the noise: exp(-noise)."""
    v = (bits.to(tl.float32) + 0.5) * _UNIT
    rest = ((0xFFFFFFFF - bits).to(tl.float32) + 0.5) * _UNIT  # 1 - v
    series = v * (1.0 + v * (0.5 + v * (0.33333333 + v * (0.25 + v * 0.2))))
    return tl.where(v < 0.0625, series, -tl.log(rest))


@triton.jit
def upper_bound(bits):
    """f32 -log(v), never below the noise by more than `RATE_ERROR`, and close to it where it is large.

    v is rounded down to 23 bits, by way of the floats in 1..2, and to no less than 2^-33, its least value.
    """
    v = ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return tl.log2(tl.maximum(v, 1.1641532182693481e-10)) * -0.6931472
