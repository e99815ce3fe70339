"""tree_build: per-depth candidates -> the best-first draft tree under a slot budget (DDTree, arXiv 2604.12989)."""

from __future__ import annotations

from draftwood.kernels.registry import for_array
from draftwood.tree import Array, DraftTree


def tree_build(
    root: Array,
    lp: Array,
    ids: Array,
    budget: Array | None = None,
    min_score: Array | None = None,
    *,
    slots: int,
    impl: str | None = None,
) -> DraftTree:
    """Grow each tree by the frontier's best node until its budget, its score floor or its candidates run out.

    Args:
        root: [B] i32, token of slot 0.
        lp: [B, D, K] f32, descending log-probs per depth, <= 0; -inf is never taken.
        ids: [B, D, K] i32, the candidates' tokens, distinct per depth.
        budget: [B] i32, slots to fill, root included; clamped to 1..slots. None for `slots`.
        min_score: [B] f32, no node below this score is taken; -inf or None for no floor.
        slots: T, the padded slot count of the result.
        impl: implementation name; None chooses by the type and device of `lp`.

    Returns:
        `DraftTree` with slots in pop order. score(child at depth d, rank r) = fp32(score(parent) + lp[d-1, r]),
        root 0. The frontier offers, for every slot, its best child not taken yet; the order is total: higher
        score, then smaller parent slot, then smaller rank. All implementations agree bit for bit. A row whose
        lp holds NaN, a positive or an ascending pair gets status BAD_SCORE, one whose ids repeat or are negative
        among the candidates with lp > -inf BAD_TOKEN; both are root-only. D = 0 is legal (root-only trees).
    """
    fn = for_array("tree_build", lp, impl)
    return fn(root, lp, ids, budget, min_score, slots=slots)  # type: ignore[no-any-return]
