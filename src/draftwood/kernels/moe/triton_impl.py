"""moe in Triton: route, put the (token, expert) pairs in expert order, two products over expert tiles, sum per token.

Six kernels, five for one token, grids from shapes alone: a token's experts are known on the device only, so the grid has a tile for the most
that there can be and programs of unused ones end at once. No sum depends on the order in which programs run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from draftwood.kernels.chip import Chip, chip_of
from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.moe import triton_kernels
from draftwood.kernels.triton_overlap import overlapped
from draftwood.kernels.triton_rows import check_rows

_ROUTER_TILE = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128}
_MOST_SPLITS = 16
_CHUNK = 1024  # pairs that `align` looks at together
_COMBINE_BLOCK = 512


def moe(
    x: Tensor,
    router: Tensor,
    bias: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    first_expert: int = 0,
    **routing: Any,
) -> Tensor:
    """See `draftwood.kernels.moe.moe`.

    bf16, fp16 and fp32. Raises `TypeError` for another dtype and `ValueError` where the rows of a matrix are not
    contiguous.
    """
    return run(x, router, bias, gate_up, down, first_expert, **routing)


def run(
    x: Tensor,
    router: Tensor,
    bias: Tensor,
    gate_up: Tensor,
    down: Tensor,
    first_expert: int,
    *,
    planned_for: int | None = None,
    top_k: int,
    **options: Any,
) -> Tensor:
    """`moe`, its tiles and splits chosen for `planned_for` tokens, by default those there are."""
    routing, experts = route(x, router, bias, planned_for=planned_for, top_k=top_k, **options)
    check_rows(gate_up=gate_up, down=down)
    N, d = x.shape
    E, _, I = down.shape
    pairs = N * top_k
    chip = chip_of(x.device)
    tile = choose_tile(chip, x.element_size(), (planned_for or N) * top_k, E)
    hidden = torch.empty((pairs, I), dtype=x.dtype, device=x.device)
    outputs = torch.empty((pairs, d), dtype=torch.float32, device=x.device)
    if len(router) > E:
        experts = local(experts, first_expert, E)
        outputs.zero_()
    alone = N == 1 and planned_for is None
    order, tile_expert = put_in_order(experts, tile, E, alone=alone)
    tiles = len(tile_expert)
    launch = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **overlapped(chip)}
    triton_kernels.gate_up[(tiles, triton.cdiv(I, tile.block_n))](
        *(x, gate_up, hidden, order, tile_expert, pairs, d, I),
        *(x.stride(0), gate_up.stride(0), gate_up.stride(1)),
        TOP_K=top_k,
        ALONE=alone,
        **tile.constexprs(),
        **launch,
    )
    triton_kernels.down[(tiles, triton.cdiv(d, tile.block_n))](
        *(hidden, down, routing, outputs, order, tile_expert, pairs, d, I),
        *(down.stride(0), down.stride(1)),
        ALONE=alone,
        **tile.constexprs(),
        **launch,
    )
    return combine(outputs, N, x.dtype)


def route(
    x: Tensor,
    router: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    scaling: float = 1.0,
    planned_for: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights [N, top_k] f32 and experts [N, top_k] i32, by biased score descending. Raises as `moe` does.

    `planned_for` as in `run`.
    """
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"`x`: expected bfloat16, float16 or float32, got {x.dtype}")
    check_rows(x=x, router=router)
    N, d = x.shape
    E = len(router)
    chip = chip_of(x.device)
    splits, d_split = _router_splits(chip, planned_for or N, E, d)
    parts = torch.empty((splits, N, E), dtype=torch.float32, device=x.device)
    weights = torch.empty((N, top_k), dtype=torch.float32, device=x.device)
    experts = torch.empty((N, top_k), dtype=torch.int32, device=x.device)
    grid = (triton.cdiv(N, _ROUTER_TILE["BLOCK_M"]), triton.cdiv(E, _ROUTER_TILE["BLOCK_N"]), splits)
    triton_kernels.logits[grid](
        *(x, router, parts, N, E, d, x.stride(0), router.stride(0), d_split),
        **_ROUTER_TILE,
        OVERLAP=chip.overlaps,
    )
    triton_kernels.select[(N,)](
        *(parts, bias.contiguous(), weights, experts, N, E, float(scaling)),
        **_select_constexprs(splits, E, top_k, n_group, topk_group, norm_topk_prob),
        **overlapped(chip),
    )
    return weights, experts


