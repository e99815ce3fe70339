"""Accept lengths of a drafter on the target's own text: chain and trees, without running the engine.

The target's text is a function of its prompt, so what a round at some position would accept is known from that text, the
draft there and the tree rule. All positions are drafted in one batch, and rounds are read off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.kernels.registry import Kernels
from draftwood.models.drafter import Drafter
from draftwood.models.target import Target
from draftwood.scores import NEUTRAL, ScoreRule
from draftwood.training.blocks import draft
from draftwood.training.sampler import Sequences, whole

SIZES = (8, 16, 32, 64)
"""Slots of the trees, root included."""

TOP_K = 32
TOGETHER = 16
"""Blocks of one sequence drafted in one pass; its attention is quadratic in them."""

ROWS = 1024
"""Blocks whose logits are in memory at a time."""


@dataclass(frozen=True)
class Drafts:
    """Draft logits of R blocks, and what is needed to score and check them."""

    logits: Tensor  # [R, D, V] f32
    true: Tensor  # [R, D] i32, the target's tokens there, -1 past the end
    position: Tensor  # [R, D] i32
    temperature: Tensor  # [R] f32
    seed: Tensor  # [R] i64


def drafts_at(drafter: Drafter, target: Target, sequences: Sequences, anchors: Tensor) -> Drafts:
    """The drafts of rounds whose roots sit at anchors [n, A] of `sequences`, R = n A."""
    A = anchors.shape[1]
    depth = drafter.config.block_size - 1
    output = whole(target, sequences.ids, drafter.config.target_layer_ids)
    assert output.features is not None
    parts = [draft(drafter, target, sequences.ids, output.features, a) for a in anchors.split(TOGETHER, 1)]
    hidden = torch.cat(parts, 1).flatten(0, 1)
    logits = target.logits(hidden.to(target.dtype))
    ahead = anchors.flatten()[:, None] + torch.arange(1, depth + 1, device=anchors.device)  # [R, D]
    last = sequences.ids.shape[1] - 1
    true = sequences.ids.gather(1, ahead.clamp(max=last).view(len(anchors), -1)).view(len(ahead), depth)
    true = torch.where(ahead < sequences.end.repeat_interleave(A)[:, None], true, -1)
    temperature, seed = sequences.temperature.repeat_interleave(A), sequences.seed.repeat_interleave(A)
    return Drafts(logits, true, ahead.int(), temperature, seed)


def emitted(drafts: Drafts, kernels: Kernels, *, coupled: bool, rule: ScoreRule) -> dict[str, Tensor]:
    """Tokens that each round would emit, accepted ones plus the bonus: "chain" and the `SIZES` -> [R]."""
    d = drafts
    noise: dict[str, Tensor] = {}
    if coupled:
        noise = {"temperature": d.temperature, "seed": d.seed, "position": d.position}
    scoring = rule.at(d.temperature, d.logits.shape[1], coupled=coupled)
    told = noise | scoring.of(d.logits.shape[1])
    lp, ids = kernels.topk_logprobs(d.logits, min(TOP_K, d.logits.shape[-1]), **told)
    chain = (ids[:, :, 0] == d.true).int().cumprod(1).sum(1) + 1
    return {"chain": chain} | {str(k): v for k, v in tree_lengths(lp, ids, d.true, kernels).items()}


@torch.inference_mode()
def accepted_at(
    drafter: Drafter,
    target: Target,
    sequences: Sequences,
    anchors: Tensor,
    *,
    kernels: Kernels,
    coupled: bool,
    rule: ScoreRule = NEUTRAL,
    rows: int = ROWS,
) -> dict[str, Tensor]:
    """What rounds at anchors [n, A] would emit, "chain" and the `SIZES` -> [n, A], drafted with or without noise."""
    per = max(1, rows // anchors.shape[1])
    parts = []
    for at in range(0, len(anchors), per):
        mine = anchors[at : at + per]
        drafts = drafts_at(drafter, target, sequences.rows(slice(at, at + per)), mine)
        counts = emitted(drafts, kernels, coupled=coupled, rule=rule)
        parts.append({k: v.view(mine.shape) for k, v in counts.items()})
    return {k: torch.cat([p[k] for p in parts]) for k in parts[0]}


def tree_lengths(lp: Tensor, ids: Tensor, true: Tensor, kernels: Kernels) -> dict[int, Tensor]:
    """Slots -> tokens emitted [R] by a round over the best-first tree of so many slots; true [R, D] is what follows.

    Slots are in pop order, so the tree of N slots is the first N slots of a larger one.
    """
    slots = max(SIZES)
    root = torch.zeros(len(lp), dtype=torch.int32, device=lp.device)
    unlimited = torch.full_like(root, -torch.inf, dtype=torch.float32)
    tree = kernels.tree_build(root, lp, ids, torch.full_like(root, slots), unlimited, slots=slots)
    wanted = torch.cat((root[:, None], true), 1).gather(1, tree.depths.long())  # [R, slots]
    taken = torch.zeros_like(tree.depths, dtype=torch.bool)
    taken[:, 0] = True
    for slot in range(1, slots):
        parent = tree.parents[:, slot : slot + 1].clamp(min=0).long()
        taken[:, slot] = taken.gather(1, parent)[:, 0] & (tree.tokens[:, slot] == wanted[:, slot])
        taken[:, slot] &= slot < tree.n_slots
    depth = torch.where(taken, tree.depths, 0)
    return {size: depth[:, :size].amax(1) + 1 for size in SIZES}


def spread_anchors(sequences: Sequences, count: int) -> Tensor:
    """[n, count] positions spread evenly over each continuation, from the last prompt token on."""
    share = torch.linspace(0, 1, count, device=sequences.ids.device)
    start, end = sequences.start[:, None], sequences.end[:, None]
    return ((start - 1) + share * (end - 1 - start)).long()


def tokens_per_round(accepted: Tensor, wanted: int) -> Tensor:
    """[n] mean tokens per round when rounds follow one another from the first column of accepted [n, A].

    Column a is a round whose root sits a tokens into the text; `wanted` tokens are made, and what the last round
    makes beyond them is not counted.
    """
    n = len(accepted)
    at = torch.zeros(n, dtype=torch.int64, device=accepted.device)
    rounds = torch.zeros_like(at)
    while bool((at < wanted).any()):
        live = at < wanted
        made = accepted.gather(1, at.clamp(max=accepted.shape[1] - 1)[:, None])[:, 0]
        at = torch.where(live, at + made, at)
        rounds += live
    return wanted / rounds


def distinct_share(ids: Tensor, n: int = 4) -> Tensor:
    """[rows] distinct n-grams over n-grams of ids [rows, T]; a text that repeats itself has a low one."""
    grams = ids.unfold(1, n, 1)
    return torch.tensor([len({tuple(g) for g in row}) / len(row) for row in grams.tolist()])
