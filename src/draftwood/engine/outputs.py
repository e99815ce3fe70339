"""What a request gives back: text, tokens, why it ended, and what every round did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "error", "cancelled"]


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities at one output position: fp32, before temperature, penalties and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The n best (token id, log-probability), best first."""


@dataclass(frozen=True)
class TracedTree:
    """One round's tree of one request, for pictures: live slots only."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    path: list[int]
    """Accepted slots, root first."""
    emitted: list[int]


@dataclass(slots=True)  # not frozen: making one takes an eighth of the time, and a batch has many
class RoundRecord:
    """One round of one request."""

    slots: int
    """Live slots of the tree, root included; 1 in plain rounds."""
    padded_slots: int
    accepted: int
    """Drafted tokens accepted."""
    emitted: int
    batch: int
    expected: float
    """Tokens the tree's own scores promised, bonus included."""
    seconds: dict[str, float]
    """Wall time of each stage, shared by the whole batch."""
    trace: TracedTree | None = None


@dataclass
class RequestOutput:
    """The result of one request; while streaming, the state so far.

    With n > 1 this is the first sample, and `outputs` lists all of them.
    """

    prompt_token_ids: list[int]
    seed: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Output tokens, the stop token included if one ended it."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it."""
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None
    rounds: list[RoundRecord] = field(default_factory=list)
    prefill_seconds: float = 0.0
    sample: int = 0
    """Which of the n samples of its prompt this is."""
    others: list[RequestOutput] = field(default_factory=list)
    """Samples 1 .. n - 1; empty on those themselves."""
    cached_tokens: int = 0
    """Prompt tokens not prefilled: found in the prefix cache, or in the pages of the first sample."""
    preemptions: int = 0
    """How often it lost its pages to an older request and was prefilled again."""

    @property
    def outputs(self) -> list[RequestOutput]:
        """All n samples, this one first."""
        return [self, *self.others]

    @property
    def tokens_per_round(self) -> float:
        return len(self.token_ids) / len(self.rounds) if self.rounds else 0.0

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Prefill and the five stages, summed over the rounds that this request took part in."""
        total = {"prefill": self.prefill_seconds}
        for record in self.rounds:
            for stage, seconds in record.seconds.items():
                total[stage] = total.get(stage, 0.0) + seconds
        return total

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the wall time of the rounds; prefill is not counted."""
        seconds = sum(sum(r.seconds.values()) for r in self.rounds)
        return len(self.token_ids) / seconds if seconds else 0.0


@dataclass(slots=True)
class StreamEvent:
    """New text and tokens of one request; `output` is the request's full state so far."""

    index: int
    """Of the prompt; `output.sample` tells the samples of one prompt apart."""
    text: str
    token_ids: list[int]
    output: RequestOutput
