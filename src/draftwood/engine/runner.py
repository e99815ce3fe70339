"""The device side of the engine: holds a batch's state, and executes what the engine has decided.

It knows rows and tensors, never requests, text or policy. Every call is a plain message, numbers in and numbers out, so
that ranks of a tensor-parallel engine can be sent the same ones.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from draftwood.engine.batch import build_state
from draftwood.engine.moments import Span, now
from draftwood.engine.placed import on_device
from draftwood.engine.report import RoundReport, RowResult, TokenScores, most_logprobs, row_results
from draftwood.engine.row import Row
from draftwood.engine.sampling_params import SamplingParams
from draftwood.models.layers import ramp
from draftwood.models.target import TreeBatch
from draftwood.round import RoundPlan, RoundState, Stages, build, decode_round, draft
from draftwood.scores import ScoreRule, Scoring
from draftwood.tree import DraftTree, from_parents, root_only


@dataclass(frozen=True)
class RoundOutcome:
    """What a round did, on the host."""

    rows: list[RowResult]
    padded_slots: int
    """T, of every row."""
    seconds: dict[str, float]
    """Wall time per stage; one entry `replay` where they cannot be told apart."""
    chances: np.ndarray
    """[B, T] f32, exp of the scores of the trees' slots: 1 for roots, 0 at inert ones."""


@dataclass(frozen=True)
class Digest:
    sha256: torch.Tensor  # [32] u8


