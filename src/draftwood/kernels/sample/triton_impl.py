"""`sample` in Triton: three launches of fixed shape, whatever the parameters are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.ordering import unpack
from draftwood.kernels.sample.logits import live_slots
from draftwood.kernels.sample.params import SampleParams
from draftwood.kernels.sample.triton_kernels import pick, settle, survey
from draftwood.kernels.sample.triton_scores import STRIPES, TILE
from draftwood.kernels.sample.triton_search import HELD
from draftwood.tree import DraftTree

_CAPACITY = 2048
"""Tokens among which a top-k cut is found without reading the row again."""
_MOST_PARTS = 16
_PROGRAMS = 512  # of `settle`, unless there are more rows
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # the contract's steps round one by one
_NO_KEY = -(2**63)


@dataclass(frozen=True)
class Partial:
    """What one vocabulary slice contributes."""

    key: Tensor  # [B, T] i64, winner of a row without a filter as `draftwood.kernels.ordering.pack` has it
    x: Tensor  # [B, T, v] f32, after step 4, of rows with a filter; others are not written


def sample(
    logits: Tensor, params: SampleParams, seed: Tensor, position: Tensor, tree: DraftTree | None = None
) -> tuple[Tensor, Tensor]:
    B, T, _ = logits.shape
    choice, status = (torch.empty(s, dtype=torch.int32, device=logits.device) for s in ((B, T), (B,)))
    if B * T == 0:
        return choice, status.zero_()
    common, between = _survey(logits, params, seed, position, tree, 0, status, None)
    rows, filters = B * T, {"top_p": params.top_p, "log_min_p": params.log_min_p}
    parts = min(_MOST_PARTS, triton.next_power_of_2(triton.cdiv(_PROGRAMS, rows)))
    between |= {"choice": choice, "status": status, "CAPACITY": _CAPACITY, **filters}
    weights, arrived = between.pop("weights"), between.pop("arrived")
    pick[(rows,)](**common, **between, top_k=params.top_k, winners=None)
    before = torch.empty(rows, parts, HELD, dtype=torch.float32, device=logits.device)
    settle[(rows, parts)](**common, **between, weights=weights, arrived=arrived, before=before, PARTS=parts)
    return choice, status


def partial(
    logits: Tensor,
    params: SampleParams,
    seed: Tensor,
    position: Tensor,
    tree: DraftTree | None = None,
    offset: int = 0,
) -> Partial:
    """Of logits [B, T, v], the slice from token `offset`; the other arguments are those of the whole vocabulary."""
    key = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
    x = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if key.numel() == 0:
        return Partial(key, x)
    status = torch.empty(len(key), dtype=torch.int32, device=logits.device)
    common, between = _survey(logits, params, seed, position, tree, offset, status, x)
    del between["weights"], between["arrived"]
    filters = {"top_k": params.top_k, "top_p": params.top_p, "log_min_p": params.log_min_p}
    between |= {"choice": None, "status": status, "winners": key, "CAPACITY": _CAPACITY, **filters}
    pick[(key.numel(),)](**common, **between)
    return Partial(key, x)


def merge(
    partials: Sequence[Partial],
    params: SampleParams,
    seed: Tensor,
    position: Tensor,
    tree: DraftTree | None = None,
) -> tuple[Tensor, Tensor]:
    """Of all slices of the vocabulary, in its order. Rows with a filter are sampled from what the slices hand over."""
    filtered = (params.top_k > 0) | (params.top_p < 1) | (params.log_min_p > float("-inf"))
    filtered &= params.temperature > 0
    rest = SampleParams(filtered.float(), params.top_k, params.top_p, params.log_min_p)
    choice, _ = sample(torch.cat([p.x for p in partials], -1), rest, seed, position, tree)
    key = torch.stack([p.key for p in partials]).amax(0)
    winner = unpack(key)[1].masked_fill(key == _NO_KEY, -1)
    choice = torch.where(filtered[:, None], choice, winner)
    lacking = (choice < 0) & live_slots(tree, *choice.shape, choice.device)
    return choice, lacking.any(1).int()


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`."""
    cases = []
    V, blocks = 163840, 320
    floats = (
        "logits",
        "temperature",
        "top_p",
        "log_min_p",
        "repetition",
        "presence",
        "frequency",
        "bias_values",
    )
    floats += ("tops", "bounds", "weights", "before", "gathered_x", "x_out")
    types = dict.fromkeys(floats, "*fp32") | {"prompt_seen": "*i1"}
    types |= dict.fromkeys(("seed", "ancestors", "held", "winners"), "*i64")
    sizes = {"T": 32, "V": V, "M": 8, "offset": 0, "v": V, "blocks": blocks}
    for every in (False, True):
        for kernel, own in (
            (survey, {}),
            (pick, {"BLOCKS": 512, "CAPACITY": _CAPACITY}),
            (settle, {"BLOCKS": 512, "CAPACITY": _CAPACITY, "PARTS": _MOST_PARTS}),
        ):
            absent = {"x_out", "winners"} | (set() if every else set(_EXTRAS))
            constexprs = {**own, **{n: None for n in kernel.arg_names if n in absent}}
            arguments: dict[str, str | int] = {
                n: sizes.get(n, types.get(n, "*i32")) for n in kernel.arg_names if n not in constexprs
            }
            name = f"{kernel.__name__}, extras={every}"
            cases.append(CompileCase(name, kernel, arguments, constexprs, _OPTIONS["num_warps"]))
    return cases


