"""linear in torch: the library sees one shape per weight only, a block of rows of which zeros fill up the last.

Libraries choose kernels, threads and the order of sums by shape, so a product of another number of rows may differ in its
last bits. Within one shape most add up every row in the same way, but not all (edge rows, rows at odd addresses): a trial
before a weight's first product shows, and the rows of those that differ go one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

BLOCK = 16
"""Rows multiplied together: on two CPU cores the arithmetic on 16 takes about as long as reading the weight does."""

_TRIALS = 64
"""Random rows that decide whether the rows of a block are all added up alike. Another order shows in about half of them, and in
a tenth where few sums are inexact."""

Product = Callable[[Tensor], Tensor]
"""x [n, K] -> [n, M], by a library."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See `draftwood.kernels.linear.linear`."""
    if x.dim() == 3:
        return torch.stack([linear(rows, matrix) for rows, matrix in zip(x, weight, strict=True)])
    wide = torch.promote_types(x.dtype, torch.float32)
    matrix = weight.to(wide)
    layout = (matrix.shape, matrix.stride(), matrix.data_ptr() % 64, wide, x.device, torch.get_num_threads())
    return in_blocks(lambda rows: F.linear(rows, matrix), x.to(wide), layout).to(x.dtype)


def in_blocks(product: Product, x: Tensor, layout: Hashable) -> Tensor:
    """x [N, K] through `product`, which sees blocks of one size only; `layout` says what its order of sums may depend on."""
    size = _sizes.get(layout)
    if size is None:
        size = _sizes[layout] = BLOCK if _rows_are_alike(product, x) else 1
    return torch.cat([product(block) for block in _blocks(x, size)])[: len(x)]


_sizes: dict[Hashable, int] = {}
"""Block size by layout, found out once."""


def _rows_are_alike(product: Product, x: Tensor) -> bool:
    """Whether equal rows of a block give equal rows."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_TRIALS, x.shape[1], generator=generator, dtype=x.dtype).to(x.device)
    outputs = (product(row.expand(BLOCK, -1).contiguous()) for row in rows)
    return all(bool((y == y[0]).all()) for y in outputs)


def _blocks(x: Tensor, size: int) -> list[Tensor]:
    """[size, K] each, at an address of its own, so that all are aligned alike."""
    blocks = []
    for rows in x.split(size):
        block = torch.zeros(size, x.shape[1], dtype=x.dtype, device=x.device)
        block[: len(rows)] = rows
        blocks.append(block)
    return blocks
