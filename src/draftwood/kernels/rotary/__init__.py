"""rotary: cos and sin of positions, the tables by which `mla_inputs` and `qk_norm_rope` rotate."""

from __future__ import annotations

from draftwood.kernels.registry import for_array
from draftwood.tree import Array


def rotary(
    positions: Array,
    frequencies: Array,
    amplitude: float,
    *,
    start: Array | None = None,
    double: bool = False,
    impl: str | None = None,
) -> tuple[Array, Array]:
    """amplitude * cos(position * frequency) and the same of sin.

    Args:
        positions: [...] i32 or i64, not negative; with `start` they count from it.
        frequencies: [dim] f64, radians per position of each number of a vector: -f for the first half, f for the second, so that
            x cos + roll(x, dim / 2) sin rotates the pairs (j, j + dim / 2).
        amplitude: YaRN's factor.
        start: [B] in the type of positions [B, T], where each row's positions begin; None for 0.
        double: tables in f64 rather than f32.
        impl: implementation name; None chooses by the type and device of `positions`.

    Returns:
        cos, sin: each [..., 1, dim], with `start` [B T, 1, dim]. Angles and what follows are computed in fp64 and rounded once; in fp32 the fastest pair
        would be off by milliradians at position 64k.
    """
    fn = for_array("rotary", positions, impl)
    return fn(positions, frequencies, amplitude, start=start, double=double)  # type: ignore[no-any-return]
