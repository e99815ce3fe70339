"""moe_int4 in Triton: `moe` whose products unpack words in registers.

Routing, order and sums are those of `moe`. The weights are the rows of a product and the pairs its columns, so that a matrix
instruction takes as few as 8 pairs. Two warps per program: with four, Hopper and later would want weights in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from draftwood.kernels.chip import Chip, chip_of
from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.moe import triton_impl as moe_impl
from draftwood.kernels.moe.triton_impl import combine, local, put_in_order, route
from draftwood.kernels.moe_int4 import GROUP, PER_WORD, triton_kernels
from draftwood.kernels.triton_overlap import overlapped
from draftwood.kernels.triton_rows import check_contiguous

_ACTIVATE_BLOCK = 256
_SPLIT_TO = 4
"""Programs per multiprocessor that gate_up is split for."""


def moe_int4(
    x: Tensor,
    router: Tensor,
    bias: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    first_expert: int = 0,
    **routing: Any,
) -> Tensor:
    """See `draftwood.kernels.moe_int4.moe_int4`.

    bf16, fp16 and fp32. Raises `TypeError` for another dtype and `ValueError` where one of the experts' four arrays is not
    contiguous.
    """
    return run(
        x, router, bias, gate_up_packed, gate_up_scale, down_packed, down_scale, first_expert, **routing
    )


def run(
    x: Tensor,
    router: Tensor,
    bias: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    first_expert: int,
    *,
    planned_for: int | None = None,
    **routing: Any,
) -> Tensor:
    """`moe_int4`, its tiles and splits chosen for `planned_for` tokens, by default those there are."""
    by_planes = x.view(len(x), -1, 4).mT.contiguous()
    weights, experts = route(x, router, bias, planned_for=planned_for, **routing)
    quantised = {
        "gate_up_packed": gate_up_packed,
        "gate_up_scale": gate_up_scale,
        "down_packed": down_packed,
        "down_scale": down_scale,
    }
    check_contiguous(**quantised)
    (N, d), (E, _, words) = x.shape, down_packed.shape
    I = words * PER_WORD
    pairs = experts.numel()
    chip = chip_of(x.device)
    planned_pairs, alone = (planned_for or N) * pairs // N, N == 1 and planned_for is None
    tile = choose_tile(chip, x.element_size(), planned_pairs, E)
    outputs = torch.empty((pairs, d), dtype=torch.float32, device=x.device)
    if len(router) > E:
        experts = local(experts, first_expert, E)
        outputs.zero_()
    order, tile_expert = put_in_order(experts, tile, E, alone=alone)
    hidden = torch.empty((pairs, I), dtype=x.dtype, device=x.device)
    tiles = len(tile_expert) if alone else tile.count(planned_pairs, E)
    splits = _splits(chip, tiles * I // tile.block_n, d, tile.block_k)
    parts = torch.empty((splits, pairs, 2, I) if splits > 1 else 1, dtype=torch.float32, device=x.device)
    triton_kernels.gate_up[(len(tile_expert), I // tile.block_n, splits)](
        *(by_planes, gate_up_packed.view(torch.int16), gate_up_scale, hidden, parts),
        *(order, tile_expert, pairs),
        **_constexprs(tile, d, I, alone, _in_pairs(x.dtype, gate_up_scale.dtype)),
        TOP_K=pairs // N,
        SPLITS=splits,
        **tile.launch(),
        **overlapped(chip),
    )
    if splits > 1:
        triton_kernels.activate[(pairs, triton.cdiv(I, _ACTIVATE_BLOCK))](
            *(parts, hidden, pairs, I, splits, _ACTIVATE_BLOCK), **overlapped(chip)
        )
    wide = tile.for_down(d)
    triton_kernels.down[(len(tile_expert), d // wide.block_n)](
        *(hidden, down_packed.view(torch.int16), down_scale, weights, outputs),
        *(order, tile_expert, pairs),
        **_constexprs(wide, d, I, alone, _in_pairs(x.dtype, down_scale.dtype)),
        **wide.launch(),
        **overlapped(chip),
    )
    return combine(outputs, N, x.dtype)


@dataclass(frozen=True)
class Tile(moe_impl.Tile):
    """block_m pairs and block_n rows of each of gate and up."""

    def shared(self, item_size: int) -> int:
        """Bytes of shared memory of a `gate_up` program: activations, and words and scales of two matrices."""
        per_column = self.block_m * item_size + 2 * self.block_n / 2 + 2 * self.block_n * item_size / GROUP
        return int((self.num_stages - 1) * self.block_k * per_column)

    def for_down(self, d: int) -> Tile:
        """As many rows of its one matrix, if that divides d."""
        return replace(self, block_n=2 * self.block_n) if d % (2 * self.block_n) == 0 else self

    def launch(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def choose_tile(chip: Chip, item_size: int, pairs: int, E: int) -> Tile:
    """As many pairs as twice an expert's share, for a second tile would unpack everything again.

    Many programs per multiprocessor are preferred to a deeper pipeline: unpacking takes most of the time that reading does.
    """
    if item_size == 4:
        return Tile(16, 32, 64, 4, 2)
    block_m = next((m for m in (8, 16, 32) if m * E >= 2 * pairs), 64)
    block_k = 256 if block_m <= 16 else 128  # more would not fit the registers
    for programs, num_stages in ((4, 4), (4, 3), (2, 3), (1, 3)):
        tile = Tile(block_m, GROUP, block_k, 2, num_stages)
        if programs * tile.shared(item_size) <= chip.shared:
            return tile
    raise ValueError(f"moe_int4: no pipeline of {block_m} pairs fits {chip.shared} bytes of shared memory")


def _splits(chip: Chip, programs: int, d: int, block_k: int) -> int:
    """Into how many parts the sums over d are cut, so that few experts still occupy the chip. None of them is empty."""
    steps = -(-d // block_k)
    splits = max(1, min(steps, _SPLIT_TO * chip.n_sms // programs))
    return -(-steps // -(-steps // splits))


def _in_pairs(dtype: torch.dtype, scale: torch.dtype) -> bool:
    """Whether two weights are unpacked by one instruction: 16 bits, as the scales are. Triton's interpreter has no PTX."""
    return dtype == scale and dtype.itemsize == 2 and not triton.knobs.runtime.interpret


