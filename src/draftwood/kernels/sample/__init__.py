"""sample: target logits -> the target's choice at every slot, a function of the logits, the seed and the position."""

from __future__ import annotations

from draftwood.kernels.registry import for_array
from draftwood.kernels.sample.params import SampleParams
from draftwood.tree import Array, DraftTree

__all__ = ["SampleParams", "sample"]


def sample(
    logits: Array,
    params: SampleParams,
    seed: Array,
    position: Array,
    tree: DraftTree | None = None,
    impl: str | None = None,
) -> tuple[Array, Array]:
    """Choose one token per row of logits. All implementations agree bit for bit on the same logits.

    Args:
        logits: [B, T, V] f32. Only finite entries are candidates: NaN and infinities count as -inf.
        params: see `SampleParams`.
        seed: [B] i64, of the request.
        position: [B, T] i32, position of the token being chosen (prefix_len + depth + 1).
        tree: whose ancestors' tokens count for the penalties and whose n_slots say which slots are live; None
            stands for T root-only rows all live. A tree with a status is root-only; the root is always live.
        impl: implementation name; None chooses by the type and device of `logits`.

    Returns:
        choice [B, T] i32, -1 where a row has no candidate and at slots >= n_slots; and status [B] i32: 1 if a
        live slot's row has no candidate, else 0. Whether that matters depends on the path: see `tree_accept`.

    In order, all in fp32:
      1. penalties: n(v) = counts[v] + occurrences among this slot's ancestors other than the root (itself
         included; live slots with tokens of the vocabulary only). Where n > 0 or prompt_seen: x = x / repetition
         if x > 0 else x * repetition. Then x -= frequency * n, then x -= presence if n > 0.
      2. x += logit bias. 3. tokens whose mask bit is clear leave, and those whose x is no longer finite.
      4. temperature 0: the largest x, ties to the smaller id. Done. Else x = x / temperature.
      5. sets are ordered by (x descending, id ascending). top-k: the first k stay.
      6. top-p, unless it is 1, over what stays: with xm the largest x, w = rint(exp(fp64(x - xm)) * 2^40) as
         int64 and W their sum, a token stays iff the sum of w before it is below
         max(1, trunc(fp64(top_p) * fp64(W))).
      7. min-p: a token stays iff x - xm >= log_min_p.
      8. the largest fp32(x + gumbel(seed, position, id)) among what stays, ties to the smaller id.

    The noise is independent of the tree, the batch and the budget, so speculative output equals plain decoding
    with the same seed.

    In each implementation the same comes of `merge` of the `partial` of each vocabulary slice, in order:
    `partial(logits[:, :, a:b], params, seed, position, tree, offset=a)`, with all other arguments for the whole
    vocabulary, then `merge(partials, params, seed, position, tree)`. The result does not depend on the slices.
    Greedy and unfiltered rows hand over one winner; rows with a filter hand over candidates, because the sums of
    top-p are relative to the largest x of all slices.
    """
    fn = for_array("sample", logits, impl)
    return fn(logits, params, seed, position, tree)  # type: ignore[no-any-return]