def local(experts: Tensor, first_expert: int, E: int) -> Tensor:
    """Indices among the E experts from first_expert on; -1 for those that are elsewhere."""
    experts = experts - first_expert
    return torch.where((experts >= 0) & (experts < E), experts, -1)


def put_in_order(experts: Tensor, tile: Tile, E: int, *, alone: bool) -> tuple[Tensor, Tensor]:
    """Experts [N, top_k] of E, -1 for none -> the pairs in expert order and each tile's expert, as `align` leaves them.

    Those of a token that is `alone` are distinct, and every pair is a tile.
    """
    if alone:
        return experts.flatten(), experts.flatten()
    pairs = experts.numel()
    tiles = tile.count(pairs, E)
    order = torch.empty(tiles * tile.block_m, dtype=torch.int32, device=experts.device)
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=experts.device)
    triton_kernels.align[(E,)](
        *(experts, order, tile_expert, pairs, tiles),
        **_align_constexprs(tile, pairs, E),
        **overlapped(chip_of(experts.device)),
    )
    return order, tile_expert


def combine(outputs: Tensor, N: int, dtype: torch.dtype) -> Tensor:
    """Weighted outputs of the pairs [N top_k, d] f32 -> each token's sum [N, d], in the order of ranks."""
    d = outputs.shape[1]
    out = torch.empty((N, d), dtype=dtype, device=outputs.device)
    triton_kernels.combine[(N, triton.cdiv(d, _COMBINE_BLOCK))](
        *(outputs, out, d),
        TOP_K=len(outputs) // N,
        BLOCK=_COMBINE_BLOCK,
        **overlapped(chip_of(outputs.device)),
    )
    return out


@dataclass(frozen=True)
class Tile:
    """How the expert products are cut: pairs x output rows, and the step along the sum."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def shared(self, item_size: int) -> int:
        """Bytes of shared memory of a `gate_up` program, which holds more than one of `down`."""
        return self.num_stages * (self.block_m + 2 * self.block_n) * self.block_k * item_size

    def count(self, pairs: int, E: int) -> int:
        """The most tiles that any routing needs."""
        return min(pairs, pairs // self.block_m + min(pairs, E))

    def constexprs(self) -> dict[str, int]:
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}


def choose_tile(chip: Chip, item_size: int, pairs: int, E: int) -> Tile:
    """Few pairs per expert: the weights' bytes are what counts, and deep pipelines of narrow tiles fetch them. Many:
    larger tiles read them less often. Two programs per multiprocessor are preferred to a deeper pipeline."""
    if item_size == 4:
        return Tile(16, 32, 32, 4, 2)
    load = pairs / E
    if load <= 8:
        shape = (16, 32, 128, 4)
    elif load <= 32:
        shape = (32, 32, 128, 4)
    else:
        shape = (64, 64, 64, 4)
    for programs, num_stages in ((2, 5), (2, 4), (2, 3), (1, 4), (1, 3), (1, 2)):
        tile = Tile(*shape, num_stages)
        if programs * tile.shared(item_size) <= chip.shared:
            return tile
    raise ValueError(f"moe: no pipeline of tiles {shape} fits {chip.shared} bytes of shared memory")


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`."""
    chip = Chip(capability, 132)
    cases = [
        case
        for item, N, E, d, I in (
            ("bf16", 1, 64, 2048, 1408),
            ("bf16", 16, 64, 2048, 1408),  # `triton_fixed` for any number of tokens
            ("fp16", 128, 64, 2048, 1408),
            ("bf16", 4096, 384, 7168, 2048),
            ("fp32", 8, 64, 2048, 1408),
            ("fp32", 1, 2, 1, 1),  # sizes of 1 become constants
        )
        for case in _product_cases(chip, item, N, E, d, I)
    ]
    return cases + [case for N, E, G in ((2, 64, 1), (128, 256, 8)) for case in _routing_cases(chip, N, E, G)]