class Runner:
    """Runs prefill chunks and rounds over the pages of its stages.

    Of several ranks each makes the same calls. So which collectives a call runs must follow from its arguments and from
    what is the same everywhere, never from clocks or chance.
    """

    recovers = True
    """Whether it can go on after a call that ran out of memory."""
    ahead = 0
    """Rounds that may be launched while the results of an earlier one are not known; 0 if a round is waited for."""

    def __init__(self, stages: Stages, *, page_size: int, max_context: int, device: str) -> None:
        self.stages, self.page_size, self.max_context, self.device = stages, page_size, max_context, device
        self.begun = 0
        """Batches begun so far."""
        self._rows: list[Row] = []
        self._logprobs: int | None = None  # log-probabilities that serve all rows
        self._state: RoundState | None = None

    def prefill(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> Span:
        """Fill pages and drafter context at positions start, start + 1, ... of one request with these tokens.

        `pages` are the request's from position 0 on; what lies before `start` is in them already. Returns when it ran.
        """
        began, device = now(self.device), self.device
        slots, table, prefix = (
            torch.tensor([numbers], dtype=torch.int32, device=device) for numbers in (tokens, pages, [start])
        )
        line = chain(len(tokens)).torch(device)
        self._fill(slots, table, prefix[0], line, line.n_slots)
        return Span(began, now(device))

    def _fill(
        self,
        tokens: torch.Tensor,  # [1, T] i32
        page_table: torch.Tensor,  # [1, M] i32
        start: torch.Tensor,  # [1] i32
        line: DraftTree,  # a chain of T slots
        count: torch.Tensor,  # [1] i32, tokens that are real
    ) -> None:
        stages = self.stages
        taps = stages.drafting.taps if stages.drafting else ()
        batch = TreeBatch(page_table, start, line.ancestors, count)
        pages = stages.latents.pages
        output = stages.target(tokens, line.depths, pages, batch, taps)
        stages.kernels.commit_kv(pages, output.latents, page_table, start, line.depths, count)
        if stages.drafting is not None:
            every = ramp(tokens.shape[1], tokens.device)[None]
            features = stages.kernels.path_features(output.taps, every)
            stages.drafting.extend(features, page_table, start, count)

    def copy_page(self, source: int, target: int) -> None:
        """Give page `target` all that page `source` holds: latents and drafter context."""
        self.settle()
        self.stages.latents.copy_page(source, target)
        if self.stages.drafting is not None:
            self.stages.drafting.copy_page(source, target)

    def begin(self, rows: Sequence[Row]) -> None:
        """Decode these rows from the next round on."""
        self.settle()
        self.begun += 1
        self._rows, self._logprobs = list(rows), most_logprobs(rows)
        state = self._state_of(self._rows, max_pages=-(-self.max_context // self.page_size))
        self._state = on_device(state, self.device)

    def settle(self) -> None:
        """Bring the features of plain rounds into the drafter's context, while the pages they belong to are their rows'."""
        if self.stages.drafting is not None:
            self.stages.drafting.catch_up()

    def set_pages(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """Rows of the batch have got more pages: (row, column of its page table, page)."""
        if self._state is None:
            raise RuntimeError("no batch has begun")
        told = torch.tensor(entries)
        if self.device.startswith("cuda"):
            told = told.pin_memory()  # from other memory the copy would wait for the rounds in flight
        rows, columns, pages = told.to(self.device, non_blocking=True).T
        self._state.page_table[rows, columns] = pages.int()

    def round(self, plan: RoundPlan, *, trace: bool = False) -> RoundOutcome:
        """Run one round and wait for its results; needs a `begin` before it."""
        if self._state is None:
            raise RuntimeError("no batch has begun")
        timer = StageTimer(self.device)
        result = decode_round(self.stages, self._state, plan, timer)
        with timer("accept"):
            k = self._logprobs
            scores = None if k is None else TokenScores.of(self.stages, result, k)
            report = RoundReport(result.table.cpu(), result.tree.T)
            rows, chances = row_results(self._rows, report, scores, trace=trace)
        return RoundOutcome(rows, result.tree.T, timer.seconds, chances)

    def check_ranks_agree(self) -> None:
        """Raise AssertionError unless all ranks have the same latents in their pages, bit for bit."""
        pages = self.stages.latents.pages
        digest = hashlib.sha256(pages.cpu().view(torch.uint8).numpy().tobytes()).digest()
        own = Digest(torch.tensor(list(digest), dtype=torch.uint8, device=pages.device))
        for rank, other in enumerate(self.stages.target.ranks.gather(own)):
            if not torch.equal(other.sha256, own.sha256):
                raise AssertionError(f"rank {rank} has other latents in its pages")

    def time_target(self, rows: int) -> float:
        """Seconds of a target pass over `rows` independent roots with an empty prefix."""
        stages = self.stages
        tree = root_only([0] * rows).torch(self.device)
        table = torch.zeros(rows, 1, dtype=torch.int32, device=self.device)
        batch = TreeBatch(table, torch.zeros_like(tree.n_slots), tree.ancestors, tree.n_slots)

        def run() -> None:
            output = stages.target(tree.tokens, tree.depths, stages.latents.pages, batch, ())
            stages.target.logits(output.hidden)

        return self._best_of_three(run)

    def time_draft(self, plan: RoundPlan) -> float:
        """Seconds of drafting and building as `plan` says, for one greedy request without a prefix."""
        row = Row([0], [], [], 0, SamplingParams(), ())
        state = on_device(self._state_of([row], max_pages=1), self.device)
        return self._best_of_three(lambda: build(self.stages, state, plan, *draft(self.stages, state, plan)))

    def _state_of(self, rows: Sequence[Row], max_pages: int) -> RoundState:
        """The state that rows begin with, on the host."""
        state = build_state(
            rows,
            max_pages=max_pages,
            max_context=self.max_context,
            vocab_size=self.stages.target.slice.padded,
        )
        drafting, coupled = self.stages.drafting, self.stages.noise_coupled
        if drafting is not None:
            temperatures = tuple(row.params.temperature for row in rows)
            state.scoring = _scoring(drafting.rule, temperatures, drafting.max_depth, coupled)
        return state

    def _best_of_three(self, run: Callable[[], object]) -> float:
        best = float("inf")
        for _ in range(3):
            started = time.perf_counter()
            run()
            if self.device.startswith("cuda"):
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - started)
        return best


class StageTimer:
    """Wall seconds per stage name, adding up over repeated uses; waits for the device on CUDA."""

    def __init__(self, device: str) -> None:
        self._wait: Callable[[], None] = torch.cuda.synchronize if device.startswith("cuda") else _nothing
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._wait()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started


def _nothing() -> None:
    return None


@lru_cache(maxsize=32)
def _scoring(rule: ScoreRule, temperatures: tuple[float, ...], depth: int, coupled: bool) -> Scoring:
    """Of rows of these temperatures, on the host; nobody writes it."""
    with torch.inference_mode(False):
        return rule.at(torch.tensor(temperatures), depth, coupled=coupled)


@lru_cache(maxsize=8)
def chain(size: int) -> DraftTree:
    """A chain of `size` slots: how a prefill chunk looks to the target."""
    parents = np.arange(-1, size - 1)[None]
    return from_parents(np.zeros((1, size)), parents, [size])
