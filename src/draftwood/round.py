"""One decoding round, on one screen: draft -> build -> verify -> accept -> commit.

The round knows tensors only: no requests, no text, no host decisions. Everything a stage needs is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from draftwood.cache.pools import LatentPool
from draftwood.kernels import Kernels
from draftwood.kernels.sample.params import SampleParams
from draftwood.kernels.tree_accept import Accepted, Limits
from draftwood.models.layers import ramp
from draftwood.models.streams import beside
from draftwood.models.target import Target, TargetOutput, TreeBatch
from draftwood.parallel import same_tree
from draftwood.scores import ScoreRule, Scoring
from draftwood.tree import DraftTree

Timer = Callable[[str], AbstractContextManager[None]]
"""Called with a stage's name, wraps that stage."""

Context = Callable[[], torch.Tensor]
"""Called for what `EarlyDrafting.project` gives, once that is wanted."""


class Drafting(Protocol):
    """Where draft logits come from, and who learns from what was committed."""

    taps: tuple[int, ...]
    """Target layers whose outputs `extend` wants, concatenated in this order."""
    max_depth: int
    """D, the most tokens it can draft past the root."""
    rule: ScoreRule
    """How its logits become node scores."""

    def logits(self, state: RoundState, depth: int) -> torch.Tensor:
        """[B, depth, V] f32: row d - 1 scores the token d positions after the root."""

    def extend(
        self, features: torch.Tensor, page_table: torch.Tensor, start: torch.Tensor, count: torch.Tensor
    ) -> None:
        """Learn features [B, N, F] of positions start[b] .. start[b] + count[b] - 1; rows past count are void."""

    def catch_up(self) -> None:
        """Write what `extend` may have put off; due before a page goes to another request."""

    def copy_page(self, source: int, target: int) -> None:
        """Give page `target` what page `source` holds of the drafter's context."""


@runtime_checkable
class EarlyDrafting(Drafting, Protocol):
    """Drafting that can project features before it is known which of them will be committed."""

    def project(
        self, taps: tuple[torch.Tensor, ...], start: torch.Tensor, depths: torch.Tensor
    ) -> torch.Tensor:
        """What `commit` wants of all slots: taps [B, T, d] each, of positions start[b] + depths[b, t]."""

    def commit(
        self,
        projected: torch.Tensor,
        page_table: torch.Tensor,
        start: torch.Tensor,
        path: torch.Tensor,
        count: torch.Tensor,
    ) -> None:
        """Learn the first count slots of each path, as `extend` does from features."""


@dataclass
class RoundState:
    """The batch between two rounds; `commit` advances it. Row b of everything belongs to one request."""

    root: torch.Tensor  # [B] i32, the newest token, not in the pages yet
    prefix_len: torch.Tensor  # [B] i32, committed positions; the root's own position
    page_table: torch.Tensor  # [B, M] i32
    seed: torch.Tensor  # [B] i64
    params: SampleParams
    limits: Limits
    live: torch.Tensor  # [B] bool; other rows stand still: they are computed and do not change
    scoring: Scoring | None = None  # of draft logits; needed where there are any


@dataclass(frozen=True)
class RoundPlan:
    """The shape of a round, decided before it. `slots` = 1 is plain decoding."""

    slots: int  # T, root included
    depth: int  # D
    top_k: int  # candidates per depth; 1 drafts a chain
    prune: Callable[[DraftTree], DraftTree] | None = None  # truncates the built tree, if its scores say so
    early: bool = False  # project all slots' features beside the choice, not those of the path after it


@dataclass(frozen=True)
class Stages:
    """What the stages run on; fixed while the engine lives."""

    target: Target
    latents: LatentPool
    drafting: Drafting | None
    kernels: Kernels
    noise_coupled: bool  # rank candidates with the noise that `sample` will use


@dataclass(frozen=True)
class RoundResult:
    """What a round leaves behind, all on the device."""

    tree: DraftTree
    logits: torch.Tensor  # [B, T, V] f32
    accepted: Accepted
    table: torch.Tensor  # what the host may want to know of it, see the kernel `advance`


