"""`topk_logprobs` in Triton: two launches, one that reads the logits and one that selects from what it left."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.topk_logprobs import Partial, check_arguments
from draftwood.kernels.topk_logprobs.triton_kernels import FAN, SCAN_TILE, TILE, combine, scan, select, stream

_MOST_SORTED = 256
"""More candidates than this are found one after the other."""


def topk_logprobs(
    logits: Tensor,
    k: int,
    *,
    temperature: Tensor | None = None,
    seed: Tensor | None = None,
    position: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check_arguments(logits.shape[-1], k, temperature, seed, position)
    found, lp = _best(logits, k, 0, temperature, seed, position)
    return lp, found.ids


def partial(
    logits: Tensor,
    k: int,
    offset: int = 0,
    *,
    temperature: Tensor | None = None,
    seed: Tensor | None = None,
    position: Tensor | None = None,
) -> Partial:
    """Of logits [B, D, v], the vocabulary slice that starts at token `offset`."""
    return _best(logits, min(k, logits.shape[-1]), offset, temperature, seed, position)[0]


def merge(partials: Sequence[Partial], k: int) -> tuple[Tensor, Tensor]:
    """Of all slices of the vocabulary, in its order."""
    value = torch.cat([p.value for p in partials], -1)
    candidates = torch.cat([p.ids for p in partials], -1)
    B, D, n = value.shape
    ids = candidates.new_empty(B, D, k)
    lp = value.new_empty((B, D, k), dtype=torch.float32)
    if B * D > 0:
        maxima, totals = torch.stack([p.maximum for p in partials]), torch.stack([p.total for p in partials])
        tile = min(SCAN_TILE, triton.next_power_of_2(n))
        combine[(B * D,)](value, candidates, maxima, totals, lp, ids, n, k, len(partials), TILE=tile)
    return lp, ids


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`."""
    cases = []
    for coupled in (False, True):
        k = 8 if coupled else 32  # the coupled sorts are twice as long, and compile slowly
        sizes = {"offset": 0, "D": 7, "v": 163840, "k": k, "tiles": 40, "logits_b": 7 * 163840}
        types: dict[str, str | int] = {"logits": "*bf16", "seed": "*i64", "position": "*i32", "ids": "*i32"}
        types |= sizes | {"logits_d": 163840}
        for kernel, constexprs, warps in (
            (stream, {"COUPLED": coupled, "TILE": TILE}, _STREAM_WARPS[coupled]),
            (select, {"COUPLED": coupled, "TILE": TILE, **_logs(k, 40, coupled)}, _SELECT_WARPS),
        ):
            arguments = {n: types.get(n, "*fp32") for n in kernel.arg_names if n not in constexprs}
            name = f"{kernel.__name__}, coupled={coupled}"
            cases.append(CompileCase(name, kernel, arguments, constexprs, warps))
    wide = {**types, **dict.fromkeys(("logits", "value", "maximum", "total"), "*fp64"), "n": 64, "slices": 2}
    wide["out_ids"] = "*i32"
    for kernel, constexprs in ((scan, {"COUPLED": True, "TILE": SCAN_TILE}), (combine, {"TILE": 64})):
        arguments = {n: wide.get(n, "*fp32") for n in kernel.arg_names if n not in constexprs}
        cases.append(CompileCase(kernel.__name__, kernel, arguments, constexprs))
    return cases


_STREAM_WARPS = {False: 4, True: 8}  # a coupled token takes four times as long
_SELECT_WARPS = 8


def _best(
    logits: Tensor,
    k: int,
    offset: int,
    temperature: Tensor | None,
    seed: Tensor | None,
    position: Tensor | None,
) -> tuple[Partial, Tensor]:
    """The k best of a slice of at least k tokens, and their log-softmax within the slice."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    B, D, v = logits.shape
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    device, coupled = logits.device, temperature is not None
    value = torch.empty(B, D, k, dtype=wide, device=device)
    ids = torch.empty(B, D, k, dtype=torch.int32, device=device)
    lp = torch.empty(B, D, k, dtype=torch.float32, device=device)
    maximum, total = (torch.empty(B, D, dtype=wide, device=device) for _ in ("maximum", "total"))
    noise = (temperature, seed, None if position is None else position.contiguous())
    outputs, strides = (value, ids, lp, maximum, total), (logits.stride(0), logits.stride(1))
    if B * D == 0:
        return Partial(value, ids, maximum, total), lp
    if wide == torch.float64 or k > _MOST_SORTED:
        tile = min(SCAN_TILE, triton.next_power_of_2(v))
        scan[(B * D,)](logits, *noise, *outputs, offset, D, v, k, *strides, COUPLED=coupled, TILE=tile)
        return Partial(value, ids, maximum, total), lp
    tiles = triton.cdiv(offset % 4 + v, TILE)
    fine, coarse, maxima, totals = (
        torch.empty(B * D, n, dtype=torch.float32, device=device)
        for n in (tiles * TILE // FAN, tiles * TILE // FAN**2, tiles, tiles)
    )
    between = (fine, coarse, maxima, totals)
    stream[(B * D, tiles)](
        *(logits, *noise, *between, offset, D, v, *strides),
        COUPLED=coupled,
        TILE=TILE,
        num_warps=_STREAM_WARPS[coupled],
    )
    select[(B * D,)](
        *(logits, *noise, *between, *outputs, offset, D, v, k, tiles, *strides),
        COUPLED=coupled,
        TILE=TILE,
        num_warps=_SELECT_WARPS,
        **_logs(k, tiles, coupled),
    )
    return Partial(value, ids, maximum, total), lp


def _logs(k: int, tiles: int, coupled: bool) -> dict[str, int]:
    """Sizes of what `select` sorts, as powers of two; the coupled one needs room for near ties."""
    log_k = _log2(k) + coupled
    return {
        "LOG_K": log_k,
        "LOG_COARSE": max(log_k, _log2(tiles * TILE // FAN**2)),
        "LOG_TILES": _log2(tiles),
    }


def _log2(n: int) -> int:
    return (n - 1).bit_length()
