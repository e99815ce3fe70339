"""Routed experts stored as INT4 groups: what the files hold against what the config says, and one layer's, stacked.

The words stay as they are stored, see `draftwood.kernels.moe_int4`. Knows no routing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftwood.kernels.moe_int4 import GROUP, PER_WORD
from draftwood.models.config import TargetConfig
from draftwood.models.errors import ModelError
from draftwood.models.weights import Take, Weights

SCALES = {"BF16": torch.bfloat16, "F32": torch.float32}
"""Stored type of the scales -> that in memory."""

SHAPES = ("I32", "I64")
"""Stored types of `weight_shape`."""


class Int4Experts(NamedTuple):
    """As `moe_int4` takes them."""

    gate_up_packed: Tensor  # [E, 2 I, d / 8] i32
    gate_up_scale: Tensor  # [E, 2 I, d / 32] bf16 or f32
    down_packed: Tensor  # [E, d, I / 8] i32
    down_scale: Tensor  # [E, d, I / 32]


def check_stored(weights: Weights, config: TargetConfig) -> None:
    """Raise `ModelError` naming the first tensor that is packed where the config says it is not, or the other way."""
    for name in weights.names:
        module, _, kind = name.rpartition(".")
        if kind not in ("weight", "weight_packed"):
            continue
        packed = config.is_packed(module)
        if packed != (kind == "weight_packed"):
            raise ModelError(
                f"{weights.header(name).where} is {'not ' if packed else ''}packed, "
                f"but by `quantization_config` in config.json `{module}` is{'' if packed else ' not'}"
            )


def stack_int4(E: int, d: int, inner: int, take: Take, own: range | None = None) -> Int4Experts:
    """This rank's columns of the experts `own`, by default all E; `inner` is the width over all ranks."""
    own = range(E) if own is None else own
    start, stop = take.shard.bounds(inner, what="`moe_intermediate_size`")
    I = stop - start
    scales = take.header("0.gate_proj.weight_scale")
    if scales.dtype not in SCALES:
        raise ModelError(f"{scales.where} is {scales.dtype}, expected {' or '.join(SCALES)}")
    scale = SCALES[scales.dtype]
    stacked = Int4Experts(
        take.empty(len(own), 2 * I, d // PER_WORD, dtype=torch.int32),
        take.empty(len(own), 2 * I, d // GROUP, dtype=scale),
        take.empty(len(own), d, I // PER_WORD, dtype=torch.int32),
        take.empty(len(own), d, I // GROUP, dtype=scale),
    )
    words = {"dtype": torch.int32, "stored": ("I32",)}
    numbers = {"dtype": scale, "stored": (scales.dtype,)}
    for other in set(range(E)).difference(own):
        for name in ("gate_proj", "up_proj", "down_proj"):
            take.under(f"{other}.{name}").skip("weight_packed", "weight_scale", "weight_shape")
    for e, number in enumerate(own):
        for name, rows in (("gate_proj", slice(I)), ("up_proj", slice(I, None))):
            matrix = take.under(f"{number}.{name}")
            _check_shape(matrix, inner, d)
            stacked.gate_up_packed[e, rows] = matrix.rows("weight_packed", inner, d // PER_WORD, **words)
            stacked.gate_up_scale[e, rows] = matrix.rows("weight_scale", inner, d // GROUP, **numbers)
        matrix = take.under(f"{number}.down_proj")
        _check_shape(matrix, d, inner)
        stacked.down_packed[e] = matrix.columns("weight_packed", d, inner // PER_WORD, **words)
        stacked.down_scale[e] = matrix.columns("weight_scale", d, inner // GROUP, **numbers)
    return stacked


def _check_shape(take: Take, *shape: int) -> None:
    said = take("weight_shape", 2, dtype=torch.int64, stored=SHAPES).tolist()
    if said != list(shape):
        raise ModelError(f"{take.header('weight_shape').where} says {said}, expected {list(shape)}")
