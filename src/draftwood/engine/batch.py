"""Requests -> the device state of a round, and a round's results -> host values in one transfer each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draftwood.engine.request import Request
from draftwood.kernels.sample.params import SampleParams
from draftwood.kernels.tree_accept import Done, Limits
from draftwood.round import RoundResult, RoundState


@dataclass(frozen=True)
class HostResult:
    """One round's results as lists, row by row."""

    emitted: list[list[int]]
    done: list[Done]
    n_slots: list[int]


def build_state(
    requests: Sequence[Request], *, max_pages: int, max_context: int, vocab_size: int, device: str
) -> RoundState:
    """The state of a batch before its next round; called when the batch's members change."""

    def column(values: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    table = np.full((len(requests), max_pages), -1, np.int32)
    for row, request in enumerate(requests):
        table[row, : len(request.pages)] = request.pages
    limits = Limits(
        stop_ids=column(_padded([list(r.stop_ids) for r in requests], -1), torch.int32),
        max_new=column([r.params.max_new_tokens - len(r.output.token_ids) for r in requests], torch.int32),
        context_left=column([max_context - r.n_tokens for r in requests], torch.int32),
    )
    return RoundState(
        root=column([r.root for r in requests], torch.int32),
        prefix_len=column([r.prefix_len for r in requests], torch.int32),
        page_table=torch.from_numpy(table).to(device),
        seed=column([r.output.seed for r in requests], torch.int64),
        params=_sample_params(requests, vocab_size, device),
        limits=limits,
    )


def to_host(result: RoundResult) -> HostResult:
    """Wait for the device and read what the host needs."""
    done, n_slots = torch.stack([result.accepted.done, result.tree.n_slots]).tolist()
    emitted = [[token for token in row if token >= 0] for row in result.accepted.emitted.tolist()]
    return HostResult(emitted, [Done(d) for d in done], n_slots)


def _sample_params(requests: Sequence[Request], vocab_size: int, device: str) -> SampleParams:
    params = [r.params for r in requests]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    optional: dict[str, torch.Tensor] = {}
    if any(p.penalised for p in params):
        seen = np.zeros((len(requests), vocab_size), bool)
        counts = np.zeros((len(requests), vocab_size), np.int32)
        for row, r in enumerate(requests):
            seen[row, r.output.prompt_token_ids] = True
            np.add.at(counts[row], r.output.token_ids, 1)
        optional |= {
            "repetition": column([p.repetition_penalty for p in params]),
            "presence": column([p.presence_penalty for p in params]),
            "frequency": column([p.frequency_penalty for p in params]),
            "prompt_seen": torch.from_numpy(seen).to(device),
            "counts": torch.from_numpy(counts).to(device),
        }
    if any(p.logit_bias for p in params):
        ids = _padded([list(p.logit_bias) for p in params], -1)
        values = _padded([list(p.logit_bias.values()) for p in params], 0.0)
        optional |= {
            "bias_ids": torch.tensor(ids, dtype=torch.int32, device=device),
            "bias_values": torch.tensor(values, dtype=torch.float32, device=device),
        }
    return SampleParams(
        temperature=column([p.temperature for p in params]),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int32, device=device),
        top_p=column([p.top_p for p in params]),
        log_min_p=column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]),
        **optional,
    )


def _padded(rows: list, fill: float) -> list:
    width = max(len(row) for row in rows)
    return [row + [fill] * (width - len(row)) for row in rows]
