"""`SamplingParams`: how one request's tokens are chosen and when it ends."""

from __future__ import annotations

import math

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from draftwood.kernels.noise.ref import philox4x32

MAX_SEED = 2**63 - 1
MAX_INT32 = 2**31 - 1
MAX_WORD = 2**32 - 1
MAX_SAMPLES = 128


def sample_seed(seed: int, sample: int) -> int:
    """The seed of each of the n samples of a request with this seed: sample 0 has the request's own.

    The others take 63 bits of the generator behind all noise, at a counter that no noise uses.
    """
    if sample == 0:
        return seed
    counter, key = np.array([sample, 0, 0, 1]), np.array([seed & MAX_WORD, seed >> 32])
    low, high, *_ = philox4x32(list(counter), list(key))
    return (int(high) << 32 | int(low)) & MAX_SEED


class SamplingParams(BaseModel):
    """Sampling settings; the names and meanings are those of the OpenAI API and of vLLM.

    Raises `pydantic.ValidationError` (a ValueError) that names the field and the accepted range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    """Samples of one prompt, which is prefilled once; see `sample_seed`."""
    max_new_tokens: int = Field(128, ge=1, le=MAX_INT32)
    temperature: float = Field(0.0, ge=0.0, le=1e3)
    """0 is greedy decoding; otherwise at least 0.001."""
    top_k: int = Field(0, ge=0, le=MAX_INT32)
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Keep the fewest most likely tokens that reach this probability, among those top-k kept."""
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    """Keep tokens at least this likely relative to the most likely one."""
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    """Same seed, same output, whatever the mode, budget or batch; None draws one, recorded in the output."""
    repetition_penalty: float = Field(1.0, ge=0.01, le=100.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: dict[int, float] = Field(default_factory=dict)
    """Token id -> value added to its logit, between -1e6 and 1e6; -inf forbids the token."""
    stop: tuple[str, ...] = ()
    """Text that ends the output; it is not part of the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, besides the model's own end tokens."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens."""
    logprobs: int | None = Field(None, ge=0, le=20)
    """Report each token's log-probability before temperature and filters, and those of the n best tokens."""

    @field_validator("temperature")
    @classmethod
    def _no_tiny_temperature(cls, value: float) -> float:
        if 0 < value < 1e-3:
            raise ValueError("a temperature above 0 must be at least 0.001; 0 is greedy")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("a stop string must not be empty")
        return value

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def filtered(self) -> bool:
        """Whether tokens are left out by their rank or probability."""
        filters = (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)
        return self.temperature > 0 and filters

    def check_tokens(self, vocab_size: int) -> None:
        """Raise ValueError naming a token id outside the vocabulary."""
        for field, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise ValueError(
                        f"{field}: token id {token} is outside the vocabulary 0..{vocab_size - 1}"
                    )
        for token, value in self.logit_bias.items():
            if not (value == -math.inf or abs(value) <= 1e6):  # NaN fails too
                raise ValueError(
                    f"logit_bias: the value for token {token} must be -inf or within 1e6 of 0, got {value}"
                )
