"""Reference of `sample`: one row at a time, in the order of the contract.

`partial` keeps, of each slot, the slice's winner, or the whole slice where a filter needs more than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from draftwood.kernels.noise.ref import gumbel
from draftwood.kernels.sample.params import SampleParams
from draftwood.tree import WORD, DraftTree, Status


@dataclass(frozen=True)
class Partial:
    """What the slice of v tokens starting at `offset` contributes."""

    best: np.ndarray  # [B, T] f32, x (greedy) or x + noise (unfiltered) of the slice's winner; -inf: none
    token: np.ndarray  # [B, T] i32, the winner
    filtered: dict[tuple[int, int], np.ndarray]  # (b, t) -> [v] f32, x after step 4
    offset: int


def sample(
    logits: np.ndarray,
    params: SampleParams,
    seed: np.ndarray,
    position: np.ndarray,
    tree: DraftTree | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    return merge([partial(logits, params, seed, position, tree)], params, seed, position, tree)


def partial(
    logits: np.ndarray,
    params: SampleParams,
    seed: np.ndarray,
    position: np.ndarray,
    tree: DraftTree | None = None,
    offset: int = 0,
) -> Partial:
    """Of logits [B, T, v]; the other arguments are those of the whole vocabulary."""
    B, T, v = logits.shape
    ids = np.arange(offset, offset + v)
    out = Partial(np.full((B, T), -np.inf, np.float32), np.zeros((B, T), np.int32), {}, offset)
    for b, t in _live_slots(tree, B, T):
        x = _processed(logits[b, t], params, tree, b, t, ids)
        if params.temperature[b] > 0:
            x = x / np.float32(params.temperature[b])
            if params.top_k[b] > 0 or params.top_p[b] < 1 or params.log_min_p[b] > -np.inf:
                out.filtered[b, t] = x
                continue
            x = x + gumbel(seed[b], position[b, t], ids)
        winner = np.argmax(x)  # the first of equals
        out.best[b, t], out.token[b, t] = x[winner], ids[winner]
    return out


def merge(
    partials: Sequence[Partial],
    params: SampleParams,
    seed: np.ndarray,
    position: np.ndarray,
    tree: DraftTree | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Of all slices of the vocabulary, in its order."""
    B, T = position.shape
    choice, status = np.full((B, T), -1, np.int32), np.zeros(B, np.int32)
    for b, t in _live_slots(tree, B, T):
        if (b, t) in partials[0].filtered:
            x = np.concatenate([p.filtered[b, t] for p in partials])
            kept = _kept(x, int(params.top_k[b]), params.top_p[b], params.log_min_p[b])
            values = x[kept] + gumbel(seed[b], position[b, t], kept)
            tokens = kept
        else:
            values = np.array([p.best[b, t] for p in partials])
            tokens = np.array([p.token[b, t] for p in partials])
        best = values.max(initial=-np.inf)
        if best == -np.inf:
            status[b] = 1
        else:
            choice[b, t] = tokens[values == best].min()
    return choice, status


def _live_slots(tree: DraftTree | None, B: int, T: int) -> Iterator[tuple[int, int]]:
    for b in range(B):
        for t in range(_n_live(tree, b, T)):
            yield b, t


def _n_live(tree: DraftTree | None, b: int, T: int) -> int:
    if tree is None:
        return T
    return int(np.clip(tree.n_slots[b], 1, T)) if tree.status[b] == Status.SOUND else 1


@np.errstate(over="ignore", invalid="ignore")  # what overflows is no candidate
def _processed(
    row: np.ndarray, params: SampleParams, tree: DraftTree | None, b: int, t: int, ids: np.ndarray
) -> np.ndarray:
    """Steps 1 to 3 on the logits [v] of the tokens `ids`: what is not finite afterwards is no candidate."""
    x = np.where(np.isfinite(row), row, -np.inf).astype(np.float32)
    if params.counts is not None:
        x = _penalised(x, params, tree, b, t, ids)
    if params.bias_ids is not None:
        for token, value in zip(params.bias_ids[b], params.bias_values[b], strict=True):
            x[ids == token] += value
    if params.mask_bits is not None:
        word = params.mask_bits[b, t].view(np.uint32)[ids // 32]
        x[word >> (ids % 32).astype(np.uint32) & 1 == 0] = -np.inf
    return np.where(np.isfinite(x), x, np.float32(-np.inf))


def _penalised(
    x: np.ndarray, params: SampleParams, tree: DraftTree | None, b: int, t: int, ids: np.ndarray
) -> np.ndarray:
    n = params.counts[b, ids].copy()
    if tree is not None:
        for slot in range(1, _n_live(tree, b, tree.T)):
            word = int(tree.ancestors[b, t].view(np.uint64)[slot // WORD])
            if word >> (slot % WORD) & 1:
                n[ids == tree.tokens[b, slot]] += 1
    repetition, frequency, presence = params.repetition[b], params.frequency[b], params.presence[b]
    seen = (n > 0) | params.prompt_seen[b, ids]
    x = np.where(seen, np.where(x > 0, x / repetition, x * repetition), x)
    x -= frequency * n.astype(np.float32)
    x -= presence * (n > 0).astype(np.float32)
    return x


def _kept(x: np.ndarray, top_k: int, top_p: np.float32, log_min_p: np.float32) -> np.ndarray:
    """Indices of what steps 5 to 7 leave of x [V], in order."""
    order: np.ndarray = np.argsort(-x, kind="stable")
    order = order[x[order] > -np.inf]
    if top_k > 0:
        order = order[:top_k]
    if len(order) == 0:
        return order
    gap = x[order] - x[order[0]]
    stays = gap >= log_min_p
    if top_p < 1:
        w = np.rint(np.exp(gap.astype(np.float64)) * 2.0**40).astype(np.int64)
        before = np.cumsum(w) - w
        stays &= before < max(1, int(np.float64(top_p) * np.float64(w.sum())))
    kept: np.ndarray = order[stays]
    return kept
