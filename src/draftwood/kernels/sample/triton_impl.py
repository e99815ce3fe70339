"""`sample` in Triton: four launches of fixed shape, whatever the parameters are."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.sample.params import SampleParams
from draftwood.kernels.sample.triton_cut import THRESHOLDS
from draftwood.kernels.sample.triton_kernels import BLOCK, choose, survey, weigh
from draftwood.tree import DraftTree

_TILE = 2048  # tokens of a `survey` program
_STEP = 256  # tokens that a `weigh` program holds at a time
_MOST_PARTS = 8  # `weigh` programs per row
_CAPACITY = 2048  # tokens among which `choose` finds the cut without reading the row again
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}  # the contract's steps round one by one


def sample(
    logits: Tensor, params: SampleParams, seed: Tensor, position: Tensor, tree: DraftTree | None = None
) -> tuple[Tensor, Tensor]:
    B, T, V = logits.shape
    choice = torch.empty(B, T, dtype=torch.int32, device=logits.device)
    status = torch.empty(B, dtype=torch.int32, device=logits.device)
    rows = B * T
    if rows == 0:
        return choice, status.zero_()
    tiles = triton.cdiv(V, _TILE)
    parts = min(_MOST_PARTS, triton.next_power_of_2(triton.cdiv(V, _STEP)))
    blocks = tiles * _TILE // BLOCK
    tops, bounds, thresholds, gathered = (
        torch.empty(rows, n, dtype=torch.float32, device=logits.device)
        for n in (blocks, blocks, 2 * THRESHOLDS, _CAPACITY)
    )
    sums = torch.empty(rows, 2 * parts * 2 * THRESHOLDS, dtype=torch.int64, device=logits.device)
    common: dict[str, Any] = {
        "logits": logits.contiguous(),
        "temperature": params.temperature,
        "T": T,
        "V": V,
        "M": 0 if params.bias_ids is None else params.bias_ids.shape[1],
        **_extras(params, tree),
        **_OPTIONS,
    }
    noise = {"seed": seed, "position": position.contiguous()}
    survey[(rows, tiles)](**common, **noise, tops=tops, bounds=bounds, status=status, TILE=_TILE)
    common |= {"top_k": params.top_k, "top_p": params.top_p, "tops": tops, "thresholds": thresholds}
    common |= {"sums": sums, "blocks": blocks, "BLOCKS": triton.next_power_of_2(blocks)}
    common |= {"PARTS": parts, "STEP": _STEP}
    span = triton.cdiv(triton.cdiv(V, parts), _STEP) * _STEP
    for PASS in range(2):
        weigh[(rows, parts)](**common, span=span, PASS=PASS)
    choose[(rows,)](
        **common,
        **noise,
        log_min_p=params.log_min_p,
        bounds=bounds,
        gathered=gathered,
        choice=choice,
        status=status,
        CAPACITY=_CAPACITY,
    )
    return choice, status


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`."""
    cases = []
    V, blocks = 163840, 1280
    types = {"prompt_seen": "*i1", "seed": "*i64", "ancestors": "*i64", "sums": "*i64"}
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
    types |= dict.fromkeys((*floats, "tops", "bounds", "thresholds", "gathered"), "*fp32")
    sizes = {"T": 32, "V": V, "M": 8, "blocks": blocks, "span": V // _MOST_PARTS}
    row = {"BLOCKS": 2048, "PARTS": _MOST_PARTS, "STEP": _STEP}
    for every in (False, True):
        for kernel, own in (
            (survey, {"TILE": _TILE}),
            (weigh, {**row, "PASS": 1}),
            (choose, {**row, "CAPACITY": _CAPACITY}),
        ):
            absent = {} if every else dict.fromkeys(n for n in _EXTRAS if n in kernel.arg_names)
            constexprs = {**own, **absent}
            arguments: dict[str, str | int] = {
                n: sizes.get(n, types.get(n, "*i32")) for n in kernel.arg_names if n not in constexprs
            }
            name = f"{kernel.__name__}, extras={every}"
            cases.append(CompileCase(name, kernel, arguments, constexprs, _OPTIONS["num_warps"]))
    return cases


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
