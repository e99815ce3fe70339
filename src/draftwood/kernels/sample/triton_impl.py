"""`sample` in Triton: four launches of fixed shape whatever the parameters are, or two if no row has a filter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from draftwood.kernels.chip import Chip, chip_of
from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.ordering import unpack
from draftwood.kernels.sample.logits import live_slots
from draftwood.kernels.sample.params import SampleParams
from draftwood.kernels.sample.triton_kernels import pick, settle, survey, weigh
from draftwood.kernels.sample.triton_nucleus import TILES_OF_CHUNK
from draftwood.kernels.sample.triton_scores import STRIPES, TILE
from draftwood.kernels.sample.triton_search import HELD
from draftwood.tree import DraftTree

_CAPACITY = 1024
"""Tokens among which a top-k cut is found without reading the row again."""
_MOST_PARTS = 64
_PROGRAMS = 2048  # of `weigh`, unless there are more rows
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}  # the contract's steps round one by one
_NO_KEY = -(2**63)


@dataclass(frozen=True)
class Partial:
    """What one vocabulary slice contributes."""

    key: Tensor  # [B, T] i64, winner of a row without a filter as `draftwood.kernels.ordering.pack` has it
    x: Tensor  # [B, T, v] f32, after step 4, of rows with a filter; others are not written. [B, T, 0] if none has one


def sample(
    logits: Tensor, params: SampleParams, seed: Tensor, position: Tensor, tree: DraftTree | None = None
) -> tuple[Tensor, Tensor]:
    B, T, V = logits.shape
    choice, status = (torch.empty(s, dtype=torch.int32, device=logits.device) for s in ((B, T), (B,)))
    if B * T == 0:
        return choice, status.zero_()
    rows = B * T
    arguments = _arguments(logits, params, seed, position, tree, 0)
    arguments |= {"choice": choice, "status": status, "x_out": None, "winners": None}
    _launch(survey, (rows, _tiles(V, 0)), arguments)
    _launch(pick, (rows,), arguments)
    if arguments["FILTERS"]:
        parts, early = _parts(arguments["blocks"], rows)
        before = torch.empty(rows, parts, 2, HELD, dtype=torch.float32, device=logits.device)
        arguments |= {
            "before": before,
            "parts": parts,
            "PARTS": triton.next_power_of_2(parts),
            "EARLY": early,
        }
        _launch(weigh, (rows, parts), arguments)
        _launch(settle, (rows,), arguments)
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
    (B, T, v), device = logits.shape, logits.device
    key = torch.empty(B, T, dtype=torch.int64, device=device)
    filters = params.unfiltered is None
    x = torch.empty(B, T, v if filters else 0, dtype=torch.float32, device=device)
    if B * T > 0:
        arguments = _arguments(logits, params, seed, position, tree, offset)
        status = torch.empty(B, dtype=torch.int32, device=device)
        arguments |= {"choice": None, "status": status, "x_out": x if filters else None, "winners": key}
        _launch(survey, (B * T, _tiles(v, offset)), arguments)
        _launch(pick, (B * T,), arguments)
    return Partial(key, x)


def merge(
    partials: Sequence[Partial],
    params: SampleParams,
    seed: Tensor,
    position: Tensor,
    tree: DraftTree | None = None,
) -> tuple[Tensor, Tensor]:
    """Of all slices of the vocabulary, in its order. Rows with a filter are sampled from what the slices hand over."""
    key = torch.stack([p.key for p in partials]).amax(0)
    choice = unpack(key)[1].masked_fill(key == _NO_KEY, -1)
    if params.unfiltered is None:
        filtered = (params.top_k > 0) | (params.top_p < 1) | (params.log_min_p > float("-inf"))
        filtered &= params.temperature > 0
        rest = SampleParams(filtered.float(), params.top_k, params.top_p, params.log_min_p)
        sampled, _ = sample(torch.cat([p.x for p in partials], -1), rest, seed, position, tree)
        choice = torch.where(filtered[:, None], sampled, choice)
    B, T = position.shape
    lacking = (choice < 0) & live_slots(tree, B, T, choice.device)
    return choice, lacking.any(1).int()


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`."""
    cases = []
    V, blocks = 163840, 320
    floats: tuple[str, ...] = (
        "logits",
        "temperature",
        "top_p",
        "log_min_p",
        "repetition",
        "presence",
        "frequency",
        "bias_values",
    )
    floats += ("tops", "bounds", "weights", "told", "of_all", "before", "gathered_x", "x_out")
    types = dict.fromkeys(floats, "*fp32") | {"prompt_seen": "*i1"}
    types |= dict.fromkeys(("seed", "ancestors", "held", "winners"), "*i64")
    sizes = {"T": 32, "V": V, "M": 8, "offset": 0, "v": V, "blocks": blocks, "parts": 40}
    for every in (False, True) if capability == 90 else (True,):  # without extras it is less of the same
        for kernel, own in (
            (survey, {}),
            (pick, {"FILTERS": True, "BLOCKS": 512}),
            *(() if every else ((pick, {"FILTERS": False, "BLOCKS": 512}),)),
            *((weigh, {"EARLY": early}) for early in ((True, False) if capability == 90 else (True,))),
            (settle, {"BLOCKS": 512, "CAPACITY": _CAPACITY, "PARTS": _MOST_PARTS}),
        ):
            absent = {"x_out", "winners", *(() if every else _EXTRAS)}
            constexprs = {
                "OVERLAP": Chip(capability, 132).overlaps,
                **own,
                **dict.fromkeys(n for n in kernel.arg_names if n in absent),
            }
            arguments: dict[str, str | int] = {
                n: sizes.get(n, types.get(n, "*i32")) for n in kernel.arg_names if n not in constexprs
            }
            name = f"{kernel.__name__}, extras={every}" + ("" if own.get("FILTERS", True) else ", no filter")
            name += ", early" if own.get("EARLY") else ""
            cases.append(CompileCase(name, kernel, arguments, constexprs, _OPTIONS["num_warps"]))
    return cases


