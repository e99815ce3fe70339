"""verify_attn in Gluon, for Hopper: latents of 512 + 64 numbers in bf16 (see `draftwood.kernels.specialised`).

One launch per layer, of one program per multiprocessor, that begins before the launch ahead of it has ended and waits for that
before it reads queries or writes. A small one per pass plans who does what.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from draftwood.kernels.chip import chip_of
from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.verify_attn import check_pages, check_use, gluon_kernels, gluon_plan

WIDTH, ROPE_DIM = 576, 64

TUNING = {"GRAIN": 4, "AHEAD": 1}
"""GRAIN: pieces of 64 columns to a barrier. AHEAD: see `gluon_kernels`."""

_LOG2_E = math.log2(math.e)
_WARPS = 4  # of `attend`'s first warpgroup, which asks for the others
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


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

    Raises `NotImplementedError` for a use that this is not made for, and `ValueError` where the pages are not contiguous.
    Lengths and page ids out of range are clamped.
    """
    check_use("gluon", q, pages, value_dim)
    attention = Attention(page_table, prefix_len, ancestors, n_slots, pages.shape[1])
    return attention.with_lse(q, pages, tree_kv, scale)


class Attention:
    """`verify_attn` of one pass. Its layers take turns with one workspace, so they run in the order of one stream."""

    def __init__(
        self, page_table: Tensor, prefix_len: Tensor, ancestors: Tensor, n_slots: Tensor, page: int
    ) -> None:
        self.page, self.heads = page, 0
        self.page_table, self.ancestors = page_table.contiguous(), ancestors.contiguous()
        self.lengths = prefix_len.contiguous(), n_slots.contiguous()
        self.programs = programs = chip_of(page_table.device).n_sms
        ints = partial(torch.empty, dtype=torch.int32, device=page_table.device)
        self.plans, self.arrivals = ints(programs, gluon_plan.FIELDS.value), ints(programs, 2)
        self.part_o = torch.empty(programs, 2, 64, 512, dtype=torch.bfloat16, device=page_table.device)
        self.part_lse = torch.empty(programs, 2, 2, 64, dtype=torch.float32, device=page_table.device)

    def __call__(self, q: Tensor, pages: Tensor, tree_kv: Tensor, scale: float, *, value_dim: int) -> Tensor:
        """o [B, T, H, R]; the arguments are those that differ from layer to layer."""
        return self.with_lse(q, pages, tree_kv, scale)[0]

    def with_lse(self, q: Tensor, pages: Tensor, tree_kv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """o, and lse [B, T, H]. Raises as `verify_attn` does for the pages."""
        check_pages(pages)
        B, T, H, _ = q.shape
        sizes = {"B": B, "T": T, "H": H, "M": self.page_table.shape[1], "n_pages": pages.shape[0]}
        few = {"PAGE": self.page, "PROGRAMS": self.programs, "B_PAD": _padded(B)}
        if self.heads != H:  # the first layer
            self.heads = H
            gluon_plan.plan[(self.programs,)](
                *self.lengths, self.page_table, self.plans, **sizes, **few, num_warps=1
            )
            self.arrivals.zero_()  # after the plan, which `attend` reads before what precedes it has ended
        o = torch.empty((B, T, H, q.shape[3] - ROPE_DIM), dtype=q.dtype, device=q.device)
        lse = torch.empty((B, T, H), dtype=torch.float32, device=q.device)
        gluon_kernels.attend[(self.programs,)](
            _descriptor(q, 64),
            _descriptor(pages, self.page),
            _descriptor(tree_kv, 64),
            self.page_table,
            *self.lengths,
            self.ancestors,
            *(o, lse, self.part_o, self.part_lse, self.arrivals, self.plans),
            scale * _LOG2_E,
            **sizes,
            words=self.ancestors.shape[2],
            **few,
            **TUNING,
            num_warps=_WARPS,
            launch_pdl=True,
        )
        return o, lse


verify_attn.prepare = Attention  # type: ignore[attr-defined]


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`; nothing for other chips."""
    if capability != 90:
        return []
    return [*_compile_cases(64, 1), *_compile_cases(16, 32)]


def _compile_cases(page: int, b_pad: int) -> list[CompileCase]:
    rows, paged = (f"tensordesc<bf16[{n}, 64],{_LAYOUT!r}>" for n in (64, page))
    lengths = {"prefix_len": "*i32", "n_slots": "*i32", "page_table": "*i32"}
    sizes = dict.fromkeys(("B", "T", "H", "M", "n_pages"), "i32")
    outputs = {"o": "*bf16", "lse": "*fp32", "part_o": "*bf16", "part_lse": "*fp32"}
    arguments = {"q_desc": rows, "kv_desc": paged, "tree_desc": rows, "ancestors": "*i64", "words": "i32"}
    arguments |= {**lengths, **outputs, "plans": "*i32", "arrivals": "*i32", "scale_log2": "fp32", **sizes}
    few = {"PAGE": page, "PROGRAMS": 132, "B_PAD": b_pad}
    name = f"page {page}, requests {b_pad}"
    attend = {**few, **TUNING}
    return [
        CompileCase(f"attend {name}", gluon_kernels.attend, arguments, attend, _WARPS),
        CompileCase(f"plan {name}", gluon_plan.plan, {**lengths, "plans": "*i32", **sizes}, few, 1),
    ]


def _padded(B: int) -> int:
    """1 of one request, whose plan needs no sums; else whole warps of requests."""
    return 1 if B == 1 else max(32, triton.next_power_of_2(B))


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Of the rows of `x`, which TMA reads in pieces."""
    return TensorDescriptor.from_tensor(x.reshape(-1, WIDTH), [rows, 64], _LAYOUT)
