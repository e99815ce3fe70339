"""The work of a case against what the machine can do: ceilings, shares, and times too good to be true."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

SUSPECT = 1.10
"""Above the ceiling by more than this is a fault of the measurement. A ceiling is one pattern's speed, measured (a copy
reads and writes; a kernel may only read), so a few per cent above it do happen."""


@dataclass(frozen=True)
class Ceilings:
    """Measured in the same run, by a large copy, a copy that stays in cache, and a large matrix product."""

    memory_gbps: float
    cache_gbps: float
    cache_bytes: int  # of the last-level cache
    tflops: dict[str, float]  # by dtype

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Ceilings:
        return Ceilings(**data)


@dataclass(frozen=True)
class Bound:
    """The least time a case can take here, and whether memory or arithmetic says so."""

    floor_us: float
    binds: str


def bound(case_bytes: int, flops: int, dtype: str, cache: str, ceilings: Ceilings) -> Bound:
    """Unavoidable bytes and FLOPs over the ceilings; warm data that fits the cache may come from there."""
    from_cache = cache == "warm" and case_bytes <= ceilings.cache_bytes
    gbps = ceilings.cache_gbps if from_cache else ceilings.memory_gbps
    memory_us = case_bytes / gbps / 1e3
    peak = ceilings.tflops.get(dtype, max(ceilings.tflops.values()))
    compute_us = flops / peak / 1e6
    if memory_us >= compute_us:
        return Bound(memory_us, "cache" if from_cache else "memory")
    return Bound(compute_us, "compute")


def figures(median_us: float, case_bytes: int, flops: int, limit: Bound) -> dict[str, Any]:
    """The row fields that follow from the median: rates, and the share of the ceiling that binds."""
    return {
        "gbps": case_bytes / median_us / 1e3,
        "tflops": flops / median_us / 1e6,
        "ceiling_share": limit.floor_us / median_us,
        "floor_us": limit.floor_us,
        "binds": limit.binds,
    }


def is_suspect(low_us: float, limit: Bound) -> bool:
    """Even the slow end of the interval being above the ceiling would be needed for doubt-free proof; we take the low."""
    return low_us * SUSPECT < limit.floor_us
