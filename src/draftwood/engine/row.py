"""`Row`: a request as the device side knows it, in plain values that can be sent to other ranks."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Row:
    """All that the device needs of a request to decode it from where it stands."""

    prompt: list[int]
    output: list[int]
    """Tokens emitted so far; the newest of all tokens is the root."""
    pages: list[int]
    seed: int
    params: SamplingParams
    stop_ids: tuple[int, ...]

    @property
    def root(self) -> int:
        return (self.output or self.prompt)[-1]

    @property
    def n_tokens(self) -> int:
        return len(self.prompt) + len(self.output)
