"""`topk_logprobs` in Triton: two launches, one that reads the logits and one that selects from what it left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from draftwood.kernels.chip import Chip, chip_of
from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.topk_logprobs import Partial, check_arguments
from draftwood.kernels.topk_logprobs.triton_kernels import TILE, select, stream
from draftwood.kernels.topk_logprobs.triton_scan import SCAN_TILE, combine, scan


class Noise(NamedTuple):
    """What couples the candidates, all but `start` or nothing."""

    temperature: Tensor | None
    seed: Tensor | None
    position: Tensor | None
    start: Tensor | None


_MOST_LISTED = 512
"""Tokens that are compared each with each; if k asks for more, they are found one after the other."""


def topk_logprobs(
    logits: Tensor,
    k: int,
    *,
    temperature: Tensor | None = None,
    seed: Tensor | None = None,
    position: Tensor | None = None,
    start: Tensor | None = None,
    scale: Tensor | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check_arguments(logits.shape[-1], k, temperature, seed, position, start, weight)
    found, lp = _best(logits, k, 0, Noise(temperature, seed, position, start), scale, weight)
    return lp, found.ids


def partial(
    logits: Tensor,
    k: int,
    offset: int = 0,
    *,
    temperature: Tensor | None = None,
    seed: Tensor | None = None,
    position: Tensor | None = None,
    start: Tensor | None = None,
    scale: Tensor | None = None,
) -> Partial:
    """Of logits [B, D, v], the vocabulary slice that starts at token `offset`."""
    noise = Noise(temperature, seed, position, start)
    return _best(logits, min(k, logits.shape[-1]), offset, noise, scale, None)[0]


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
    arguments: dict[str, str | int] = {
        "logits": "*bf16",
        "seed": "*i64",
        **dict.fromkeys(("position", "origin", "ids", "listed"), "*i32"),
        **dict.fromkeys(("D", "position_b", "scale_b", "weight_b"), 7),
        "found": "*i64",
        "offset": 0,
        "v": 163840,
        "tiles": 40,
        "logits_b": 7 * 163840,
        "logits_d": 163840,
    }
    for coupled, k in ((False, 32), (True, 32), (False, 7)):
        every = {
            "COUPLED": coupled,
            "TILE": TILE,
            "OVERLAP": Chip(capability, 132).overlaps,
            **_sizes(k, 163840),
        }
        arguments["k"] = k
        for kernel, warps in ((stream, _STREAM_WARPS[coupled]), (select, _SELECT_WARPS)):
            constexprs = {n: every[n] for n in kernel.arg_names if n in every}
            types = {n: arguments.get(n, "*fp32") for n in kernel.arg_names if n not in constexprs}
            name = f"{kernel.__name__}, k={k}, coupled={coupled}"
            cases.append(CompileCase(name, kernel, types, constexprs, warps))
    wide = {
        **arguments,
        **dict.fromkeys(("logits", "value", "maximum", "total"), "*fp64"),
        "n": 64,
        "slices": 2,
    }
    wide["out_ids"] = "*i32"
    for kernel, constexprs in ((scan, {"COUPLED": True, "TILE": SCAN_TILE}), (combine, {"TILE": 64})):
        types = {n: wide.get(n, "*fp32") for n in kernel.arg_names if n not in constexprs}
        cases.append(CompileCase(kernel.__name__, kernel, types, constexprs))
    return cases


_STREAM_WARPS = {False: 4, True: 8}  # a coupled token takes four times as long
_SELECT_WARPS = 8


def _best(
    logits: Tensor,
    k: int,
    offset: int,
    noise: Noise,
    scale: Tensor | None,
    weight: Tensor | None,
) -> tuple[Partial, Tensor]:
    """The k best of a slice of at least k tokens, and their log-softmax within the slice, weighted if a weight is given."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    B, D, v = logits.shape
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    device, coupled = logits.device, noise.temperature is not None
    value = torch.empty(B, D, k, dtype=wide, device=device)
    ids = torch.empty(B, D, k, dtype=torch.int32, device=device)
    lp = torch.empty(B, D, k, dtype=torch.float32, device=device)
    maximum, total = (torch.empty(B, D, dtype=wide, device=device) for _ in ("maximum", "total"))
    outputs, strides = (value, ids, lp, maximum, total), (logits.stride(0), logits.stride(1))
    factors = (*_by_depth(scale), *_by_depth(weight))
    coupling = (noise.temperature, noise.seed, *_by_depth(noise.position), noise.start)
    if B * D == 0:
        return Partial(value, ids, maximum, total), lp
    if wide == torch.float64:
        tile = min(SCAN_TILE, triton.next_power_of_2(v))
        inputs = (logits, *coupling, *factors)
        scan[(B * D,)](*inputs, *outputs, offset, D, v, k, *strides, COUPLED=coupled, TILE=tile)
        return Partial(value, ids, maximum, total), lp
    tokens = offset % 4 + v
    tiles = triton.cdiv(tokens, TILE)
    sizes = _sizes(k, tokens)
    coarse, fine, maxima, totals = (
        torch.empty(B * D, n, dtype=torch.float32, device=device)
        for n in (tiles * TILE // sizes["COARSE"], tiles * TILE // sizes["FINE"], tiles, tiles)
    )
    between = (coarse, fine, maxima, totals)
    listed = torch.empty(B * D, 2, sizes["ROOM"], dtype=torch.int32, device=device)
    found = torch.empty(B * D, sizes["ROOM"], dtype=torch.int64, device=device)
    overlap = chip_of(device).overlaps
    stream[(B * D, tiles)](
        *(logits, *coupling, *factors[:2], *between, offset, D, v, *strides),
        COUPLED=coupled,
        TILE=TILE,
        COARSE=sizes["COARSE"],
        FINE=sizes["FINE"],
        OVERLAP=overlap,
        num_warps=_STREAM_WARPS[coupled],
    )
    select[(B * D,)](
        *(logits, *coupling, *factors, *between, listed, found, *outputs, offset, D, v, k, tiles, *strides),
        COUPLED=coupled,
        TILE=TILE,
        OVERLAP=overlap,
        num_warps=_SELECT_WARPS,
        launch_pdl=overlap,
        **sizes,
    )
    return Partial(value, ids, maximum, total), lp


def _by_depth(x: Tensor | None) -> tuple[Tensor | None, int]:
    """Numbers [B or 1, D] and how far apart the rows are."""
    if x is None:
        return None, 0
    if x.stride(1) != 1:
        x = x.contiguous()
    return x, x.stride(0) if x.shape[0] > 1 else 0


def _sizes(k: int, tokens: int) -> dict[str, int]:
    """Tokens in a group and in a subgroup, and how many groups, classes and entries of a list `select` holds; powers of two.

    The k-th best maximum of twice as many classes lets 1.4 k tokens through if the best are spread evenly.
    """
    power, tiles = triton.next_power_of_2, triton.cdiv(tokens, TILE)
    coarse = min(4 * power(tiles), TILE)
    groups = power(triton.cdiv(tokens, coarse))
    room = power(tokens) if tokens <= _MOST_LISTED else max(64, 4 * power(k))
    listing = room <= _MOST_LISTED
    return {
        "COARSE": coarse,
        "FINE": min(coarse, 16),
        "GROUPS": groups,
        "CLASSES": min(2 * power(k), groups) if listing else 2,
        "ROOM": room if listing else 2,
        "CHUNK": max(16, min(2 * power(k), 64)),
        "TILES": power(tiles),
    }
