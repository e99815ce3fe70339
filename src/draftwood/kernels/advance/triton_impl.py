"""advance in Triton: a program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.tree_accept import Accepted, Done
from draftwood.kernels.triton_rows import check_contiguous
from draftwood.tree import DraftTree

_RUNNING = tl.constexpr(int(Done.RUNNING))


def advance(
    root: Tensor,
    prefix_len: Tensor,
    max_new: Tensor,
    context_left: Tensor,
    live: Tensor,
    tree: DraftTree,
    accepted: Accepted,
) -> Tensor:
    """See `draftwood.kernels.advance.advance`. Raises `ValueError` where what is written is not contiguous."""
    moved = {"root": root, "prefix_len": prefix_len, "max_new": max_new, "context_left": context_left}
    check_contiguous(**moved, live=live)
    (B, T), C = tree.tokens.shape, accepted.path.shape[1]
    table = torch.empty((B, 2 + 2 * C + 4 * T), dtype=torch.int32, device=root.device)
    slots = (tree.tokens, tree.parents, tree.depths, tree.scores.view(torch.int32))
    if B > 0:
        _advance[(B,)](
            *(*moved.values(), live),
            *(x.contiguous() for x in (accepted.done, accepted.n_path, accepted.bonus, tree.n_slots)),
            *(x.contiguous() for x in (accepted.emitted, accepted.path, *slots)),
            *(table, C, T),
            **_blocks(C, T),
            num_warps=1,
        )
    return table


def _blocks(C: int, T: int) -> dict[str, int]:
    return {"COLUMNS": triton.next_power_of_2(C), "SLOTS": triton.next_power_of_2(T)}


@triton.jit(do_not_specialize=["C", "T"])
def _advance(
    root,  # [B], and so the next eight
    prefix_len,
    max_new,
    context_left,
    live,
    done,
    n_path,
    bonus,
    n_slots,
    emitted,  # [B, C]
    path,
    tokens,  # [B, T]
    parents,
    depths,
    scores,
    table,  # [B, 2 + 2 C + 4 T]
    C,
    T,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    c, t = tl.arange(0, COLUMNS), tl.arange(0, SLOTS)
    in_path, in_tree = c < C, t < T
    # all loads are under way before anything waits for one of them
    why, slots, n, newest = tl.load(done + b), tl.load(n_slots + b), tl.load(n_path + b), tl.load(bonus + b)
    was_live = tl.load(live + b)
    length, left, room = tl.load(prefix_len + b), tl.load(max_new + b), tl.load(context_left + b)
    out_of_path = tl.load(emitted + b * C + c, mask=in_path)
    of_path = tl.load(path + b * C + c, mask=in_path)
    token = tl.load(tokens + b * T + t, mask=in_tree)
    parent = tl.load(parents + b * T + t, mask=in_tree)
    depth = tl.load(depths + b * T + t, mask=in_tree)
    score = tl.load(scores + b * T + t, mask=in_tree)

    row = table + b * (2 + 2 * C + 4 * T)
    tl.store(row, why)
    tl.store(row + 1, slots)
    tl.store(row + 2 + c, out_of_path, mask=in_path)
    tl.store(row + 2 + C + c, of_path, mask=in_path)
    row += 2 + 2 * C
    tl.store(row + t, token, mask=in_tree)
    tl.store(row + T + t, parent, mask=in_tree)
    tl.store(row + 2 * T + t, depth, mask=in_tree)
    tl.store(row + 3 * T + t, score, mask=in_tree)
    goes_on = (was_live != 0) & (why == _RUNNING)
    tl.store(live + b, goes_on)
    tl.store(root + b, newest, mask=goes_on)
    tl.store(prefix_len + b, length + n, mask=goes_on)
    tl.store(max_new + b, left - n, mask=goes_on)
    tl.store(context_left + b, room - n, mask=goes_on)


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`."""
    constexprs = _blocks(8, 128)
    arguments: dict[str, str | int] = {n: "*i32" for n in _advance.arg_names if n not in constexprs}
    arguments |= {"live": "*i1", "C": "i32", "T": "i32"}
    return [CompileCase("T=128", _advance, arguments, constexprs, num_warps=1)]
