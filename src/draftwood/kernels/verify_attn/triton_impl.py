"""verify_attn in Triton: split-KV attention over pages and tree, then an exact merge of the splits.

Work is counted in units: one block of keys for one tile of rows. All requests' units are laid end to end in a line, and
every program takes an equal run of it, so a ragged batch keeps all programs busy. Each program works the line out for
itself from the lengths on the device. A tile that lies in one run is written at once; one that several runs share leaves a
partial result in each, which `_merge` combines by their log-sum-exps.

Rows are (slot, head) pairs, slot-major. Scores are computed transposed, [keys, rows]: so the softmax weights are the B
operand of the second product, which Hopper reads from shared memory (A may come from registers, where ptxas before CUDA
13.3 can overwrite it too early), and few rows need no padding to 64.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.chip import Chip, chip_of
from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.verify_attn.tiles import Tiles, choose_tiles, merge_rows
from draftwood.tree import n_words

_LOG2_E = math.log2(math.e)
_MERGE_WARPS = 4
_LN_2 = tl.constexpr(math.log(2))
_LOWEST = tl.constexpr(-3.4028234e38)  # where a running maximum starts: finite, so that no difference is NaN


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

    bf16, fp16 and fp32. Raises `TypeError` for another dtype and `ValueError` where the numbers of one key or query are
    not contiguous. Lengths and page ids out of range are clamped.
    """
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"`q`: expected bfloat16, float16 or float32, got {q.dtype}")
    B, T, H, C = q.shape
    if q.stride(3) != 1:
        raise ValueError(f"`q`: the numbers of a query must be contiguous, got strides {q.stride()}")
    if pages.stride()[1:] != (C, 1):
        raise ValueError(f"`pages`: the keys of a page must be contiguous, got strides {pages.stride()}")
    chip = chip_of(q.device)
    tiles = choose_tiles(chip, q.element_size(), T * H, value_dim, C - value_dim)
    o = torch.empty((B, T, H, value_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, T, H), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((chip.n_sms, 2, tiles.block_m), dtype=torch.float32, device=q.device)
    part_o = torch.empty((*part_lse.shape, tiles.latent_pad), dtype=torch.float32, device=q.device)
    sizes = {"B": B, "T": T, "H": H, "M": page_table.shape[1], "programs": chip.n_sms}
    rows = merge_rows(B * T * H, chip.n_sms)
    attend, merge = _constexprs(tiles, B, C, value_dim, pages.shape[1], rows)
    lengths = prefix_len.contiguous(), n_slots.contiguous()
    _attend[(chip.n_sms,)](
        q,
        pages,
        page_table.contiguous(),
        *lengths,
        tree_kv.contiguous(),
        ancestors.contiguous(),
        *(o, lse, part_o, part_lse),
        scale * _LOG2_E,
        **sizes,
        n_pages=pages.shape[0],
        words=ancestors.shape[2],
        q_b=q.stride(0),
        q_t=q.stride(1),
        q_h=q.stride(2),
        pages_n=pages.stride(0),
        **attend,
        num_warps=tiles.num_warps,
    )
    grid = (triton.cdiv(T * H, rows), B)
    _merge[grid](*lengths, *(o, lse, part_o, part_lse), **sizes, **merge, num_warps=_MERGE_WARPS)
    return o, lse


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`."""
    chip = Chip(capability, 132)
    return [
        case
        for item, B, T, H, page, R, P in (
            ("bf16", 8, 33, 64, 64, 512, 64),
            ("fp16", 2, 3, 8, 64, 512, 64),
            ("bf16", 1, 1, 8, 16, 128, 16),
            ("fp32", 8, 65, 8, 64, 512, 64),
        )
        for case in _compile_cases(chip, item, B, T, H, page, R, P)
    ]


def _compile_cases(
    chip: Chip, item: str, B: int, T: int, H: int, page: int, R: int, P: int
) -> list[CompileCase]:
    C = R + P
    tiles = choose_tiles(chip, 4 if item == "fp32" else 2, T * H, R, P)
    rows = merge_rows(B * T * H, chip.n_sms)
    attend, merge = _constexprs(tiles, B, C, R, page, rows)
    outputs = {"o": f"*{item}", "lse": "*fp32", "part_o": "*fp32", "part_lse": "*fp32"}
    lengths = {"prefix_len": "*i32", "n_slots": "*i32"}
    sizes: dict[str, str | int] = {"B": B, "T": T, "H": H, "M": 65, "programs": chip.n_sms}
    inputs = {"q": f"*{item}", "pages": f"*{item}", "page_table": "*i32", "tree_kv": f"*{item}"}
    strides = {"q_b": T * H * C, "q_t": H * C, "q_h": C, "pages_n": page * C}
    arguments = {**inputs, **lengths, "ancestors": "*i64", **outputs, "scale_log2": "fp32", **sizes}
    arguments |= {"n_pages": 4099, "words": n_words(T), **strides}
    name = f"{item} {B}x{T}x{H} page {page} {R}+{P}"
    return [
        CompileCase(f"attend {name}", _attend, arguments, attend, tiles.num_warps, tiles.num_stages),
        CompileCase(f"merge {name}", _merge, {**lengths, **outputs, **sizes}, merge, _MERGE_WARPS),
    ]


def _constexprs(
    tiles: Tiles, B: int, C: int, R: int, page: int, rows: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Compile-time arguments of `_attend` and of `_merge`."""
    both = {"PAGE": page, "R": R, "R_PAD": tiles.latent_pad, "B_PAD": max(2, triton.next_power_of_2(B))}
    both |= {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
    return {**both, "C": C, "P_PAD": tiles.rope_pad, "STAGES": tiles.num_stages}, {**both, "ROWS": rows}


@triton.jit
def _line(
    prefix_len, n_slots, B, T, H, capacity, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, B_PAD: tl.constexpr
):
    """Every request's prefix, live slots, blocks per tile, units, and where it ends on the line."""
    row = tl.arange(0, B_PAD)
    prefix = tl.load(prefix_len + row, mask=row < B, other=0)
    n = tl.load(n_slots + row, mask=row < B, other=0)
    prefix = tl.minimum(tl.maximum(prefix, 0), capacity)
    n = tl.minimum(tl.maximum(n, 0), T)
    blocks = tl.cdiv(prefix, BLOCK_N) + tl.cdiv(n, BLOCK_N)
    units = blocks * tl.cdiv(n * H, BLOCK_M)
    return prefix, n, blocks, units, tl.cumsum(units, 0)


@triton.jit
def _locate(
    at,
    prefix_len,
    n_slots,
    B,
    T,
    H,
    capacity,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    B_PAD: tl.constexpr,
):
    """The request at a point of the line: index, prefix, live slots, blocks per tile, and where it begins."""
    prefix, n, blocks, units, end = _line(prefix_len, n_slots, B, T, H, capacity, BLOCK_M, BLOCK_N, B_PAD)
    b = tl.sum((end <= at).to(tl.int32), 0)
    here = tl.arange(0, B_PAD) == b
    return (
        b.to(tl.int64),
        tl.sum(tl.where(here, prefix, 0), 0),
        tl.sum(tl.where(here, n, 0), 0),
        tl.sum(tl.where(here, blocks, 0), 0),
        tl.sum(tl.where(here, end - units, 0), 0),
    )


@triton.jit
def _run_start(program, total, programs):
    """Where a program's run of the line starts; it ends where the next one's starts."""
    active = tl.minimum(tl.maximum(total, 1), programs)
    return (tl.minimum(program, active).to(tl.int64) * total // active).to(tl.int32)


@triton.jit
def _absorb(acc, top, weight, latent, s):
    """Online softmax, base 2: one more block of latents [keys, R] and their transposed scores [keys, rows]."""
    new_top = tl.maximum(top, tl.max(s, 0))
    decay = tl.exp2(top - new_top)
    p = tl.exp2(s - new_top[None, :])
    weight = weight * decay + tl.sum(p, 0)
    acc = tl.dot(tl.trans(latent), p.to(latent.dtype), acc * decay[None, :], input_precision="ieee")
    return acc, new_top, weight


@triton.jit
def _attend(
    q,  # [B, T, H, C]
    pages,  # [n_pages, PAGE, C]
    page_table,  # [B, M]
    prefix_len,
    n_slots,
    tree_kv,  # [B, T, C]
    ancestors,  # [B, T, words]
    o,  # [B, T, H, R]
    lse,
    part_o,  # [programs, 2, BLOCK_M, R_PAD]: of the first and of the last tile of a run
    part_lse,  # [programs, 2, BLOCK_M], base 2
    scale_log2,
    B,
    T,
    H,
    M,
    programs,
    n_pages,
    words,
    q_b,
    q_t,
    q_h,
    pages_n,
    C: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    P_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    B_PAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    capacity = M * PAGE
    line = _line(prefix_len, n_slots, B, T, H, capacity, BLOCK_M, BLOCK_N, B_PAD)
    total = tl.sum(line[3], 0)
    start = _run_start(program, total, programs)
    stop = _run_start(program + 1, total, programs)
    at = start
    while at < stop:
        b, prefix, n, blocks, begin = _locate(
            at, prefix_len, n_slots, B, T, H, capacity, BLOCK_M, BLOCK_N, B_PAD
        )
        first = (at - begin) % blocks
        last = tl.minimum(blocks, first + stop - at)
        full = tl.minimum(last, prefix // BLOCK_N)  # end of the blocks that need no mask
        row = (at - begin) // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        live_row = row < n * H
        slot = tl.where(live_row, row // H, 0)

        col = tl.arange(0, R_PAD)
        rope = tl.arange(0, P_PAD)
        query = (q + b * q_b + slot.to(tl.int64) * q_t + row % H * q_h)[:, None]
        q_latent = tl.load(query + col[None, :], mask=live_row[:, None] & (col < R)[None, :], other=0.0)
        q_rope = tl.load(
            query + R + rope[None, :], mask=live_row[:, None] & (rope < C - R)[None, :], other=0.0
        )

        table = page_table + b * M
        key = tl.arange(0, BLOCK_N)
        acc = tl.zeros([R_PAD, BLOCK_M], tl.float32)
        top = tl.full([BLOCK_M], _LOWEST, tl.float32)
        weight = tl.zeros([BLOCK_M], tl.float32)
        # Two conditions below that always hold keep the compiler from bad choices. With the arithmetic in one of its own,
        # the pipeliner issues the next block's loads before it, not after. With the first products in another, the
        # compiler does not see that they feed the last, and lays their warps over keys and rows instead of keys alone.
        page = tl.load(table + first * BLOCK_N // PAGE, mask=first < full, other=0)
        for i in tl.range(first, full, num_stages=STAGES):
            position = i * BLOCK_N
            if PAGE >= BLOCK_N:
                page = tl.minimum(tl.maximum(page, 0), n_pages - 1)
                base = pages + page.to(tl.int64) * pages_n + position % PAGE * C
                keys = base + (key * C)[:, None]
                page = tl.load(table + (position + BLOCK_N) // PAGE, mask=i + 1 < full, other=0)
            else:
                pages_of = tl.load(table + (position + key) // PAGE)
                pages_of = tl.minimum(tl.maximum(pages_of, 0), n_pages - 1)
                base = pages + pages_of.to(tl.int64) * pages_n + (position + key) % PAGE * C
                keys = base[:, None]
            latent = tl.load(keys + col[None, :], mask=(col < R)[None, :], other=0.0)
            key_rope = tl.load(keys + R + rope[None, :], mask=(rope < C - R)[None, :], other=0.0)
            if i >= first:
                s = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                s_rope = s
                if i < full:
                    s = tl.dot(latent, tl.trans(q_latent), input_precision="ieee")
                if i + 1 <= full:
                    s_rope = tl.dot(key_rope, tl.trans(q_rope), input_precision="ieee")
                acc, top, weight = _absorb(acc, top, weight, latent, (s + s_rope) * scale_log2)

        # The prefix's last, partly filled block and the tree.
        tree = tree_kv + b * T * C
        word_of = slot * words
        bits = ancestors + b * T * words
        tree_from = tl.cdiv(prefix, BLOCK_N)
        for i in tl.range(tl.maximum(first, full), last, num_stages=STAGES):
            is_tree = i >= tree_from
            position = tl.where(is_tree, i - tree_from, i) * BLOCK_N
            live = key < tl.where(is_tree, n, prefix) - position
            if PAGE >= BLOCK_N:
                page_of = tl.load(table + position // PAGE, mask=not is_tree, other=0)
                page_of = tl.minimum(tl.maximum(page_of, 0), n_pages - 1)
                base_m = pages + page_of.to(tl.int64) * pages_n + position % PAGE * C
                base_m = tl.where(is_tree, tree + position * C, base_m) + key * C
            else:
                page_of = tl.load(table + (position + key) // PAGE, mask=live & (not is_tree), other=0)
                page_of = tl.minimum(tl.maximum(page_of, 0), n_pages - 1)
                base_m = pages + page_of.to(tl.int64) * pages_n + (position + key) % PAGE * C
                base_m = tl.where(is_tree, tree + (position + key) * C, base_m)
            mask = live[:, None] & (col < R)[None, :]
            latent_m = tl.load(base_m[:, None] + col[None, :], mask=mask, other=0.0)
            mask = live[:, None] & (rope < C - R)[None, :]
            rope_m = tl.load(base_m[:, None] + R + rope[None, :], mask=mask, other=0.0)
            if i >= first:
                s = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                s_rope = s
                if i < last:
                    s = tl.dot(latent_m, tl.trans(q_latent), input_precision="ieee")
                if i + 1 <= last:
                    s_rope = tl.dot(rope_m, tl.trans(q_rope), input_precision="ieee")
                word = tl.load(bits + word_of + position // 64, mask=is_tree & live_row, other=-1)
                word = word >> (position % 64)
                low = word.to(tl.int32)
                high = (word >> 32).to(tl.int32)
                seen = (tl.where((key < 32)[:, None], low[None, :], high[None, :]) >> (key % 32)[:, None]) & 1
                s = tl.where((seen != 0) & live[:, None], (s + s_rope) * scale_log2, -float("inf"))
                acc, top, weight = _absorb(acc, top, weight, latent_m, s)

        some = tl.where(weight == 0, 1.0, weight)
        out = tl.trans(acc / some[None, :])
        log2_sum = tl.where(weight == 0, -float("inf"), top + tl.log2(some))
        if last - first == blocks:
            to = b * T * H + row
            tl.store(lse + to, log2_sum * _LN_2, mask=live_row)
            mask = live_row[:, None] & (col < R)[None, :]
            tl.store(o + to[:, None] * R + col[None, :], out.to(o.dtype.element_ty), mask=mask)
        else:
            to = (program * 2 + (at > start)).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(part_lse + to, log2_sum)
            tl.store(part_o + to[:, None] * R_PAD + col[None, :], out)
        at += last - first


@triton.jit
def _merge(
    prefix_len,
    n_slots,
    o,  # [B, T, H, R]
    lse,
    part_o,  # as `_attend` leaves them
    part_lse,
    B,
    T,
    H,
    M,
    programs,
    PAGE: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    B_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Combine the partial results of ROWS rows of one tile, and give inert slots their 0 and -inf."""
    capacity = M * PAGE
    line = _line(prefix_len, n_slots, B, T, H, capacity, BLOCK_M, BLOCK_N, B_PAD)
    total = tl.sum(line[3], 0)
    here = tl.arange(0, B_PAD) == tl.program_id(1)
    n = tl.sum(tl.where(here, line[1], 0), 0)
    blocks = tl.sum(tl.where(here, line[2], 0), 0)
    begin = tl.sum(tl.where(here, line[4] - line[3], 0), 0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, R_PAD)
    to = tl.program_id(1).to(tl.int64) * T * H + row
    where = o + to[:, None] * R + col[None, :]
    inside = (row < T * H)[:, None] & (col < R)[None, :]
    dead = row >= n * H
    tl.store(lse + to, -float("inf"), mask=dead & (row < T * H))
    tl.store(where, tl.zeros([ROWS, R_PAD], o.dtype.element_ty), mask=dead[:, None] & inside)
    if tl.program_id(0) * ROWS < n * H:
        active = tl.minimum(total, programs)
        tile_start = begin + tl.program_id(0) * ROWS // BLOCK_M * blocks
        first = _owner(tile_start, total, active)
        last = _owner(tile_start + blocks - 1, total, active)
        if first < last:
            top = tl.full([ROWS], _LOWEST, tl.float32)
            weight = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, R_PAD], tl.float32)
            for program in tl.range(first, last + 1, num_stages=3):
                second = _run_start(program, total, programs) < tile_start
                part = (program * 2 + second).to(tl.int64) * BLOCK_M + row % BLOCK_M
                log2_sum = tl.load(part_lse + part)
                value = tl.load(part_o + part[:, None] * R_PAD + col[None, :])
                new_top = tl.maximum(top, log2_sum)
                decay = tl.exp2(top - new_top)
                p = tl.exp2(log2_sum - new_top)
                weight = weight * decay + p
                acc = acc * decay[:, None] + value * p[:, None]
                top = new_top
            some = tl.where(weight == 0, 1.0, weight)
            out = acc / some[:, None]
            log2_sum = tl.where(weight == 0, -float("inf"), top + tl.log2(some))
            tl.store(lse + to, log2_sum * _LN_2, mask=~dead)
            tl.store(where, out.to(o.dtype.element_ty), mask=(~dead)[:, None] & inside)


@triton.jit
def _owner(at, total, active):
    """The program whose run holds a point of the line: the inverse of `_run_start`."""
    return (((at + 1).to(tl.int64) * active - 1) // total).to(tl.int32)
