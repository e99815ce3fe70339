"""Draft trees the usual way, in a Python loop on the host, timed beside the kernels that do the same on the GPU.

    python benchmarks/ddtree_loop.py --out ddtree_loop.json

The loop is what public DDTree code (arXiv 2604.12989) does between two model passes, written anew: top-k on the GPU, candidates to
the host, a heap of rank tuples, children in dicts, the tree's arrays back to the GPU; and after verification the choices to the host and a
walk through the dicts. Both sides build the same tree from the same candidates. The kernels are timed as a CUDA
graph; the loop waits for the device, so it is timed between events around the whole of it, one request at a time.
"""

from __future__ import annotations

import argparse
import heapq
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwood.bench.device import last_level_cache, origin
from draftwood.bench.stats import compare, summarize, value_of
from draftwood.bench.timers import Call, CpuTimer, CudaTimer, Timer
from draftwood.kernels.topk_logprobs import topk_logprobs
from draftwood.kernels.tree_accept import Limits, tree_accept
from draftwood.kernels.tree_build import tree_build
from draftwood.tree import DraftTree

T, K, V = 64, 32, 163840
DEPTHS = (7, 15)
VISITS, TIMINGS = 15, 5


@dataclass(frozen=True)
class LoopTree:
    tokens: Tensor  # [T] i64
    parents: Tensor  # [T] i64
    depths: Tensor  # [T] i64
    visible: Tensor  # [T, T] bool
    children: list[dict[int, int]]  # per slot: token to slot; stays on the host


def loop_build(logits: Tensor, root: int, slots: int, k: int) -> LoopTree:
    """The tree of one request's logits [D, V], with arrays on the device of `logits`."""
    device, logits = logits.device, logits.float()
    top, index = logits.topk(k, dim=-1)
    lp = (top - logits.logsumexp(-1, keepdim=True)).cpu().numpy()
    ids = index.cpu().numpy()
    D = len(lp)
    tokens, parents, depths = [root], [-1], [0]
    children: list[dict[int, int]] = [{}]
    heap = [(-float(lp[0, 0]), 0, 0, 0)] if D else []  # (-score, parent slot, rank, depth of the parent)
    scores = [0.0]
    while heap and len(tokens) < slots:
        negated, parent, rank, depth = heapq.heappop(heap)
        slot, token = len(tokens), int(ids[depth, rank])
        tokens.append(token)
        parents.append(parent)
        depths.append(depth + 1)
        scores.append(-negated)
        children[parent][token] = slot
        children.append({})
        if rank + 1 < k:
            heapq.heappush(heap, (-(scores[parent] + float(lp[depth, rank + 1])), parent, rank + 1, depth))
        if depth + 1 < D:
            heapq.heappush(heap, (negated - float(lp[depth + 1, 0]), slot, 0, depth + 1))
    visible = np.eye(len(tokens), dtype=np.bool_)
    for slot in range(1, len(tokens)):
        visible[slot, :slot] = visible[parents[slot], :slot]
    arrays = [torch.tensor(a).to(device) for a in (tokens, parents, depths)]
    return LoopTree(arrays[0], arrays[1], arrays[2], torch.from_numpy(visible).to(device), children)


def loop_accept(tree: LoopTree, choice: Tensor) -> tuple[Tensor, int]:
    """The accepted slots, root first, on the device of `choice` [T], and the bonus token."""
    wanted = choice.tolist()
    path = [0]
    while (child := tree.children[path[-1]].get(wanted[path[-1]])) is not None:
        path.append(child)
    return torch.tensor(path, device=choice.device), wanted[path[-1]]


