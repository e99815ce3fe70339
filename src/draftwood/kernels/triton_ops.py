"""What the Triton kernels share: integers in the order of floats, and the largest of many."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(x):
    """The i32 that is ordered as the f32 x is; x is not NaN. -0.0 comes just before 0.0."""
    return _flip(tl.cast(x, tl.float32).to(tl.int32, bitcast=True))


@triton.jit
def from_ordered(i):
    """The f32 of an i32 made by `ordered`."""
    return _flip(i).to(tl.float32, bitcast=True)


@triton.jit
def _flip(bits):
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def packed(x, index):
    """i64 keys in the order "larger f32 x first, then smaller index"; x is not NaN, 0 <= index < 2^31."""
    return (ordered(x + 0.0).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)  # -0.0 + 0.0 = 0.0


@triton.jit
def packed_value(key):
    return from_ordered((key >> 32).to(tl.int32))


@triton.jit
def packed_index(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def largest(keys, LOG_N: tl.constexpr, LOG_K: tl.constexpr):
    """[2^LOG_K] in descending order, of 2^LOG_N >= 2^LOG_K i64 keys.

    A bitonic sort of runs of that length; then pairs of runs are merged into one until one is left.
    """
    for log_run in tl.static_range(1, LOG_K + 1):
        keys = _merge(keys, log_run)
    for _ in tl.static_range(LOG_N - LOG_K):
        keys = _merge(_larger_halves(keys, 1 << LOG_K), LOG_K)
    return keys


@triton.jit
def _merge(keys, log_run: tl.constexpr):
    """Sort bitonic runs of 2^log_run keys, downwards and upwards in turn."""
    for step in tl.static_range(log_run):
        keys = _exchange(keys, 1 << (log_run - 1 - step), 1 << log_run)
    return keys


@triton.jit
def _exchange(keys, stride: tl.constexpr, run: tl.constexpr):
    N: tl.constexpr = keys.shape[0]
    pairs = tl.reshape(keys, [N // (2 * stride), 2, stride])
    others = tl.sum(pairs, 1, keep_dims=True) - pairs  # wraps back
    place = tl.reshape(tl.arange(0, N), [N // (2 * stride), 2, stride])
    keep_larger = ((place & stride) == 0) == ((place & run) == 0)
    return tl.reshape(tl.where((others > pairs) == keep_larger, others, pairs), [N])


@triton.jit
def _larger_halves(keys, run: tl.constexpr):
    """Of each run sorted downwards and the next, sorted upwards, the larger half: again a bitonic run."""
    N: tl.constexpr = keys.shape[0] // 2
    return tl.reshape(tl.max(tl.reshape(keys, [N // run, 2, run]), 1), [N])