def _tiles(v: int, offset: int) -> int:
    return -(-(offset % 4 + v) // TILE)


def _parts(blocks: int, rows: int) -> tuple[int, bool]:
    """Programs of `weigh` per row, and whether each has one chunk alone."""
    chunks = triton.cdiv(blocks, TILES_OF_CHUNK * STRIPES)
    run = triton.cdiv(chunks, min(chunks, _MOST_PARTS, max(1, _PROGRAMS // rows)))
    return triton.cdiv(chunks, run), run == 1


def _launch(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
    """With those arguments that the kernel has."""
    after = arguments["OVERLAP"] and kernel is not survey
    kernel[grid](**{name: arguments[name] for name in kernel.arg_names}, **_OPTIONS, launch_pdl=after)


def _arguments(
    logits: Tensor,
    params: SampleParams,
    seed: Tensor,
    position: Tensor,
    tree: DraftTree | None,
    offset: int,
) -> dict[str, Any]:
    """Inputs and scratch memory of the kernels."""
    B, T, v = logits.shape
    tiles = _tiles(v, offset)
    blocks = STRIPES * tiles
    V = v  # what the rows of `counts` and `mask_bits` are made for
    if params.counts is not None:
        V = params.counts.shape[1]
    elif params.mask_bits is not None:
        V = 32 * params.mask_bits.shape[2]
    sizes = {
        "tops": blocks,
        "bounds": blocks,
        "weights": blocks,
        "gathered_x": _CAPACITY,
        "told": HELD,
        "of_all": 2,
    }
    integers = {"listed": blocks, "tasks": 1, "gathered_ids": _CAPACITY}
    made = [(sizes, torch.float32), (integers, torch.int32), ({"held": HELD}, torch.int64)]
    return {
        "logits": logits.contiguous(),
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "log_min_p": params.log_min_p,
        "seed": seed,
        "position": position.contiguous(),
        "T": T,
        "V": V,
        "M": 0 if params.bias_ids is None else params.bias_ids.shape[1],
        "offset": offset,
        "v": v,
        "blocks": blocks,
        "FILTERS": params.unfiltered is None,
        "OVERLAP": chip_of(logits.device).overlaps,
        "BLOCKS": triton.next_power_of_2(blocks),
        "CAPACITY": _CAPACITY,
        **_extras(params, tree),
        **{
            name: torch.empty(B * T, n, dtype=dtype, device=logits.device)
            for group, dtype in made
            for name, n in group.items()
        },
    }


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