def _product_cases(chip: Chip, item: str, N: int, E: int, d: int, I: int) -> list[CompileCase]:
    top_k = 8
    tile = choose_tile(chip, 4 if item == "fp32" else 2, N * top_k, E)
    order: dict[str, Any] = {"order": "*i32", "tile_expert": "*i32", "pairs": "i32", "d": d, "I": I}
    first = {"x": f"*{item}", "weight": f"*{item}", "hidden": f"*{item}", **order}
    first |= {"x_n": d, "weight_e": 2 * I * d, "weight_i": d}
    second = {"hidden": f"*{item}", "weight": f"*{item}", "routing": "*fp32", "outputs": "*fp32", **order}
    second |= {"weight_e": I * d, "weight_d": I}
    shape = {"ALONE": N == 1, "OVERLAP": chip.overlaps, **tile.constexprs()}
    launch = (tile.num_warps, tile.num_stages)
    name = f"{item} {N} tokens"
    return [
        CompileCase(f"gate_up {name}", triton_kernels.gate_up, first, {"TOP_K": top_k, **shape}, *launch),
        CompileCase(f"down {name}", triton_kernels.down, second, shape, *launch),
    ]


def _routing_cases(chip: Chip, N: int, E: int, n_group: int) -> list[CompileCase]:
    d, top_k = 2048, 8
    pairs = N * top_k
    overlap = {"OVERLAP": chip.overlaps}
    splits, d_split = _router_splits(chip, N, E, d)
    tile = choose_tile(chip, 2, pairs, E)
    name = f"{N} tokens, {n_group} groups"
    product: dict[str, Any] = {"x": "*bf16", "router": "*fp32", "parts": "*fp32", "N": "i32", "E": E, "d": d}
    product |= {"x_n": d, "router_e": d, "d_split": d_split}
    choice: dict[str, Any] = {"parts": "*fp32", "bias": "*fp32", "weights": "*fp32", "experts": "*i32"}
    choice |= {"N": "i32", "E": E, "scaling": "fp32"}
    placing: dict[str, Any] = {"experts": "*i32", "order": "*i32", "tile_expert": "*i32"}
    placing |= {"pairs": "i32", "tiles": "i32"}
    summing: dict[str, Any] = {"outputs": "*fp32", "out": "*bf16", "d": d}
    return [
        CompileCase(f"logits {name}", triton_kernels.logits, product, _ROUTER_TILE | overlap),
        CompileCase(
            f"select {name}",
            triton_kernels.select,
            choice,
            _select_constexprs(splits, E, top_k, n_group, min(4, n_group), True) | overlap,
        ),
        CompileCase(
            f"align {name}", triton_kernels.align, placing, _align_constexprs(tile, pairs, E) | overlap
        ),
        CompileCase(
            f"combine {name}",
            triton_kernels.combine,
            summing,
            {"TOP_K": top_k, "BLOCK": _COMBINE_BLOCK} | overlap,
        ),
    ]


def _router_splits(chip: Chip, N: int, E: int, d: int) -> tuple[int, int]:
    """Into how many parts the router's sums are cut, so that few tokens still occupy the chip; and their length."""
    programs = triton.cdiv(N, _ROUTER_TILE["BLOCK_M"]) * triton.cdiv(E, _ROUTER_TILE["BLOCK_N"])
    steps = triton.cdiv(d, _ROUTER_TILE["BLOCK_K"])
    splits = max(1, min(_MOST_SPLITS, steps, chip.n_sms // programs))
    d_split = triton.cdiv(steps, splits) * _ROUTER_TILE["BLOCK_K"]
    return triton.cdiv(d, d_split), d_split


def _select_constexprs(
    splits: int, E: int, top_k: int, n_group: int, topk_group: int, norm: bool
) -> dict[str, Any]:
    return {
        "SPLITS": splits,
        "TOP_K": top_k,
        "N_GROUP": n_group,
        "TOPK_GROUP": topk_group,
        "NORM": norm,
        "G_PAD": triton.next_power_of_2(n_group),
        "S_PAD": triton.next_power_of_2(E // n_group),
        "K_PAD": triton.next_power_of_2(top_k),
    }


def _align_constexprs(tile: Tile, pairs: int, E: int) -> dict[str, int]:
    chunk = min(_CHUNK, max(32, triton.next_power_of_2(pairs)))
    return {"BLOCK_M": tile.block_m, "E_PAD": max(2, triton.next_power_of_2(E)), "CHUNK": chunk}
