"""topk_logprobs: drafter logits -> the k best tokens of each depth, with their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.kernels.registry import for_array
from draftwood.tree import Array


@dataclass(frozen=True)
class Partial:
    """What one vocabulary slice of v tokens contributes: c = min(k, v) candidates in order, and its softmax sum."""

    value: Array  # [B, D, c] f32 (f64 for f64 logits), what is ranked
    ids: Array  # [B, D, c] i32
    maximum: Array  # [B, D], largest value, -inf if none is finite
    total: Array  # [B, D], sum of exp(value - maximum) over the slice


def topk_logprobs(
    logits: Array,
    k: int,
    *,
    temperature: Array | None = None,
    seed: Array | None = None,
    position: Array | None = None,
    start: Array | None = None,
    scale: Array | None = None,
    weight: Array | None = None,
    impl: str | None = None,
) -> tuple[Array, Array]:
    """Log-softmax at temperature 1 and its k largest entries per row.

    Args:
        logits: [B, D, V] float. NaN and infinities count as -inf. They are ranked as fp32 (f64 logits as f64).
        k: 1..V candidates.
        temperature: [B] f32, with seed [B] i64 and position [B, D] i32 (all three or none): noise-coupled
            drafting. A row with temperature > 0 is ranked by x = fp32(logits) / temperature + gumbel(seed,
            position, token), the very noise that `sample` uses, and lp is the log-softmax of x. A row with
            temperature 0 is ranked as if the three were not given. The position may be one row for all.
        start: [B] i32, with the three: positions count from it.
        scale: [B, D] f32 that multiplies the logits before anything else.
        weight: [B, D] f32 above 0, with the three: lp of a row with temperature > 0 becomes the log-softmax of weight * lp over the
            k candidates.
        impl: implementation name; None chooses by the type and device of `logits`.

    Returns:
        lp [B, D, k] f32, descending, and ids [B, D, k] i32, ranked before lp is rounded. Equal values go to
        the smaller token id. Rows with fewer than k finite entries are filled with lp = -inf, smaller ids first.
        A row with no finite entry is all -inf.

    Raises:
        ValueError: k outside 1..V, or some but not all of temperature, seed, position given, or start or weight without them.

    Each implementation is `merge(partial(slice) for each vocabulary slice)`, so tensor parallel needs no gather:
    `partial(logits, k, offset=0, ...) -> Partial` holds k candidates, the maximum and the sum of exponentials; weights come after it.
    """
    fn = for_array("topk_logprobs", logits, impl)
    noise = {"temperature": temperature, "seed": seed, "position": position, "start": start}
    return fn(logits, k, **noise, scale=scale, weight=weight)  # type: ignore[no-any-return]


def check_arguments(
    V: int,
    k: int,
    temperature: Array | None,
    seed: Array | None,
    position: Array | None,
    start: Array | None = None,
    weight: Array | None = None,
) -> None:
    """Raise `ValueError` as `topk_logprobs` promises."""
    if not 1 <= k <= V:
        raise ValueError(f"topk_logprobs: k must be in 1..{V} (the vocabulary), got {k}")
    given = {"temperature": temperature, "seed": seed, "position": position}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) not in (0, 3):
        raise ValueError(
            f"topk_logprobs: temperature, seed and position go together; missing: {', '.join(missing)}"
        )
    for name, value in (("start", start), ("weight", weight)):
        if missing and value is not None:
            raise ValueError(f"topk_logprobs: {name} goes with temperature, seed and position")
