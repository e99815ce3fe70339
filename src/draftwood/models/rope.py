"""Rotary position embedding, default and YaRN: frequencies and tables, always half-split; the kernels rotate.

Sources: RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071, with DeepSeek's two mscale numbers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor, nn

from draftwood.kernels.registry import Kernels
from draftwood.models.errors import ModelError
from draftwood.models.json_config import FolderConfig, Values, parse

YarnRule = Literal["ratio", "factor"]
"""How YaRN scales cos and sin: m(mscale) / m(mscale_all_dim), or m(1) whatever the mscale keys say."""


class Rope(FolderConfig):
    """The rope parameters of a config file, under the names that `transformers` 5 gives them."""

    rope_theta: PositiveFloat
    rope_type: Literal["default", "yarn", "deepseek_yarn"] = "default"
    factor: PositiveFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: PositiveFloat | None = None
    truncate: bool = True
    partial_rotary_factor: float = Field(1.0, ge=1.0, le=1.0)  # partial rotation is not supported

    @model_validator(mode="after")
    def _yarn_is_complete(self) -> Self:
        if self.is_yarn and (self.factor is None or self.original_max_position_embeddings is None):
            raise ValueError("yarn needs `factor` and `original_max_position_embeddings`")
        if not self.is_yarn and (self.factor is not None or self.mscale_all_dim is not None):
            raise ValueError(
                '`factor` and `mscale_all_dim` have a meaning for yarn only, but the type is "default"'
            )
        return self

    @property
    def is_yarn(self) -> bool:
        return self.rope_type != "default"

    def mscale_for(self, weight: float) -> float:
        """m(weight) = 0.1 * weight * ln(factor) + 1; 1 without YaRN or for a factor up to 1."""
        if self.factor is None or self.factor <= 1:
            return 1.0
        return 0.1 * weight * math.log(self.factor) + 1.0

    def amplitude(self, rule: YarnRule = "ratio") -> float:
        """The number that multiplies cos and sin; an explicit `attention_factor` goes before any rule."""
        if not self.is_yarn:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if rule == "ratio" and self.mscale and self.mscale_all_dim:
            return self.mscale_for(self.mscale) / self.mscale_for(self.mscale_all_dim)
        return self.mscale_for(1.0)

    def inverse_frequencies(self, dim: int) -> Tensor:
        """[dim / 2] fp64, radians per position."""
        exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        plain = self.rope_theta**-exponents
        if self.factor is None or self.original_max_position_embeddings is None:
            return plain
        low, high = (
            dim
            * math.log(self.original_max_position_embeddings / (2 * math.pi * turns))
            / (2 * math.log(self.rope_theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low or 0.001)
        ramp = ramp.clamp(0, 1)
        return plain * (1 - ramp + ramp / self.factor)


def take_rope(values: Values, file: Path) -> tuple[Rope, Values]:
    """The rope parameters of a config and the rest of its keys.

    Reads `rope_parameters` (transformers 5) or the pair `rope_scaling` and `rope_theta` with the type under
    `type` or `rope_type`. Raises `ModelError` if none is there, both disagree, or a parameter is unknown.
    """
    rest = {k: v for k, v in values.items() if k not in ("rope_parameters", "rope_scaling", "rope_theta")}
    blocks = [k for k in ("rope_parameters", "rope_scaling") if values.get(k) is not None]
    if len(blocks) == 2 and values["rope_parameters"] != values["rope_scaling"]:
        raise ModelError(f"{file}: keys `rope_parameters` and `rope_scaling` disagree")
    name = blocks[0] if blocks else ""
    block = values[name] if blocks else {}
    if not isinstance(block, dict):
        raise ModelError(f"{file}: key `{name}` must be an object, got {type(block).__name__}")
    merged = dict(block)
    for alias, key, value in (
        ("type", "rope_type", merged.pop("type", None)),
        ("rope_theta", "rope_theta", values.get("rope_theta")),
    ):
        if value is not None and merged.setdefault(key, value) != value:
            raise ModelError(f"{file}: keys `{alias}` and `{name}.{key}` disagree: {value} and {merged[key]}")
    if "rope_theta" not in merged:
        raise ModelError(f"{file}: key `rope_theta` is missing")
    merged = {k: v for k, v in merged.items() if v is not None}
    return parse(Rope, merged, file, prefix=f"{name}." if name else ""), rest


class Rotary(nn.Module):
    """cos and sin of positions, for vectors of `dim` numbers."""

    frequencies: Tensor

    def __init__(
        self, rope: Rope, dim: int, amplitude: float, kernels: Kernels, device: torch.device
    ) -> None:
        super().__init__()
        self.amplitude, self.tables = amplitude, kernels.rotary
        frequencies = rope.inverse_frequencies(dim).to(device)
        self.register_buffer("frequencies", torch.cat((-frequencies, frequencies)), persistent=False)

    def forward(
        self, positions: Tensor, dtype: torch.dtype, start: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tables in fp32 (fp64 for an fp64 model), each [*positions, 1, dim], or [B T, 1, dim] of positions [B, T] that count
        from start [B]."""
        double = dtype == torch.float64
        cos, sin = self.tables(positions, self.frequencies, self.amplitude, start=start, double=double)
        return cos, sin
