"""verify_attn in Triton with a slot's keys in the order of their positions, whatever pages or tree hold them.

A program goes through `SPLIT` positions for some heads of one slot; a second launch adds up a slot's splits from the first
on. Where splits begin, how large tiles are and in which order all is added follows from positions alone: a slot's result is
the same in any tree, batch and prefill chunk. Slots do not share what they load, which is the price.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.linear.triton_impl import aligned
from draftwood.kernels.triton_line import LOWEST, finish
from draftwood.kernels.verify_attn.tiles import padded
from draftwood.kernels.verify_attn.torch_impl import hidden_slots
from draftwood.kernels.verify_attn.triton_kernels import LN_2, absorb

SPLIT = 1024
"""Positions per program: as many as a round can wait for one after the other."""

_PART_BYTES = 1 << 28
"""Most memory for what splits leave to be added up; more slots take more launches."""

_WARPS = 8
_MERGE_WARPS = 4
_LOG2_E = math.log2(math.e)


def verify_attn(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    prefix_len: Tensor,
    tree_kv: Tensor,
    ancestors: Tensor,
    n_slots: Tensor,
    scale: float,
    *,
    value_dim: int,
) -> tuple[Tensor, Tensor]:
    """See `draftwood.kernels.verify_attn.verify_attn`.

    bf16, fp16 and fp32. Raises `TypeError` for another dtype and `ValueError` where the keys of a page are not contiguous.
    Lengths and page ids out of range are clamped.
    """
    attention = PathAttention(page_table, prefix_len, ancestors, n_slots, pages.shape[1])
    return attention.with_lse(q, pages, tree_kv, scale, value_dim)


class PathAttention:
    """`verify_attn` over given prefixes and trees, for any number of layers. Waits for nothing."""

    def __init__(
        self, page_table: Tensor, prefix_len: Tensor, ancestors: Tensor, n_slots: Tensor, page: int
    ) -> None:
        T = ancestors.shape[1]
        self._page_table = page_table.contiguous()
        self._prefix = prefix_len.clamp(0, page_table.shape[1] * page)
        slot = torch.arange(T, dtype=torch.int32, device=ancestors.device)
        live = slot < n_slots[:, None]
        seen = ~hidden_slots(ancestors, T) & live[:, None]  # [B, T, T]
        self._path = torch.where(seen, slot, T).sort(-1).values  # seen slots, then T
        self._n_keys = torch.where(live, self._prefix[:, None] + seen.sum(-1), 0).int()

    def __call__(self, q: Tensor, pages: Tensor, tree_kv: Tensor, scale: float, *, value_dim: int) -> Tensor:
        """o [B, T, H, R]; the arguments are those that differ from layer to layer."""
        o, _ = self.with_lse(q, pages, tree_kv, scale, value_dim)
        return o

    def with_lse(
        self, q: Tensor, pages: Tensor, tree_kv: Tensor, scale: float, value_dim: int
    ) -> tuple[Tensor, Tensor]:
        """o and lse [B, T, H] f32."""
        if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(f"`q`: expected bfloat16, float16 or float32, got {q.dtype}")
        B, T, H, C = q.shape
        if pages.stride()[1:] != (C, 1):
            raise ValueError(f"`pages`: the keys of a page must be contiguous, got strides {pages.stride()}")
        M, page = self._page_table.shape[1], pages.shape[1]
        tile = _tile(q.element_size(), C, value_dim)
        heads = triton.cdiv(H, tile["BLOCK_M"])
        splits = triton.cdiv(M * page + T, SPLIT)
        o = torch.empty((B, T, H, value_dim), dtype=q.dtype, device=q.device)
        lse = torch.empty((B, T, H), dtype=torch.float32, device=q.device)
        row = splits * heads * tile["BLOCK_M"]
        together = min(B * T, max(1, _PART_BYTES // (4 * row * tile["R_PAD"])))
        part_lse = torch.empty((together * row,), dtype=torch.float32, device=q.device)
        part_o = torch.empty((together * row, tile["R_PAD"]), dtype=torch.float32, device=q.device)
        q, tree_kv = (aligned(a.contiguous()) for a in (q, tree_kv))
        sizes = {"H": H, "splits": splits, "BLOCK_M": tile["BLOCK_M"], "R": value_dim, "R_PAD": tile["R_PAD"]}
        for first in range(0, B * T, together):
            n = min(together, B * T - first)
            attend[(n, splits, heads)](
                *(q, pages, self._page_table, self._prefix, self._path, self._n_keys, tree_kv),
                *(part_o, part_lse, scale * _LOG2_E, T, M, first, pages.shape[0], pages.stride(0)),
                C=C,
                PAGE=page,
                BLOCK_N=tile["BLOCK_N"],
                P_PAD=tile["P_PAD"],
                SPLIT=SPLIT,
                **sizes,
                num_warps=_WARPS,
                num_stages=1,
            )
            merge[(n, heads)](
                self._n_keys, part_o, part_lse, o, lse, first, SPLIT=SPLIT, **sizes, num_warps=_MERGE_WARPS
            )
        return o, lse


verify_attn.prepare = PathAttention  # type: ignore[attr-defined]


@triton.jit(do_not_specialize=["T", "M", "first", "n_pages", "splits"])
def attend(
    q,  # [B, T, H, C]
    pages,  # [n_pages, PAGE, C]
    page_table,  # [B, M]
    prefix_len,  # [B]
    path,  # [B, T, T], the slots that a slot sees, in order
    n_keys,  # [B, T], prefix positions and slots that a slot sees
    tree_kv,  # [B, T, C]
    part_o,  # [slots, splits, heads, BLOCK_M, R_PAD] of the slots from `first` on
    part_lse,  # base 2
    scale_log2,
    T,
    M,
    first,
    n_pages,
    pages_n,
    H,
    splits,
    C: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    P_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    slot = (first + tl.program_id(0)).to(tl.int64)
    split = tl.program_id(1)
    b = slot // T
    start = split * SPLIT
    stop = tl.minimum(tl.load(n_keys + slot), start + SPLIT)
    if start < stop:
        prefix = tl.load(prefix_len + b)
        head = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
        col = tl.arange(0, R_PAD)
        rope = tl.arange(0, P_PAD)
        query = (q + (slot * H + head) * C)[:, None]
        q_latent = tl.load(query + col[None, :], mask=(head < H)[:, None] & (col < R)[None, :], other=0.0)
        mask = (head < H)[:, None] & (rope < C - R)[None, :]
        q_rope = tl.load(query + R + rope[None, :], mask=mask, other=0.0)
        key = tl.arange(0, BLOCK_N)
        acc = tl.zeros([R_PAD, BLOCK_M], tl.float32)
        top = tl.full([BLOCK_M], LOWEST, tl.float32)
        weight = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for block in range(start, stop, BLOCK_N):
            position = block + key
            live = position < stop
            committed = position < prefix
            page = tl.load(page_table + b * M + position // PAGE, mask=live & committed, other=0)
            page = tl.minimum(tl.maximum(page, 0), n_pages - 1).to(tl.int64)
            node = tl.load(path + slot * T + (position - prefix), mask=live & (position >= prefix), other=0)
            stored = pages + page * pages_n + position % PAGE * C
            at = tl.where(committed, stored, tree_kv + (b * T + node) * C)[:, None]
            latent = tl.load(at + col[None, :], mask=live[:, None] & (col < R)[None, :], other=0.0)
            key_rope = tl.load(
                at + R + rope[None, :], mask=live[:, None] & (rope < C - R)[None, :], other=0.0
            )
            s = tl.dot(latent, tl.trans(q_latent), input_precision="ieee")
            s += tl.dot(key_rope, tl.trans(q_rope), input_precision="ieee")
            s = tl.where(live[:, None], s * scale_log2, -float("inf"))
            acc, top, weight = absorb(acc, top, weight, latent, s)
        acc, log2_sum = finish(acc, top, tl.sum(weight, 0))
        to = (tl.program_id(0).to(tl.int64) * splits + split) * tl.num_programs(2) + tl.program_id(2)
        to = to * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(part_lse + to, log2_sum)
        tl.store(part_o + to[:, None] * R_PAD + col[None, :], tl.trans(acc))


@triton.jit(do_not_specialize=["first", "splits"])
def merge(
    n_keys,
    part_o,
    part_lse,
    o,  # [B, T, H, R]
    lse,  # [B, T, H]
    first,
    H,
    splits,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """A slot's splits one after the other; 0 and -inf where there are none."""
    slot = (first + tl.program_id(0)).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    head = tl.program_id(1) * BLOCK_M + row
    col = tl.arange(0, R_PAD)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([R_PAD, BLOCK_M], tl.float32)
    for split in range(tl.cdiv(tl.load(n_keys + slot), SPLIT)):
        part = (tl.program_id(0).to(tl.int64) * splits + split) * tl.num_programs(1) + tl.program_id(1)
        part = part * BLOCK_M + row
        log2_sum = tl.load(part_lse + part)
        value = tl.load(part_o + part[None, :] * R_PAD + col[:, None])
        new_top = tl.maximum(top, log2_sum)
        decay = tl.exp2(top - new_top)
        p = tl.exp2(log2_sum - new_top)
        weight = weight * decay + p
        acc = acc * decay[None, :] + value * p[None, :]
        top = new_top
    acc, log2_sum = finish(acc, top, weight)
    to = slot * H + head
    tl.store(lse + to, log2_sum * LN_2, mask=head < H)
    mask = (head < H)[:, None] & (col < R)[None, :]
    tl.store(o + to[:, None] * R + col[None, :], tl.trans(acc).to(o.dtype.element_ty), mask=mask)


