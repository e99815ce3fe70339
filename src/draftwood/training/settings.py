"""What a drafter training run is: one validated object, saved with its checkpoints and in the model card."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

Labels = Literal["hard", "soft"]
"""hard: the sampled tokens, as published; soft: the target's distribution where it sampled them."""


class TrainSettings(BaseModel):
    """Defaults are the published recipe's (arXiv 2602.06036) at block 8; lengths are in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: PositiveInt = 5
    block_size: int = Field(8, ge=2)
    taps: tuple[int, ...] | None = None
    """Target layers listened to, 0-based; None spreads one per draft layer from the second to the third last."""
    heads: PositiveInt | None = None
    """Query heads; None takes the target's number. Likewise kv_heads (None: half the heads, if that divides)."""
    kv_heads: PositiveInt | None = None
    head_dim: int | None = Field(None, ge=2, multiple_of=2)
    """None: hidden size / heads."""
    intermediate_size: PositiveInt | None = None
    """None takes the target's dense one."""
    mask_token_id: int | None = Field(None, ge=0)
    """None takes `mask_token` of the target's tokenizer_config.json."""
    init: str | None = None
    """Drafter folder whose weights to start from; None starts at random. Only number of layers and block size may differ."""
    init_layers: tuple[NonNegativeInt, ...] | None = None
    """Which layers of `init` become the drafter's, in order; None takes all."""

    length: int = Field(512, ge=4)
    """Prompt and continuation together."""
    temperatures: tuple[Annotated[float, Field(ge=0.0)], ...] = Field((0.0,), min_length=1)
    """Continuations are sampled at these in turn; 0 is greedy."""
    eval_prompts: PositiveInt = 64
    """Held out of the data, from its end."""
    generation_batch: PositiveInt = 256

    labels: Labels = "hard"
    epochs: PositiveFloat = 6.0
    batch: PositiveInt = 32
    """Sequences per step."""
    anchors: PositiveInt = 32
    """Blocks per sequence and step."""
    gamma: PositiveFloat = 4.0
    lr: PositiveFloat = 6e-4
    warmup: float = Field(0.04, ge=0.0, lt=1.0)
    """Share of the run."""
    clip: PositiveFloat = 1.0
    seconds: PositiveFloat | None = None
    """End the schedule after this time even if the epochs are not over; makes a run depend on the machine's speed."""
    seed: int = Field(0, ge=0)

    checkpoint_every: PositiveInt = 500
    """Steps."""
    eval_every: PositiveInt = 500
    compile: bool = False
    """torch.compile the drafter's layers and the loss; pays on a GPU."""

    @model_validator(mode="after")
    def _layers_are_of_something(self) -> Self:
        if self.init_layers is not None and self.init is None:
            raise ValueError("init_layers: expected `init` too, the drafter whose layers these are")
        return self