def decode_round(stages: Stages, state: RoundState, plan: RoundPlan, timer: Timer) -> RoundResult:
    """Run one round and advance `state` in place. All rows emit at least one token."""
    with timer("draft"):
        lp, ids = draft(stages, state, plan)
    with timer("build"):
        tree = build(stages, state, plan, lp, ids)
    with timer("verify"):
        output, logits, context = verify(stages, state, plan, tree)
    with timer("accept"):
        accepted = accept(stages, state, plan, tree, logits)
    with timer("commit"):
        table = commit(stages, state, tree, output, context, accepted)
    return RoundResult(tree, logits, accepted, table)


def draft(stages: Stages, state: RoundState, plan: RoundPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates per depth: lp and ids [B, D, K]; D = 0 when nothing is drafted."""
    if stages.drafting is None or plan.slots == 1:
        nothing = state.root.new_empty(len(state.root), 0, 1)
        return nothing.float(), nothing
    logits = stages.drafting.logits(state, plan.depth)
    assert state.scoring is not None
    told = state.scoring.of(plan.depth)
    if stages.noise_coupled:
        told |= {"temperature": state.params.temperature, "seed": state.seed}
        told |= {"position": ramp(plan.depth + 1, logits.device)[None, 1:], "start": state.prefix_len}
    lp, ids = stages.kernels.topk_logprobs(logits, plan.top_k, **told)
    return lp, ids


def build(
    stages: Stages, state: RoundState, plan: RoundPlan, lp: torch.Tensor, ids: torch.Tensor
) -> DraftTree:
    """The best-first tree over the candidates, at most `plan.slots` slots."""
    tree = stages.kernels.tree_build(state.root, lp, ids, slots=plan.slots)
    if plan.prune is not None:
        tree = plan.prune(tree)
    return same_tree(stages.target.ranks, tree, plan.slots, pruned=plan.prune is not None)


def verify(
    stages: Stages, state: RoundState, plan: RoundPlan, tree: DraftTree
) -> tuple[TargetOutput, torch.Tensor, Context | None]:
    """One target pass over all slots; returns its output, logits [B, T, V] f32, this rank's slice of V, and an early context."""
    batch = TreeBatch(state.page_table, state.prefix_len, tree.ancestors, tree.n_slots)
    taps = () if stages.drafting is None else stages.drafting.taps
    output = stages.target(tree.tokens, tree.depths, stages.latents.pages, batch, taps)
    context = None
    if plan.early:
        assert isinstance(stages.drafting, EarlyDrafting)
        project = partial(stages.drafting.project, output.taps, state.prefix_len, tree.depths)
        context = beside(state.prefix_len, project)
    return output, stages.target.logits(output.hidden), context


def accept(
    stages: Stages, state: RoundState, plan: RoundPlan, tree: DraftTree, logits: torch.Tensor
) -> Accepted:
    """The path that the target's choices take through the tree."""
    position = state.prefix_len[:, None] + tree.depths + 1
    choice, _ = stages.kernels.sample(logits, state.params, state.seed, position, tree)
    accepted: Accepted = stages.kernels.tree_accept(tree, choice, state.limits, max_depth=plan.depth)
    return stages.target.ranks.from_first(accepted)


def commit(
    stages: Stages,
    state: RoundState,
    tree: DraftTree,
    output: TargetOutput,
    context: Context | None,
    accepted: Accepted,
) -> torch.Tensor:
    """Move the path into the pages, extend the drafter's context, advance the state; returns the round's table."""
    path, n_path = accepted.path, accepted.n_path
    where = (state.page_table, state.prefix_len, path, n_path)
    committed = beside(path, lambda: stages.kernels.commit_kv(stages.latents.pages, output.latents, *where))
    if context is not None:
        assert isinstance(stages.drafting, EarlyDrafting)
        stages.drafting.commit(context(), *where)
    elif stages.drafting is not None:
        features = stages.kernels.path_features(output.taps, path)
        stages.drafting.extend(features, state.page_table, state.prefix_len, n_path)
    if state.params.counts is not None:
        live = (accepted.emitted >= 0).to(state.params.counts.dtype)
        state.params.counts.scatter_add_(1, accepted.emitted.clamp(min=0).long(), live)
    committed()
    limits = state.limits
    moved = (state.root, state.prefix_len, limits.max_new, limits.context_left, state.live)
    table: torch.Tensor = stages.kernels.advance(*moved, tree, accepted)
    return table
