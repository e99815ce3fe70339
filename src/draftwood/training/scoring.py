"""Fitting a drafter's score rule: the few numbers of `draftwood.scores` that make its trees accept most."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.kernels.registry import Kernels
from draftwood.scores import ScoreRule
from draftwood.training.evaluation import Drafts, emitted

SLOTS = "32"
"""The tree whose accepted tokens are maximised."""

SHARPNESS = (0.8, 1.0, 1.2, 1.4, 1.6, 2.0)
FIRST = (0.6, 0.8, 1.0, 1.2, 1.5)
DEEPER = (0.3, 0.5, 0.7, 0.9, 1.1)
COLDEST = (0.2, 0.3, 0.4, 0.5, 0.7, 1.0)


def fit_rule(drafts: Drafts, kernels: Kernels) -> ScoreRule:
    """The best rule found by going along one number at a time, twice; what the data says nothing about stays neutral.

    Sharpness and noise come from rows at temperature > 0, the coldest temperature from greedy ones. The published
    scores are the start, so the fit is never worse than they are on these drafts.
    """
    warm, cold = _rows(drafts, drafts.temperature > 0), _rows(drafts, drafts.temperature == 0)
    rule = ScoreRule()
    if len(warm.seed):
        started = rule.model_copy(update={"noise": (1.0, 1.0)})
        for _ in range(2):
            started = _best(warm, kernels, [started, *(_with(started, sharpness=a) for a in SHARPNESS)])
            first, deeper = started.noise or (1.0, 1.0)
            started = _best(warm, kernels, [started, *(_with(started, noise=(g, deeper)) for g in FIRST)])
            first = (started.noise or (1.0,))[0]
            started = _best(warm, kernels, [started, *(_with(started, noise=(first, g)) for g in DEEPER)])
        rule = _best(warm, kernels, [rule, started])
    if len(cold.seed):
        rule = _best(cold, kernels, [rule, *(_with(rule, coldest=t) for t in COLDEST)])
    return rule


def _with(rule: ScoreRule, **values: float | Sequence[float]) -> ScoreRule:
    return rule.model_copy(update=values)


def _best(drafts: Drafts, kernels: Kernels, rules: list[ScoreRule]) -> ScoreRule:
    """The first of the best."""
    lengths = [emitted(drafts, kernels, coupled=True, rule=r)[SLOTS].double().mean().item() for r in rules]
    return rules[max(range(len(rules)), key=lengths.__getitem__)]


def _rows(drafts: Drafts, which: Tensor) -> Drafts:
    return Drafts(*(t[which] for t in vars(drafts).values()))


def joined(parts: Sequence[Drafts]) -> Drafts:
    return Drafts(*(torch.cat(ts) for ts in zip(*(vars(p).values() for p in parts), strict=True)))
