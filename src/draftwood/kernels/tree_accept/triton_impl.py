"""tree_accept in Triton: one program per row, all slots at once, no pointer chasing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.tree_accept import Accepted, Done, Limits
from draftwood.tree import DraftTree, Status, n_words

_SOUND = tl.constexpr(int(Status.SOUND))
_RUNNING = tl.constexpr(int(Done.RUNNING))
_STOP = tl.constexpr(int(Done.STOP))
_LENGTH = tl.constexpr(int(Done.LENGTH))
_CONTEXT = tl.constexpr(int(Done.CONTEXT))
_FAILED = tl.constexpr(int(Done.FAILED))
_NOWHERE = tl.constexpr(0x7FFFFFFF)


def tree_accept(tree: DraftTree, choice: Tensor, limits: Limits, *, max_depth: int) -> Accepted:
    """See `draftwood.kernels.tree_accept.tree_accept`."""
    B, T = choice.shape
    columns = max_depth + 1
    path, emitted = (
        torch.empty(B, columns, dtype=torch.int32, device=choice.device) for _ in ("path", "emitted")
    )
    n_path, bonus, done = (
        torch.empty(B, dtype=torch.int32, device=choice.device) for _ in ("n_path", "bonus", "done")
    )
    if B > 0:
        _accept[(B,)](
            *(tree.tokens, tree.parents, tree.ancestors, tree.n_slots, tree.status, choice),
            *(limits.stop_ids.contiguous(), limits.max_new, limits.context_left),
            *(path, emitted, n_path, bonus, done),
            *(tree.tokens.stride(0), tree.parents.stride(0), *tree.ancestors.stride(), choice.stride(0)),
            *(T, limits.stop_ids.shape[1], columns),
            **_blocks(T, columns),
        )
    return Accepted(path, emitted, n_path, bonus, done)


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`."""
    cases = []
    for T in (32, 128):
        blocks = _blocks(T, 16)
        num_warps = blocks.pop("num_warps")
        sizes = {"tokens_b": T, "parents_b": T, "ancestors_b": T * n_words(T), "ancestors_t": n_words(T)}
        sizes |= {"ancestors_w": 1, "choice_b": T, "T": T, "S": 2, "columns": 16}
        arguments: dict[str, str | int] = {
            n: "*i64" if n == "ancestors" else sizes.get(n, "*i32")
            for n in _accept.arg_names
            if n not in blocks
        }
        cases.append(CompileCase(f"T={T}", _accept, arguments, blocks, num_warps))
    return cases


def _blocks(T: int, columns: int) -> dict[str, int]:
    block = triton.next_power_of_2(T)
    return {
        "W": n_words(T),
        "BLOCK": block,
        "COLUMNS": triton.next_power_of_2(columns),
        "num_warps": 1 if block <= 128 else 4,
    }


@triton.jit
def _accept(
    tokens,  # [B, T]
    parents,
    ancestors,  # [B, T, W]
    n_slots,
    status,
    choice,
    stop_ids,  # [B, S]
    max_new,
    context_left,
    path,  # [B, columns]
    emitted,
    n_path,
    bonus,
    done,
    tokens_b,
    parents_b,
    ancestors_b,
    ancestors_t,
    ancestors_w,
    choice_b,
    T,
    S,
    columns,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    # 32 slots per register, which is the layout of the scattered stores: nothing is moved through shared memory
    slot = tl.max_contiguous(tl.arange(0, BLOCK), 1)
    # all loads are under way before anything waits for one of them
    n = tl.where(tl.load(status + b) == _SOUND, tl.load(n_slots + b), 1)
    token = tl.load(tokens + b * tokens_b + slot, mask=slot < T, other=0)
    parent = tl.load(parents + b * parents_b + slot, mask=slot < T, other=-1)
    chosen = tl.load(choice + b * choice_b + slot, mask=slot < T, other=0)
    most_new = tl.maximum(tl.load(max_new + b), 1)
    most_context = tl.maximum(tl.load(context_left + b), 1)
    needed: tl.tuple = ()
    for w in tl.static_range(W):
        place = ancestors + b * ancestors_b + slot * ancestors_t + w * ancestors_w
        needed += (tl.load(place, mask=slot < T, other=0),)
    stops, ends = slot * 0, slot * 0  # whether the slot's token, or its choice, is a stop token
    for start in range(0, S, 4):
        for s in tl.static_range(4):
            stop = tl.load(stop_ids + b * S + start + s, mask=start + s < S, other=-1)
            stops |= ((stop >= 0) & (token == stop)).to(tl.int32)
            ends |= ((stop >= 0) & (chosen == stop)).to(tl.int32)

    live = (slot < n) & (slot < T)
    has_parent = (parent >= 0) & (parent < T)
    wanted = tl.gather(chosen, tl.where(has_parent, parent, 0), 0)
    match = (slot == 0) | (live & has_parent & (token == wanted))
    accepted = live
    for w in tl.static_range(W):
        accepted &= _within(needed[w].to(tl.int32), match, slot, 2 * w)
        accepted &= _within((needed[w] >> 32).to(tl.int32), match, slot, 2 * w + 1)
    accepted = accepted | (slot == 0)

    # each slot on the path emits one token: the root the bonus, at the end, any other its own, one place earlier
    rank = tl.cumsum(accepted.to(tl.int32), 0) - 1
    accepted = accepted & (rank < columns)
    n_accepted = tl.sum(accepted.to(tl.int32))
    last = tl.max(tl.where(accepted, slot, 0))
    place = tl.where(slot == 0, n_accepted - 1, rank - 1)
    end = tl.sum(tl.where(slot == last, chosen, 0))
    token = tl.where(slot == 0, end, token)
    stops = tl.where(slot == 0, tl.sum(tl.where(slot == last, ends, 0)), stops)

    limit = tl.minimum(most_new, most_context)
    stop = tl.min(tl.where(accepted & (stops > 0) & (place < limit), place, _NOWHERE))
    stopped = stop < _NOWHERE
    n = tl.where(stopped, stop + 1, tl.minimum(n_accepted, limit))
    at_limit = tl.where(most_new <= most_context, _LENGTH, _CONTEXT)
    why = tl.where(n_accepted >= limit, at_limit, _RUNNING)
    why = tl.where((end < 0) & (n_accepted <= limit), _FAILED, why)
    why = tl.where(stopped, _STOP, why)

    tl.store(n_path + b, n)
    tl.store(done + b, why)
    tl.store(bonus + b + slot * 0, token, mask=accepted & (place == n - 1))
    tl.store(path + b * columns + rank, slot, mask=accepted & (rank < n))
    tl.store(emitted + b * columns + place, token, mask=accepted & (place < n))
    column = tl.arange(0, COLUMNS)
    padding = tl.full([COLUMNS], -1, tl.int32)
    tl.store(path + b * columns + column, padding, mask=(column >= n) & (column < columns))
    tl.store(emitted + b * columns + column, padding, mask=(column >= n) & (column < columns))


@triton.jit
def _within(needed, match, slot, word):
    """Whether the slots that 32 bits of ancestors name all match, a slot that belongs to these bits among them."""
    own = tl.where(slot // 32 == word, tl.full(slot.shape, 1, tl.int32) << (slot % 32), 0)
    matches = tl.sum(tl.where(match, own, 0))
    return ((needed & matches) == needed) & ((needed & own) == own)
