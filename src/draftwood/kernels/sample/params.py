"""The per-row sampling parameters as arrays: what `sample` reads on the device."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.tree import Array


@dataclass(frozen=True)
class SampleParams:
    """Row b of every array belongs to request b. Arrays with a default are None when no row of the batch needs them.

    The penalties `repetition`, `presence` and `frequency` come with `prompt_seen` and `counts`, or all five are None.
    """

    temperature: Array  # [B] f32, 0 = greedy, else large enough that logits / temperature stay finite
    top_k: Array  # [B] i32, 0 = off
    top_p: Array  # [B] f32 in 0..1, 1 = off
    log_min_p: Array  # [B] f32 <= 0, fp32(log(min_p)), -inf = off
    repetition: Array = None  # [B] f32 > 0, 1 = off
    presence: Array = None  # [B] f32, 0 = off
    frequency: Array = None  # [B] f32, 0 = off
    prompt_seen: Array = None  # [B, V] bool, token occurs in the prompt
    counts: Array = None  # [B, V] i32, occurrences in the committed output, root included
    bias_ids: Array = None  # [B, M] i32, -1 padded, distinct per row
    bias_values: Array = None  # [B, M] f32, -inf bans the token
    mask_bits: Array = None  # [B, T, ceil(V/32)] i32, bit v % 32 of word v // 32 set iff token v is allowed
    unfiltered: Array = None  # [B] bool, all set: no row has a filter, which spares work for filters
