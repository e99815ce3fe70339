"""One visit: a batch of prompts through the engine's public interface, with what a user would see and what it took.

Knows outputs and rounds as `RequestOutput` and `RoundRecord` give them, and nothing of how the engine works.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftwood.engine.llm import LLM
from draftwood.engine.outputs import RequestOutput, RoundRecord
from draftwood.engine.sampling_params import SamplingParams

Record = dict[str, Any]
"""Figures of one visit by name; the unit ends the name. None where a figure has no value."""


@dataclass(frozen=True)
class Visit:
    record: Record
    tokens: list[list[int]]  # of each request


@dataclass
class Clock:
    """When each request's tokens arrived, in seconds after the call."""

    first: dict[int, float]
    last: dict[int, float]
    gaps: list[tuple[float, int]]  # seconds since the request's delivery before, tokens that came


def visit(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams], mode: Mapping[str, Any]
) -> Visit:
    """Generate once. Raises RuntimeError for a request that ended in an error."""
    memory = PeakMemory(llm.device)
    clock, outputs = Clock({}, {}, []), {}
    started = time.perf_counter()
    for event in llm.stream(prompts, params, **mode):
        outputs[event.index] = event.output
        if event.token_ids:
            _note(clock, event.index, time.perf_counter() - started, len(event.token_ids))
    wall = time.perf_counter() - started
    ordered = [outputs[i] for i in sorted(outputs)]
    for i, output in enumerate(ordered):
        if output.error is not None:
            raise RuntimeError(f"request {i}: {output.error}")
    record = {
        **_speeds(ordered, wall),
        **_latencies(clock),
        **_rounds(ordered, wall),
        **_acceptance(ordered),
        "peak_mib": memory.read(),
        "prompts": digest(prompts),
    }
    return Visit(record, [output.token_ids for output in ordered])


def digest(prompts: Sequence[Sequence[int]]) -> str:
    """Tells visits of the same prompts in two runs."""
    return hashlib.sha256(repr([list(p) for p in prompts]).encode()).hexdigest()[:16]


def _note(clock: Clock, request: int, now: float, tokens: int) -> None:
    if request in clock.first:
        clock.gaps.append((now - clock.last[request], tokens))
    else:
        clock.first[request] = now
    clock.last[request] = now


def _speeds(outputs: Sequence[RequestOutput], wall: float) -> Record:
    tokens = sum(len(o.token_ids) for o in outputs)
    prefill = sum(o.prefill_seconds for o in outputs)
    decode = wall - prefill
    return {
        "us_per_token": decode / tokens * 1e6,
        "tokens_per_s": tokens / decode,
        "tokens_per_s_with_prefill": tokens / wall,
        "prefill_ms": prefill * 1e3,
        "wall_ms": wall * 1e3,
        "tokens": tokens,
    }


def _latencies(clock: Clock) -> Record:
    """Over requests: time to first token. Over tokens: their share of the wait for the delivery they came with."""
    first = np.array(list(clock.first.values())) * 1e3
    record: Record = {"ttft_p50_ms": float(np.median(first)), "ttft_p90_ms": float(np.percentile(first, 90))}
    names = ("itl_p50_ms", "itl_p90_ms", "itl_p99_ms", "gap_p99_ms")
    if not clock.gaps:
        return record | dict.fromkeys(names)
    seconds, tokens = (np.array(column) for column in zip(*clock.gaps, strict=True))
    itl = np.repeat(seconds / tokens, tokens) * 1e3
    values = (*np.percentile(itl, (50, 90, 99)), np.percentile(seconds * 1e3, 99))
    return record | {name: float(value) for name, value in zip(names, values, strict=True)}


def _rounds(outputs: Sequence[RequestOutput], wall: float) -> Record:
    """Milliseconds of an engine round by stage. A round is in the records of its whole batch, so each has its share."""
    records = [r for o in outputs for r in o.rounds]
    rounds = sum(1 / r.batch for r in records)
    stages: dict[str, float] = {}
    for r in records:
        for stage, seconds in r.seconds.items():
            stages[stage] = stages.get(stage, 0.0) + seconds / r.batch
    decode = wall - sum(o.prefill_seconds for o in outputs)
    return {
        "rounds": rounds,
        "round_ms": decode / rounds * 1e3,
        **{f"{stage}_ms": seconds / rounds * 1e3 for stage, seconds in stages.items()},
        "rest_ms": (decode - sum(stages.values())) / rounds * 1e3,
    }


def _acceptance(outputs: Sequence[RequestOutput]) -> Record:
    """Tokens per request and round, and what trees promised. A request's last round is cut short, so it is left out of both."""
    records = [r for o in outputs for r in o.rounds]
    whole = [r for o in outputs for r in o.rounds[:-1]]
    return {
        "tokens_per_round": sum(r.emitted for r in records) / len(records),
        "slots": sum(r.slots for r in records) / len(records),
        "drafted_share": sum(r.slots > 1 for r in records) / len(records),
        "expected_per_round": _mean(whole, "expected"),
        "realised_per_round": _mean(whole, "emitted"),
    }


def _mean(records: Sequence[RoundRecord], name: str) -> float | None:
    return sum(getattr(r, name) for r in records) / len(records) if records else None


class PeakMemory:
    """The most memory held since this object was made: allocated on a GPU, resident on a CPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.known = True
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        except OSError:
            self.known = False

    def read(self) -> float | None:
        """MiB, or None where the system does not say."""
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        if not self.known:
            return None
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 2**10 for line in lines if line.startswith("VmHWM:"))
