"""commit_kv in Triton: one program per path entry and group of layers; an entry to be skipped ends its program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.compile_case import CompileCase

_TILE = 4096  # numbers per program: four 16-byte loads of bf16 in flight per thread
_WARPS = 4


def commit_kv(
    pages: Tensor, tree_kv: Tensor, page_table: Tensor, prefix_len: Tensor, path: Tensor, n_path: Tensor
) -> None:
    """See `draftwood.kernels.commit_kv.commit_kv`."""
    L, n_pages, page, C = pages.shape
    B, T = tree_kv.shape[1:3]
    block, layers = _blocks(C)
    grid = (B * path.shape[1], triton.cdiv(L, layers), triton.cdiv(C, block))
    _commit[grid](
        pages,
        tree_kv,
        page_table.contiguous(),
        prefix_len.contiguous(),
        path,
        n_path.contiguous(),
        *(L, n_pages, T, C, page_table.shape[1], path.shape[1]),
        *path.stride(),
        *pages.stride(),
        *tree_kv.stride(),
        PAGE=page,
        LAYERS=layers,
        BLOCK=block,
        num_warps=_WARPS,
    )


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`."""
    L, B, T, C, page = 61, 8, 33, 576, 64
    block, layers = _blocks(C)
    arguments: dict[str, str | int] = {"pages": "*bf16", "tree_kv": "*bf16"}
    arguments |= dict.fromkeys(("page_table", "prefix_len", "path", "n_path"), "*i32")
    arguments |= {"L": L, "n_pages": 4099, "T": T, "C": C, "M": 65, "steps": 8, "path_b": 8, "path_s": 1}
    arguments |= {"pages_l": 4099 * page * C, "pages_n": page * C, "pages_p": C, "pages_c": 1}
    arguments |= {"tree_l": B * T * C, "tree_b": T * C, "tree_t": C, "tree_c": 1}
    constexprs = {"PAGE": page, "LAYERS": layers, "BLOCK": block}
    return [CompileCase("K2.6", _commit, arguments, constexprs, _WARPS)]


def _blocks(C: int) -> tuple[int, int]:
    """Numbers of one latent, and layers, that a program copies."""
    block = min(_TILE, triton.next_power_of_2(C))
    return block, _TILE // block


@triton.jit
def _commit(
    pages,  # [L, n_pages, PAGE, C]
    tree_kv,  # [L, B, T, C]
    page_table,  # [B, M]
    prefix_len,
    path,  # [B, steps]
    n_path,
    L,
    n_pages,
    T,
    C,
    M,
    steps,
    path_b,
    path_s,
    pages_l,
    pages_n,
    pages_p,
    pages_c,
    tree_l,
    tree_b,
    tree_t,
    tree_c,
    PAGE: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = (tl.program_id(0) // steps).to(tl.int64)
    step = tl.program_id(0) % steps
    slot = tl.load(path + b * path_b + step * path_s)
    position = tl.load(prefix_len + b).to(tl.int64) + step
    column = position // PAGE
    in_table = (position >= 0) & (column < M)
    target = tl.load(page_table + b * M + column, mask=in_table, other=-1)
    in_pool = (target >= 0) & (target < n_pages)
    if (step < tl.load(n_path + b)) & (slot >= 0) & (slot < T) & in_pool:
        layer = (tl.program_id(1) * LAYERS + tl.arange(0, LAYERS)).to(tl.int64)[:, None]
        c = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = (layer < L) & (c < C)
        source = tree_kv + layer * tree_l + b * tree_b + slot.to(tl.int64) * tree_t + c * tree_c
        place = (
            pages + layer * pages_l + target.to(tl.int64) * pages_n + position % PAGE * pages_p + c * pages_c
        )
        tl.store(place, tl.load(source, mask=inside), mask=inside)
