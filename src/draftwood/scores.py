"""From draft logits to node scores: how sharp they are, and how much the target's noise counts at each depth.

The noise of a position decides the target's choice only as far as the target itself is undecided. A block drafter is unsure for
a second reason, which grows with depth: it does not know the tokens in between. So at depth d and temperature T candidates are
scored by log softmax(a l / T + T gamma_d g), with draft logits l and noise g; at T = 0, or without noise, by
log softmax(a l / max(T, T0)). The numbers belong to a drafter and are fitted to it. They change the tree, never the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError
from torch import Tensor

from draftwood.models.errors import ModelError

FILE = "scores.json"


class ScoreRule(BaseModel):
    """The numbers of one drafter; the defaults leave draft logits as published drafters have them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    sharpness: PositiveFloat = 1.0
    """a: above 1 where the marginals of a block are flatter than what follows an accepted prefix."""
    noise: tuple[PositiveFloat, ...] | None = Field(None, min_length=1)
    """gamma_d for d = 1, 2, ..., the last one for all deeper; None weighs the noise by 1 at every temperature."""
    coldest: PositiveFloat | None = None
    """T0: the temperature that colder ones, greedy included, are scored at; None scores without noise at 1."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """What a drafter folder's scores.json says; the defaults if it has none. Raises `ModelError` naming the key."""
        file = Path(folder) / FILE
        if not file.exists():
            return cls()
        try:
            return cls.model_validate_json(file.read_text(encoding="utf-8"))
        except (ValidationError, UnicodeDecodeError) as e:
            problem = e.errors()[0] if isinstance(e, ValidationError) else {"loc": (), "msg": "not UTF-8"}
            raise ModelError(f"{file}: key `{'.'.join(map(str, problem['loc']))}`: {problem['msg']}") from e

    def at(self, temperature: Tensor, depth: int, *, coupled: bool) -> Scoring:
        """The rule for rows of these temperatures [B] and candidates of up to `depth` tokens ahead."""
        warm = temperature[:, None] > 0
        at = torch.ones_like(temperature) if self.coldest is None else temperature.clamp(min=self.coldest)
        factor = (self.sharpness / at)[:, None].repeat(1, depth)
        if not coupled:
            return Scoring(factor, None)
        weight = None
        if self.noise is not None:
            gamma = [*self.noise[:depth], *[self.noise[-1]] * (depth - len(self.noise))]
            noise = temperature[:, None] * torch.tensor(gamma, device=warm.device)
            weight = torch.where(warm, noise, 1.0)
        at = temperature if self.coldest is None else at
        noisy = self.sharpness * (temperature / at)[:, None] / (1.0 if weight is None else weight)
        return Scoring(torch.where(warm, noisy, factor), weight)


@dataclass(frozen=True)
class Scoring:
    """A rule at the temperatures of a batch: what does not change from round to round."""

    factor: Tensor
    """[B, D] f32, of draft logits."""
    weight: Tensor | None
    """[B, D] f32, of the noise at temperatures above 0; None where log-probs are scores as they are."""

    def of(self, depth: int) -> dict[str, Tensor]:
        """What `topk_logprobs` is to be told, beside the noise, so that its log-probs of the first `depth` depths are scores."""
        told = (
            {"scale": self.factor} if self.weight is None else {"scale": self.factor, "weight": self.weight}
        )
        return {name: numbers[:, :depth] for name, numbers in told.items()}


NEUTRAL = ScoreRule()
