"""The device and the number type that an engine runs on, as a user names them."""

from __future__ import annotations

import torch

from draftwood.kernels.chip import chip_of
from draftwood.kernels.specialised import Use
from draftwood.models.config import TargetConfig


def choose_device(device: str) -> str:
    """`cpu` or `cuda`, for `auto` what there is. Raises ValueError."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f'device: expected "auto", "cpu" or "cuda", got "{device}"')
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for and torch finds no CUDA device")
    return device


def choose_dtype(dtype: str, device: str) -> torch.dtype:
    """The type of that name, for `auto` what suits the device. Raises ValueError."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
    if dtype == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    if dtype not in known:
        raise ValueError(f"dtype: expected auto, {', '.join(known)}, got {dtype}")
    return known[dtype]


def attention_use(config: TargetConfig, dtype: torch.dtype, device: str, page: int) -> Use | None:
    """What a target wants of `verify_attn` on a GPU, for the choice of the implementation; None on a CPU."""
    if device != "cuda":
        return None
    capability, name = chip_of(torch.device(device)).capability, str(dtype).removeprefix("torch.")
    return Use(capability, name, config.kv_lora_rank, config.qk_rope_head_dim, page)
