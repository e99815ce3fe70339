"""What the ranks of a tensor-parallel engine tell each other inside a round: a few collectives over tensors.

Every rank runs the same calls in the same order. Knows neither models nor processes nor requests.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from draftwood.kernels.registry import Kernels, load_slices
from draftwood.kernels.topk_logprobs.torch_impl import weighted
from draftwood.models.shard import WHOLE, Shard
from draftwood.tree import DraftTree, n_words

ALIGNMENT = 8
"""Bytes of the widest numbers; buffers are multiples of it, so that they can lie end to end."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes; what is copied as such keeps its bits."""

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name before torch 2.13

Record = TypeVar("Record")
"""A dataclass whose fields are tensors."""


class Ranks:
    """This rank among those of torch's default process group; one rank alone calls nothing."""

    def __init__(self, shard: Shard = WHOLE) -> None:
        self.shard = shard

    @property
    def size(self) -> int:
        return self.shard.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, which is overwritten; bitwise the same on all ranks.

        Gloo and NCCL add each number in one place and copy the sum from there.
        """
        if self.size > 1:
            x = x.contiguous()
            dist.all_reduce(x)
        return x

    def sum_in_order(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, added in the order of the ranks; `all_reduce` may have another for each part of x."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def from_first(self, record: Record) -> Record:
        """The first rank's record, in one broadcast; shapes and types are the same on all ranks."""
        if self.size == 1:
            return record
        buffer = packed(record)
        dist.broadcast(buffer, src=0)
        return unpacked(record, buffer)

    def gather(self, record: Record) -> list[Record]:
        """All ranks' records, in one collective; shapes and types are the same on all ranks."""
        if self.size == 1:
            return [record]
        own = packed(record)
        buffers = own.new_empty(self.size * len(own))
        _all_gather(buffers, own)
        return [unpacked(record, buffer) for buffer in buffers.split(len(own))]


ALONE = Ranks()


def same_tree(ranks: Ranks, tree: DraftTree, slots: int, *, pruned: bool) -> DraftTree:
    """The first rank's tree: of `slots` slots or, if it was pruned, of as many as its largest row has.

    Only the first rank knows how much was pruned, so a tree travels at its full size.
    """
    if ranks.size == 1:
        return tree
    tree = ranks.from_first(_widened(tree, slots))
    return tree.truncated(int(tree.n_slots.max())) if pruned else tree


def over_vocabulary(kernels: Kernels, ranks: Ranks) -> Kernels:
    """The kernels for logits that are each rank's slice of the vocabulary; what they return is the same on all ranks.

    No logits are gathered but those of rows with a filter (top-k, top-p, min-p), whose cut needs all of them.
    """
    if ranks.size == 1:
        return kernels
    impl = {choice.kernel: choice.impl for choice in kernels.choices}
    topk_partial, topk_merge = load_slices("topk_logprobs", impl["topk_logprobs"])
    sample_partial, sample_merge = load_slices("sample", impl["sample"])

    def topk_logprobs(
        logits: Tensor, k: int, *, weight: Tensor | None = None, **told: Tensor
    ) -> tuple[Tensor, Tensor]:
        own = topk_partial(logits, k, ranks.shard.rank * logits.shape[-1], **told)
        lp, ids = topk_merge(ranks.gather(own), k)
        return (lp if weight is None else weighted(lp, weight, told["temperature"])), ids

    def sample(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        own = sample_partial(logits, *arguments, offset=ranks.shard.rank * logits.shape[-1])
        merged: tuple[Tensor, Tensor] = sample_merge(ranks.gather(own), *arguments)
        return merged

    return replace(kernels, topk_logprobs=topk_logprobs, sample=sample)


def _widened(tree: DraftTree, slots: int) -> DraftTree:
    """The tree with room for `slots` slots; what the new ones hold is void."""
    more, words = slots - tree.T, n_words(slots) - tree.ancestors.shape[2]
    wider = {
        name: F.pad(getattr(tree, name), (0, more)) for name in ("tokens", "parents", "depths", "scores")
    }
    return replace(tree, ancestors=F.pad(tree.ancestors, (0, words, 0, more)), **wider)


def _tensors(record: object) -> dict[str, Tensor]:
    """By field, the widest numbers first: so each begins at a multiple of its size when they lie end to end."""
    tensors: dict[str, Tensor] = {f.name: getattr(record, f.name) for f in fields(record)}  # type: ignore[arg-type]
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def packed(record: object) -> Tensor:
    """The bytes of a dataclass of tensors, end to end in one tensor."""
    tensors = list(_tensors(record).values())
    unit = _INTEGERS[tensors[-1].element_size()]
    size = sum(x.nbytes for x in tensors)
    whole = -(-size // ALIGNMENT) * ALIGNMENT
    buffer = torch.empty(whole, dtype=torch.uint8, device=tensors[0].device)
    numbers = [x.contiguous().as_strided((x.numel(),), (1,)).view(unit) for x in tensors]
    torch.cat(numbers, out=buffer[:size].view(unit))
    return buffer


def unpacked(like: Record, buffer: Tensor) -> Record:
    """The record that was packed, its tensors being views of the buffer; `like` has the same shapes and types."""
    tensors = _tensors(like)
    sizes = [x.nbytes for x in tensors.values()]
    parts = buffer[: sum(sizes)].split(sizes)
    views = {n: part.view(x.dtype).view(x.shape) for (n, x), part in zip(tensors.items(), parts, strict=True)}
    return replace(like, **views)  # type: ignore[type-var]