def _tile(item_size: int, C: int, R: int) -> dict[str, int]:
    """The same for every shape and chip: heads, keys, and padded widths."""
    return {"BLOCK_M": 16, "BLOCK_N": 64 // item_size, "R_PAD": padded(R), "P_PAD": padded(C - R)}


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`. The same on every chip."""
    shapes = (("bf16", 64, 16, 512, 64), ("fp32", 3, 64, 500, 60))
    return [case for shape in shapes for case in _compile_cases(*shape)]


def _compile_cases(item: str, H: int, page: int, R: int, P: int) -> list[CompileCase]:
    C = R + P
    tile = _tile(4 if item == "fp32" else 2, C, R)
    both = {"R": R, "R_PAD": tile["R_PAD"], "SPLIT": SPLIT, "BLOCK_M": tile["BLOCK_M"]}
    parts: dict[str, str | int] = {"n_keys": "*i32", "part_o": "*fp32", "part_lse": "*fp32"}
    parts |= {"first": "i32", "splits": "i32", "H": H}
    inputs: dict[str, str | int] = {
        "q": f"*{item}",
        "pages": f"*{item}",
        "tree_kv": f"*{item}",
        "page_table": "*i32",
    }
    arguments = {**parts, **inputs, "prefix_len": "*i32", "path": "*i32", "scale_log2": "fp32"}
    arguments |= {"T": "i32", "M": "i32", "n_pages": "i32", "pages_n": page * C}
    constexprs = {**both, "C": C, "P_PAD": tile["P_PAD"], "PAGE": page, "BLOCK_N": tile["BLOCK_N"]}
    outputs = {"o": f"*{item}", "lse": "*fp32"}
    name = f"{item} {H} heads page {page} {R}+{P}"
    return [
        CompileCase(f"attend {name}", attend, arguments, constexprs, _WARPS, 1),
        CompileCase(f"merge {name}", merge, {**parts, **outputs}, both, _MERGE_WARPS),
    ]
