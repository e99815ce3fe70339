"""The same noise inside Triton kernels, exact for a few tokens and bounded for many.

`gumbel` needs fp64 logarithms, which some chips run at a sixty-fourth of their fp32 speed. So kernels rank all tokens by
fp32 stand-ins with a known error first (`approximate_rate`, `upper_bound`) and compute `gumbel` for those that can win.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

RATE_ERROR = tl.constexpr(2.0**-17)
"""-log(approximate_rate(bits)) differs from the fp64 value by less."""

_UNIT = tl.constexpr(2.0**-32)
_LN_2 = tl.constexpr(math.log(2))
_FIRST_TERM = tl.constexpr(0.5 / math.log(2) * 2.0**-32)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def random_bits(seed, position, token):
    """u32 of the i32 tokens; seed i64 and position i32 are scalars or broadcast with them."""
    w0, w1, w2, w3 = _philox(seed, position, (token // 4).to(tl.uint32))
    word = token % 4
    return tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))


@triton.jit
def tile_bits(seed, position, first, SIZE: tl.constexpr):
    """[SIZE] u32: `random_bits` of the tokens first..first + SIZE - 1; first and SIZE are multiples of 4."""
    return block_bits(seed, position, first // 4 + tl.arange(0, SIZE // 4), SIZE)


@triton.jit
def block_bits(seed, position, block, SIZE: tl.constexpr):
    """[SIZE] u32: `random_bits` of the four tokens from 4 * i on, for each i of block [SIZE / 4] in turn."""
    w0, w1, w2, w3 = _philox(seed, position, block.to(tl.uint32))
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [SIZE])


@triton.jit
def _philox(seed, position, block):
    """The four u32 words of Philox4x32-10. A 64-bit product is one instruction where its halves would be two."""
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c2 = block, block * 0
    c1, c3 = c2 + position.to(tl.uint32), c2
    for _ in tl.static_range(10):
        p0, p1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


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
    exponent, f = _split(rest)
    return -_log1p(exponent, tl.where(exponent == 0, -v, f))  # -v has more bits than rest - 1


@triton.jit
def approximate_log(x):
    """Within 2^-18 of log(x), for f32 x in 2^-33..2^33, with half the instructions of `tl.log`."""
    exponent, f = _split(x)
    return _log1p(exponent, f)


@triton.jit
def _split(x):
    """e * 2^23 and f with x = 2^e * (1 + f) and 1 + f in sqrt(1/2)..sqrt(2)."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) & -0x800000
    return exponent, (bits - exponent).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _log1p(exponent, f):
    """log(2^e * (1 + f)) of what `_split` gives; the polynomial is a minimax fit, 1.7e-7 from log1p(f) / f."""
    p = tl.fma(_like(f, -0.101068482), f, _like(f, 0.162225604))
    p = tl.fma(p, f, _like(f, -0.172508358))
    p = tl.fma(p, f, _like(f, 0.199001685))
    p = tl.fma(p, f, _like(f, -0.249699086))
    p = tl.fma(p, f, _like(f, 0.333350599))
    p = tl.fma(p, f, _like(f, -0.500003636))
    p = tl.fma(p, f, _like(f, 0.99999994))
    return tl.fma(exponent.to(tl.float32), _like(f, 8.262958e-08), f * p)


@triton.jit
def _like(x, constant):
    return tl.full(x.shape, constant, tl.float32)


@triton.jit
def upper_bound(bits):
    """f32, never below the noise by more than `RATE_ERROR`, and hardly above it where it is not small: by 5 v^2 / 24 about; inf for bits of 0."""
    return (32.0 - least_log2(bits)) * _LN_2


@triton.jit
def least_log2(bits):
    """f32 log2(rate * 2^32) or less, in four instructions: log2 of v and the first term of what rate / v adds; -inf of bits of 0.

    Too large by 34 * 2^-22 at most. Without that term tokens with little noise seem to have 0.1 more, and then few blocks are not enough.
    """
    x = bits.to(tl.float32)
    log2 = tl.log2(x) if _INTERPRETED else libdevice.fast_log2f(x)
    return tl.fma(x, _like(x, _FIRST_TERM), log2)