class Contest:
    """One request: the same logits and choices for both sides."""

    def __init__(
        self, D: int, V: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.logits = (4 * torch.randn(1, D, V, generator=generator, device=device)).to(dtype)
        self.root = torch.ones(1, dtype=torch.int32, device=device)
        self.budget = torch.full((1,), T, dtype=torch.int32, device=device)
        self.floor = torch.full((1,), -torch.inf, device=device)
        far = torch.full((1,), 10**6, dtype=torch.int32, device=device)
        self.limits = Limits(torch.zeros((1, 0), dtype=torch.int32, device=device), far, far)
        self.D = D
        self.tree = self.build()
        self.loop_tree = self.loop_build()
        # every choice is a child's token where there is one, so the path is as long as the tree allows
        wanted = [next(iter(c), 0) for c in self.loop_tree.children]
        self.choice = torch.tensor([wanted], dtype=torch.int32, device=device)

    def build(self) -> DraftTree:
        lp, ids = topk_logprobs(self.logits, K)
        tree: DraftTree = tree_build(self.root, lp, ids, self.budget, self.floor, slots=T)
        return tree

    def accept(self) -> Any:
        return tree_accept(self.tree, self.choice, self.limits, max_depth=self.D)

    def loop_build(self) -> LoopTree:
        return loop_build(self.logits[0], 1, T, K)

    def loop_accept(self) -> tuple[Tensor, int]:
        return loop_accept(self.loop_tree, self.choice[0])

    def check(self) -> None:
        """Raise `AssertionError` unless both sides gave the same tree and the same path.

        For float32 logits: bfloat16 ones tie, and `torch.topk` breaks ties as it likes.
        """
        n_slots = int(self.tree.n_slots[0])
        for name in ("tokens", "parents", "depths"):
            ours, loop = getattr(self.tree, name)[0, :n_slots], getattr(self.loop_tree, name)
            assert ours.tolist() == loop.tolist(), f"`{name}` differ"
        accepted, (path, bonus) = self.accept(), self.loop_accept()
        n = int(accepted.n_path[0])
        assert accepted.path[0, :n].tolist() == path.tolist(), "paths differ"
        assert int(accepted.bonus[0]) == bonus, "the bonus differs"


def measure(ours: Call, loop: Call, device: str) -> dict[str, Any]:
    """Both in turns (A B B A): summaries in us, and loop over ours with its interval."""
    timers = [timer(call, device) for call in (ours, loop)]
    visits: list[list[list[float]]] = [[], []]
    for turn in range(VISITS):
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            visits[side].append(timers[side].time(TIMINGS))
    values = [[value_of(v) for v in side] for side in visits]
    ratio = compare(values[1], values[0], paired=True)
    sides = {
        name: {"method": t.setup.method, **asdict(summarize(v)), "timings_us": v}
        for name, t, v in zip(("ours", "loop"), timers, visits, strict=True)
    }
    return {**sides, "ratio": {"median": ratio.ratio, "low": ratio.low, "high": ratio.high}}


def timer(call: Call, device: str) -> Timer:
    if device == "cpu":
        return CpuTimer(call, False, 0)
    return CudaTimer(lambda n: [call] * n, False, last_level_cache(device), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description="The Python loop of draft trees beside draftwood's kernels.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vocabulary", type=int, default=V)
    parser.add_argument("--out", type=Path, default=Path("ddtree_loop.json"))
    arguments = parser.parse_args()
    device = arguments.device
    rows = []
    for D in DEPTHS:
        contest = Contest(D, arguments.vocabulary, device)
        contest.check()
        rounded = Contest(D, arguments.vocabulary, device, torch.bfloat16)
        for what, ours, loop in (
            ("logits to tree", contest.build, contest.loop_build),
            ("bfloat16 logits to tree", rounded.build, rounded.loop_build),
            ("choices to path", contest.accept, contest.loop_accept),
        ):
            result = measure(ours, loop, device)
            rows.append({"what": what, "D": D, "T": T, "K": K, "V": arguments.vocabulary, **result})
            texts = [
                f"{result[s]['median']:.1f} [{result[s]['low']:.1f}, {result[s]['high']:.1f}]"
                for s in ("ours", "loop")
            ]
            ratio = result["ratio"]
            print(
                f"{what}, D={D}: kernels {texts[0]} us, loop {texts[1]} us, "
                f"{ratio['median']:.1f} times [{ratio['low']:.1f}, {ratio['high']:.1f}]"
            )
    arguments.out.write_text(json.dumps({**origin(device), "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