def _survey(
    logits: Tensor,
    params: SampleParams,
    seed: Tensor,
    position: Tensor,
    tree: DraftTree | None,
    offset: int,
    status: Tensor,
    x_out: Tensor | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first launch. Returns what all launches are given, and what the later ones are given besides."""
    (B, T, v), device = logits.shape, logits.device
    rows, tiles = B * T, triton.cdiv(offset % 4 + v, TILE)
    blocks = STRIPES * tiles
    V = v if params.counts is None else params.counts.shape[1]
    common: dict[str, Any] = {
        "logits": logits.contiguous(),
        "temperature": params.temperature,
        "seed": seed,
        "position": position.contiguous(),
        "T": T,
        "V": V,
        "M": 0 if params.bias_ids is None else params.bias_ids.shape[1],
        "offset": offset,
        "v": v,
        **_extras(params, tree),
        **_OPTIONS,
    }

    def scratch(n: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, n, dtype=dtype, device=device)

    tops, bounds, weights = (scratch(n, torch.float32) for n in (blocks, blocks, tiles))
    arrived = scratch(1, torch.int32)
    filters = {"top_k": params.top_k, "top_p": params.top_p, "log_min_p": params.log_min_p}
    survey[(rows, tiles)](
        **common,
        **filters,
        tops=tops,
        bounds=bounds,
        weights=weights,
        arrived=arrived,
        status=status,
        x_out=x_out,
    )
    between = {
        "tops": tops,
        "bounds": bounds,
        "weights": weights,
        "arrived": arrived,
        "held": scratch(HELD, torch.int64),
        "listed": scratch(blocks, torch.int32),
        "n_listed": scratch(1, torch.int32),
        "gathered_x": scratch(_CAPACITY, torch.float32),
        "gathered_ids": scratch(_CAPACITY, torch.int32),
        "blocks": blocks,
        "BLOCKS": triton.next_power_of_2(blocks),
    }
    return common, between


_OF_PARAMS = (
    *("repetition", "presence", "frequency", "prompt_seen", "counts"),
    *("bias_ids", "bias_values", "mask_bits"),
)
_OF_TREE = {"tokens": "tokens", "ancestors": "ancestors", "n_slots": "n_slots", "tree_status": "status"}
_EXTRAS = (*_OF_PARAMS, *_OF_TREE)


def _extras(params: SampleParams, tree: DraftTree | None) -> dict[str, Tensor | None]:
    """Arguments of the kernels that may be None."""
    extras = {name: getattr(params, name) for name in _OF_PARAMS}
    extras |= {name: None if tree is None else getattr(tree, field) for name, field in _OF_TREE.items()}
    return {name: None if array is None else array.contiguous() for name, array in extras.items()}
