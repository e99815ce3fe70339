"""topk_logprobs: drafter logits -> the k best tokens of each depth, with their log-probabilities."""

from __future__ import annotations

from draftwood.kernels.registry import for_array
from draftwood.tree import Array


def topk_logprobs(
    logits: Array,
    k: int,
    *,
    temperature: Array | None = None,
    seed: Array | None = None,
    position: Array | None = None,
    impl: str | None = None,
) -> tuple[Array, Array]:
    """Log-softmax at temperature 1 and its k largest entries per row.

    Args:
        logits: [B, D, V] float. NaN counts as -inf.
        k: 1..V candidates.
        temperature: [B] f32, with seed [B] i64 and position [B, D] i32 (all three or none): noise-coupled
            drafting. A row with temperature > 0 is ranked by x = fp32(logits) / temperature + gumbel(seed,
            position, token), the very noise that `sample` uses, and lp is the log-softmax of x. A row with
            temperature 0 is ranked as if the three were not given.
        impl: implementation name; None chooses by the type and device of `logits`.

    Returns:
        lp [B, D, k] f32, descending, and ids [B, D, k] i32. Equal values go to the smaller token id. Rows
        with fewer than k finite entries are filled with lp = -inf, smaller ids first. A row with no finite
        entry is all -inf.

    Raises:
        ValueError: k outside 1..V, or some but not all of temperature, seed, position given.

    Each implementation is `merge(partial(slice) for each vocabulary slice)`, so tensor parallel needs no gather:
    `partial(logits, k, offset=0, ...) -> Partial` holds k candidates, the maximum and the sum of exponentials.
    """
    fn = for_array("topk_logprobs", logits, impl)
    return fn(logits, k, temperature=temperature, seed=seed, position=position)  # type: ignore[no-any-return]
