"""The engine: admits requests, prefills them, runs rounds, hands out what they emit.

It sees requests and their pages, never tensors, text formats or files; the runner does what it decides. One step is one round.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from draftwood.cache.pages import OutOfPagesError, PageAllocator
from draftwood.engine.budget import BudgetController
from draftwood.engine.outputs import RoundRecord, StreamEvent
from draftwood.engine.request import Request
from draftwood.engine.runner import RoundOutcome, Runner
from draftwood.kernels.tree_accept import Done
from draftwood.round import RoundPlan
from draftwood.tree import DraftTree

MAX_CANDIDATES = 32
"""Candidates per depth at most; siblings past this rank practically never pay."""


@dataclass(frozen=True)
class Speculation:
    """How rounds draft. `controller` is set for budget "auto", and then `slots` is the largest tree."""

    slots: int  # root included; 1 is plain decoding
    depth: int
    top_k: int
    controller: BudgetController | None = None

    @classmethod
    def chain(cls, depth: int) -> Speculation:
        return cls(depth + 1, depth, 1)

    @classmethod
    def tree(
        cls, slots: int, depth: int, vocab: int, controller: BudgetController | None = None
    ) -> Speculation:
        if slots == 1:
            return PLAIN
        return cls(slots, min(depth, slots - 1), min(slots - 1, MAX_CANDIDATES, vocab), controller)


PLAIN = Speculation(1, 0, 1)


class Engine:
    """Runs requests in one mode. Rounds are shared by all running requests; a joining one is prefilled first."""

    def __init__(
        self,
        runner: Runner,
        speculation: Speculation,
        allocator: PageAllocator,
        *,
        max_batch: int,
        prefill_chunk: int,
        trace: bool = False,
    ) -> None:
        self.runner, self.speculation, self.allocator = runner, speculation, allocator
        self.page_size, self.max_context = runner.page_size, runner.max_context
        self.max_batch, self.prefill_chunk, self.trace = max_batch, prefill_chunk, trace
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._changed = True  # the runner has not been told of `running` as it is now

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it could never run."""
        if request.n_tokens >= self.max_context:
            raise ValueError(
                f"prompt {request.index} has {request.n_tokens} tokens; the context holds {self.max_context}, "
                "of which at least one is for the output"
            )
        n_pages = self._pages_needed(request)
        if n_pages > self.allocator.n_pages:
            raise ValueError(
                f"prompt {request.index} needs {n_pages} cache pages with its max_new_tokens; "
                f"the pool has {self.allocator.n_pages}"
            )
        self.waiting.append(request)

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[StreamEvent]:
        """Admit what fits, then run one round for all running requests."""
        self._admit()
        if not self.running:
            raise OutOfPagesError(
                f"no request can be admitted: {self.allocator.n_free} of {self.allocator.n_pages} pages are free"
            )
        if self._changed:
            self.runner.begin([request.row() for request in self.running])
            self._changed = False
        plan = self._plan()
        outcome = self.runner.round(plan, trace=self.trace)
        self._learn(plan, outcome)
        events = self._deliver(outcome)
        self._retire()
        return events

    def abort(self) -> None:
        """Drop every request and give their pages back."""
        self._release(self.running)
        self.waiting.clear()
        self.running, self._changed = [], True

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is free or owned by a running request."""
        self.allocator.check_integrity(request.pages for request in self.running)

    # admission

    def _pages_needed(self, request: Request) -> int:
        """Pages for all positions the request can ever commit: every token but the last."""
        tokens = min(len(request.output.prompt_token_ids) + request.params.max_new_tokens, self.max_context)
        return -(-(tokens - 1) // self.page_size)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            n_pages = self._pages_needed(request)
            if n_pages > self.allocator.n_free:
                break
            self.waiting.popleft()
            request.pages = self.allocator.take(n_pages)
            self.running.append(request)
            self._changed = True
            if self.speculation.controller is not None:
                self.speculation.controller.restart()
            started = time.perf_counter()
            self._prefill(request)
            request.output.prefill_seconds = time.perf_counter() - started

    def _prefill(self, request: Request) -> None:
        """Fill pages and drafter context with all prompt tokens but the last, which is the first root."""
        tokens = request.output.prompt_token_ids[:-1]
        for start in range(0, len(tokens), self.prefill_chunk):
            self.runner.prefill(tokens[start : start + self.prefill_chunk], start, request.pages)

    # rounds

    def _plan(self) -> RoundPlan:
        s = self.speculation
        if s.controller is None:
            return RoundPlan(s.slots, s.depth, s.top_k)
        if not s.controller.wants_draft():
            return RoundPlan(1, 0, 1)
        depth, slots = s.controller.plan(s.slots)
        return RoundPlan(slots, depth, min(s.top_k, slots - 1), prune=partial(_prune, s.controller, depth))

    def _deliver(self, outcome: RoundOutcome) -> list[StreamEvent]:
        events = []
        for request, row in zip(self.running, outcome.rows, strict=True):
            record = RoundRecord(
                slots=row.slots,
                padded_slots=outcome.padded_slots,
                accepted=len(row.emitted) - (row.done != Done.FAILED),
                emitted=len(row.emitted),
                batch=len(outcome.rows),
                expected=row.expected,
                seconds=outcome.seconds,
                trace=row.trace,
            )
            events.append(request.push(row.emitted, row.done, record, row.logprobs))
        return events

    def _learn(self, plan: RoundPlan, outcome: RoundOutcome) -> None:
        """Tell the budget controller what the round cost and what was accepted; rows cut short teach nothing."""
        controller = self.speculation.controller
        if controller is None:
            return
        controller.observe_cost(len(outcome.rows) * outcome.padded_slots, outcome.seconds)
        going = [row for row in outcome.rows if row.done == Done.RUNNING]
        if outcome.padded_slots > 1 and going:
            accepted = sum(len(row.emitted) - 1 for row in going)
            promised = sum(row.expected - 1 for row in going)
            controller.observe_draft(promised, accepted, plan.depth, outcome.seconds)

    def _retire(self) -> None:
        finished = [r for r in self.running if r.finished]
        if finished:
            self._release(finished)
            self.running = [r for r in self.running if not r.finished]
            self._changed = True

    def _release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.allocator.release(request.pages)
            request.pages = []


def _prune(controller: BudgetController, depth: int, tree: DraftTree) -> DraftTree:
    """Keep the slots that pay, and no more than the largest tree has."""
    live = tree.truncated(int(tree.n_slots.max()))
    return live if live.T == 1 else live.truncated(controller.pick(live, depth))