def _constexprs(tile: Tile, d: int, I: int, alone: bool, in_pairs: bool) -> dict[str, int]:
    return {"d": d, "I": I, "ALONE": alone, "IN_PAIRS": in_pairs, **tile.constexprs()}


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`: one product with the fewest pairs to a tile, one with the most.

    What is `moe`'s is compiled there.
    """
    chip = Chip(capability, 132)
    gate_up, _, activate = _compile_cases(chip, 1, 512)
    _, down, _ = _compile_cases(chip, 4096, 2048)
    return [gate_up, activate, down]


def _compile_cases(chip: Chip, N: int, I: int) -> list[CompileCase]:
    d, E, top_k = 7168, 384, 8
    pairs = N * top_k
    tile = choose_tile(chip, 2, pairs, E)
    splits = _splits(chip, tile.count(pairs, E) * I // tile.block_n, d, tile.block_k)
    matrix: dict[str, Any] = {"packed": "*i16", "scale": "*bf16"}
    order: dict[str, Any] = {"order": "*i32", "tile_expert": "*i32", "pairs": "i32"}
    first = {"x": "*bf16", **matrix, "hidden": "*bf16", "parts": "*fp32", **order}
    second = {"hidden": "*bf16", **matrix, "routing": "*fp32", "outputs": "*fp32", **order}
    summing = {"parts": "*fp32", "hidden": "*bf16", "pairs": "i32"}
    shape, wide = (_constexprs(t, d, I, N == 1, in_pairs=True) for t in (tile, tile.for_down(d)))
    overlap = {"OVERLAP": chip.overlaps}
    shape |= {"TOP_K": top_k, "SPLITS": splits, **overlap}
    adding = {"I": I, "SPLITS": splits, "BLOCK": _ACTIVATE_BLOCK, **overlap}
    launch = (tile.num_warps, tile.num_stages)
    return [
        CompileCase(f"gate_up {N} tokens", triton_kernels.gate_up, first, shape, *launch),
        CompileCase(f"down {N} tokens", triton_kernels.down, second, wide | overlap, *launch),
        CompileCase(f"activate {N} tokens", triton_kernels.activate, summing, adding),
    ]
