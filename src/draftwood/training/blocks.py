"""Training examples from sequences: random anchors, their blocks, labels and weights, and the loss.

A block starts at an anchor a, sees the features of positions before a and itself, and predicts the tokens at a + 1 .. a + D.
Source: DFlash, arXiv 2602.06036, section on training; weights exp(-(k - 1) / gamma) for the k-th token of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftwood.models.drafter import Drafter
from draftwood.models.target import Target
from draftwood.training.sampler import Sequences, whole

COLDEST = 0.25
"""Temperature at which soft labels of greedy continuations are taken: sharp, yet with a gradient beyond the argmax."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of n sequences, A each: where they start, what they should say, how much each token counts."""

    anchors: Tensor  # [n, A] i64 positions
    labels: Tensor  # [n, A, D] i64, the token at anchor + k
    weights: Tensor  # [n, A, D] f32, 0 past a sequence's end and for unused blocks


def pick_anchors(sequences: Sequences, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Anchors [n, count] i64, uniform without replacement and ascending, and whether each is used, [n, count].

    Candidates run from the last prompt token, where drafting starts, to the last token but one. `generator` lives
    where the sequences do.
    """
    n, S = sequences.ids.shape
    position = torch.arange(S, device=sequences.ids.device)
    candidate = (position >= sequences.start[:, None] - 1) & (position < sequences.end[:, None] - 1)
    draw = torch.rand(n, S, generator=generator, device=position.device).masked_fill_(~candidate, -1.0)
    best, anchors = draw.topk(min(count, S), 1)
    anchors, order = torch.where(best >= 0, anchors, S - 1).sort(1)
    return anchors, (best >= 0).gather(1, order)


def make_blocks(sequences: Sequences, anchors: Tensor, used: Tensor, depth: int, gamma: float) -> Blocks:
    """Labels and weights of blocks that draft `depth` tokens."""
    k = torch.arange(1, depth + 1, device=anchors.device)
    where = anchors[..., None] + k  # [n, A, D]
    n, A, _ = where.shape
    inside = where < sequences.end[:, None, None]
    last = sequences.ids.shape[1] - 1
    labels = sequences.ids.gather(1, where.clamp(max=last).view(n, -1)).view(n, A, depth).long()
    weights = (used[..., None] & inside) * torch.exp(-(k - 1) / gamma)
    return Blocks(anchors, labels, weights)


def draft(drafter: Drafter, target: Target, ids: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
    """Final-norm hidden states [n, A, D, d] of the blocks at `anchors` [n, A], for sequences ids [n, S].

    The drafter's own `context` and `forward`; it was built with `training_kernels`, whose attention groups
    rows by sequence.
    """
    n, A = anchors.shape
    k, v = drafter.context(features, torch.zeros_like(ids[:, 0])).unbind(3)
    table = torch.arange(n, device=ids.device, dtype=torch.int32).repeat_interleave(A)[:, None]
    anchor = ids.gather(1, anchors).flatten()
    hidden: Tensor = drafter(anchor, anchors.flatten().int(), k, v, table, target.embed)
    return hidden.view(n, A, *hidden.shape[1:])


def hard_loss(logits: Tensor, blocks: Blocks) -> Tensor:
    """Weighted mean cross-entropy with the sampled tokens; logits [n, A, D, V]."""
    ce = F.cross_entropy(logits.flatten(0, 2), blocks.labels.flatten(), reduction="none")
    return (ce * blocks.weights.flatten()).sum() / blocks.weights.sum()


def soft_loss(logits: Tensor, teacher: Tensor, temperature: Tensor, blocks: Blocks) -> Tensor:
    """Weighted mean cross-entropy with the target's own distribution at each sequence's temperature, both sides divided by it.

    Its expectation over sampled tokens is that of `hard_loss` with logits / T, but it says in one step what many samples
    would. So `logits` become those of the target at temperature 1, and logits / T rank candidates at temperature T, which is
    what noise-coupled drafting computes. logits, teacher: [n, A, D, V]; temperature [n].
    """
    t = temperature.clamp(min=COLDEST)[:, None, None, None]
    ce = -((teacher / t).softmax(-1) * (logits / t).log_softmax(-1)).sum(-1)
    return (ce * blocks.weights).sum() / blocks.weights.sum()


@dataclass(frozen=True)
class Batch:
    """What one optimiser step needs, from frozen models only."""

    ids: Tensor  # [n, S] i32
    features: Tensor  # [n, S, K d]
    blocks: Blocks
    temperature: Tensor  # [n]
    teacher: Tensor | None  # [n, A, D, V], the target's logits where it chose the labels; soft labels only


@torch.no_grad()
def make_batch(
    target: Target,
    taps: tuple[int, ...],
    sequences: Sequences,
    anchors: Tensor,
    used: Tensor,
    depth: int,
    gamma: float,
    soft: bool,
) -> Batch:
    """Run the target over the sequences and cut blocks out."""
    output = whole(target, sequences.ids, taps)
    blocks = make_blocks(sequences, anchors, used, depth, gamma)
    teacher = None
    if soft:
        n, A = anchors.shape
        where = anchors[..., None] + torch.arange(depth, device=anchors.device)
        where = (
            where.clamp(max=sequences.ids.shape[1] - 1).view(n, -1, 1).expand(-1, -1, output.hidden.shape[-1])
        )
        teacher = target.logits(output.hidden.gather(1, where)).view(n, A, depth, -1)
    assert output.features is not None
    return Batch(sequences.ids, output.features, blocks, sequences.temperature, teacher)


def batch_loss(drafter: Drafter, target: Target, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss, and which labels were the first choice: [n, A, D] bool."""
    hidden = draft(drafter, target, batch.ids, batch.features, batch.blocks.anchors)
    logits = F.linear(hidden, target.head.weight.to(hidden.dtype))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    right = logits.detach().argmax(-1) == batch.blocks.labels
    if batch.teacher is None:
        return hard_loss(logits, batch.blocks), right
    return soft_loss(logits, batch.teacher, batch.temperature, batch.blocks), right


def accept_length(right: Tensor, weights: Tensor) -> Tensor:
    """Mean tokens per round of a chain: drafted tokens right up to the first wrong one, plus the bonus."""
    run = (right & (weights > 0)).int().cumprod(-1).sum(-1)
    used = weights[..., 0] > 0
    return (run * used).sum() / used.sum() + 1
