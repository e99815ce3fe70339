"""Rows of a batch -> the device state of its rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from draftwood.engine.row import Row
from draftwood.kernels.sample.params import SampleParams
from draftwood.kernels.tree_accept import Limits
from draftwood.round import RoundState


def build_state(
    rows: Sequence[Row],
    *,
    max_pages: int,
    max_context: int,
    vocab_size: int,
) -> RoundState:
    """The state of a batch before its next round, on the host; called when the batch's members change."""

    table = np.full((len(rows), max_pages), -1, np.int32)
    for line, row in zip(table, rows, strict=True):
        line[: len(row.pages)] = row.pages
    limits = Limits(
        stop_ids=_tensor(_padded([list(r.stop_ids) for r in rows], -1), np.int32),
        max_new=_tensor([r.params.max_new_tokens - len(r.output) for r in rows], np.int32),
        context_left=_tensor([max_context - r.n_tokens for r in rows], np.int32),
    )
    return RoundState(
        root=_tensor([r.root for r in rows], np.int32),
        prefix_len=_tensor([r.n_tokens - 1 for r in rows], np.int32),
        page_table=torch.from_numpy(table),
        seed=_tensor([r.seed for r in rows], np.int64),
        params=_sample_params(rows, vocab_size),
        limits=limits,
        live=torch.ones(len(rows), dtype=torch.bool),
    )


def _sample_params(rows: Sequence[Row], vocab_size: int) -> SampleParams:
    params = [r.params for r in rows]

    def column(values: list[float]) -> torch.Tensor:
        return _tensor(values, np.float32)

    optional: dict[str, torch.Tensor] = {}
    if any(p.penalised for p in params):
        seen = np.zeros((len(rows), vocab_size), bool)
        counts = np.zeros((len(rows), vocab_size), np.int32)
        for i, row in enumerate(rows):
            seen[i, row.prompt] = True
            np.add.at(counts[i], row.output, 1)
        optional |= {
            "repetition": column([p.repetition_penalty for p in params]),
            "presence": column([p.presence_penalty for p in params]),
            "frequency": column([p.frequency_penalty for p in params]),
            "prompt_seen": torch.from_numpy(seen),
            "counts": torch.from_numpy(counts),
        }
    if any(p.logit_bias for p in params):
        ids = _padded([list(p.logit_bias) for p in params], -1)
        values = _padded([list(p.logit_bias.values()) for p in params], 0.0)
        optional |= {
            "bias_ids": _tensor(ids, np.int32),
            "bias_values": _tensor(values, np.float32),
        }
    if not any(p.filtered for p in params):
        optional["unfiltered"] = torch.ones(len(rows), dtype=torch.bool)
    return SampleParams(
        temperature=column([p.temperature for p in params]),
        top_k=_tensor([p.top_k for p in params], np.int32),
        top_p=column([p.top_p for p in params]),
        log_min_p=column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]),
        **optional,
    )


def _tensor(values: list, dtype: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype))  # in a sixth of the time that `torch.tensor` takes


def _padded(rows: list, fill: float) -> list:
    """Rows of one width, a power of two and at least 4: so batches have few shapes."""
    longest = max(4, *(len(row) for row in rows))
    width = 1 << (longest - 1).bit_length()
    return [row + [fill] * (width - len(row)) for row in rows]
