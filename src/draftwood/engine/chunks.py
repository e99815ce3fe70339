"""Prefill chunks that are replayed: filled up to one of a few sizes with slots that are computed and change nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftwood.engine.runner import chain

SIZES = (16, 32, 64, 128, 256)
"""Tokens that a chunk is filled up to; a larger one is long enough to run as it is written."""

ALIGNED = 4
"""Numbers between one input and the next, at least: kernels are compiled for addresses that are multiples of 16 bytes."""


class Chunk:
    """What a replayed chunk reads, in one tensor that stays in place: one copy from the host sets it all."""

    def __init__(self, size: int, max_pages: int, device: str) -> None:
        self.size = size
        self.chain = chain(size).torch(device)
        self._inputs = torch.zeros(size + 2 * ALIGNED + max_pages, dtype=torch.int32, device=device)
        tokens, start, count, table = self._inputs.split((size, ALIGNED, ALIGNED, max_pages))
        self.tokens, self.page_table = tokens[None], table[None]  # [1, size], [1, M]
        self.start, self.count = start[:1], count[:1]  # [1]

    def set(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> None:
        """The next replay fills positions start, start + 1, ... with these tokens; without pages, it fills nothing."""
        max_pages = self.page_table.shape[1]
        told = torch.tensor(
            [
                *(*tokens, *[0] * (self.size - len(tokens))),
                *(start, *[0] * (ALIGNED - 1)),
                *(len(tokens), *[0] * (ALIGNED - 1)),
                *(*pages, *[-1] * (max_pages - len(pages))),
            ],
            dtype=torch.int32,
        )
        if self._inputs.is_cuda:
            told = told.pin_memory()  # from other memory the copy would wait for what is in flight
        self._inputs.copy_(told, non_blocking=True)


def padded_size(tokens: int) -> int | None:
    """What a chunk is filled up to; None if it is not replayed."""
    return next((size for size in SIZES if size >= tokens), None)
