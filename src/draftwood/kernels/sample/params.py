"""The per-row sampling parameters as arrays: what `sample` reads on the device."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.tree import Array


@dataclass(frozen=True)
class SampleParams:
    """Row b of every array belongs to request b. Optional arrays are None when no row of the batch needs them."""

    temperature: Array  # [B] f32, 0 = greedy
    top_k: Array  # [B] i32, 0 = off
    top_p: Array  # [B] f32, 1 = off
    log_min_p: Array  # [B] f32, fp32(log(min_p)), -inf = off
    repetition: Array | None = None  # [B] f32, 1 = off; all three penalties are given together or not at all
    presence: Array | None = None  # [B] f32, 0 = off
    frequency: Array | None = None  # [B] f32, 0 = off
    prompt_seen: Array | None = None  # [B, V] bool, token occurs in the prompt; with the penalties
    counts: Array | None = (
        None  # [B, V] i32, occurrences in the committed output, root included; with the penalties
    )
    bias_ids: Array | None = None  # [B, M] i32, -1 padded, distinct per row
    bias_values: Array | None = None  # [B, M] f32
    mask_bits: Array | None = (
        None  # [B, T, ceil(V/32)] i32, bit v % 32 of word v // 32 set iff token v is allowed
    )
