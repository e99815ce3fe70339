"""The engine: has the runner do what the scheduler decides, and hands out what requests emit.

It sees requests and their pages, never tensors, text formats or files. A step is some prefill and one round.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from draftwood.cache.pages import OutOfPagesError
from draftwood.cache.prefix import PrefixCache
from draftwood.engine.buckets import BucketController
from draftwood.engine.budget import BudgetController
from draftwood.engine.graphs import Flight, GraphRunner, padded_batch
from draftwood.engine.moments import Span
from draftwood.engine.outputs import RoundRecord, StreamEvent
from draftwood.engine.report import RowResult
from draftwood.engine.request import Request
from draftwood.engine.runner import RoundOutcome, Runner
from draftwood.engine.scheduler import Copy, Prefill, Scheduler
from draftwood.kernels.tree_accept import Done
from draftwood.round import RoundPlan
from draftwood.tree import DraftTree

log = logging.getLogger(__name__)

MAX_CANDIDATES = 32
"""Candidates per depth at most; siblings past this rank practically never pay."""


Controller = BudgetController | BucketController
"""Of budget "auto": the first sees each tree before it decides, the second must know the size of a round before it runs."""


@dataclass(frozen=True)
class Speculation:
    """How rounds draft. `controller` is set for budget "auto", and then `slots` is the largest tree."""

    slots: int  # root included; 1 is plain decoding
    depth: int
    top_k: int
    controller: Controller | None = None

    @classmethod
    def chain(cls, depth: int) -> Speculation:
        return cls(depth + 1, depth, 1)

    @classmethod
    def tree(cls, slots: int, depth: int, vocab: int, controller: Controller | None = None) -> Speculation:
        if slots == 1:
            return PLAIN
        return cls(slots, min(depth, slots - 1), min(slots - 1, MAX_CANDIDATES, vocab), controller)

    def plan(self, slots: int) -> RoundPlan:
        """A round of at most this many slots."""
        if slots == 1:
            return PLAIN_ROUND
        return RoundPlan(slots, min(self.depth, slots - 1), min(self.top_k, slots - 1))


PLAIN = Speculation(1, 0, 1)
PLAIN_ROUND = RoundPlan(1, 0, 1)


@dataclass(frozen=True)
class Launched:
    """A round in flight."""

    batch: list[Request]
    plan: RoundPlan
    flight: Flight


class Engine:
    """Runs requests in one mode, all of them together; new ones may come and old ones go between any two steps.

    Not thread-safe: one thread at a time may call `add`, `cancel`, `step` and `abort`. Several engines may take turns on
    one `cache`; each can only make room among its own requests.
    """

    def __init__(
        self,
        runner: Runner,
        speculation: Speculation,
        cache: PrefixCache,
        *,
        max_batch: int,
        prefill_chunk: int,
        prefill_budget: int,
        trace: bool = False,
    ) -> None:
        self.runner, self.speculation, self.cache, self.trace = runner, speculation, cache, trace
        self._replays = cast(GraphRunner, runner) if runner.ahead else None
        self.scheduler = Scheduler(
            cache,
            "plain" if runner.stages.drafting is None else "drafted",
            max_batch=max_batch,
            max_context=runner.max_context,
            lookahead=2 * (speculation.depth + 1),
            chunk=prefill_chunk,
            budget=prefill_budget,
        )
        self._tables: list[list[int]] = []  # the requests' lists of pages that the runner has as rows
        self._shown: list[tuple[int, int]] = []  # which lists these are, and how long they were
        self._begun = -1  # the runner's `begun` of that batch
        self._flying: deque[Launched] = deque()
        self._prefilled: list[tuple[Request, Span]] = []  # whose time is not in their outputs yet
        self._in_step = False

    def add(self, request: Request) -> None:
        """Queue a request, with its further samples. Raises ValueError if it could never run, or has been here before."""
        if request.arrival >= 0:
            raise ValueError(f"prompt {request.index}: the request has been added before; make a new one")
        limit = self.scheduler.max_context
        if request.n_tokens >= limit:
            raise ValueError(
                f"prompt {request.index} has {request.n_tokens} tokens; the context holds {limit}, "
                "of which at least one is for the output"
            )
        n_pages, pool = self.scheduler.pages_at_most(request), self.cache.allocator.n_pages
        if n_pages > pool:
            raise ValueError(
                f"prompt {request.index} needs {n_pages} cache pages with its max_new_tokens; the pool has {pool}"
            )
        self.scheduler.add(request)

    def cancel(self, request: Request) -> None:
        """End a request wherever it stands, unless it has ended; its pages are free at once.

        Its other samples go on. No event tells of it. Raises ValueError if it was never added.
        """
        if request.arrival < 0:
            raise ValueError(
                f"prompt {request.index}: the request has not been added, and cannot be cancelled"
            )
        if not request.finished:
            request.output.finish_reason = "cancelled"
            self.scheduler.leave(request)

    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.active)

    @torch.inference_mode()
    def step(self) -> list[StreamEvent]:
        """Admit what fits, prefill some, start one round for all requests that are ready for it.

        Returns an event for each request in the rounds whose results are due: this one's, or the one's before where the
        runner works ahead. None while everything is being prefilled, or if there is no work.
        A request for which memory does not suffice ends with an event that says so; of a round, the youngest. With several
        ranks that is an error like others: see docs/parallel.md.
        Raises `OutOfPagesError` if nothing can be done since other engines hold the pages; that may be tried again. After any
        other error, `abort`: until then a step raises RuntimeError.
        """
        if self._in_step:
            raise RuntimeError(
                "an earlier step of this engine failed, and what its requests hold is in doubt: abort it first"
            )
        self._in_step = True
        events: list[StreamEvent] = []
        step = None
        if self._flying:
            if self._is_shown() and not self._is_last(self._flying[-1]):
                step = self.scheduler.again(self._flying[-1].batch)
            if step is None:
                events = self._land(0)
        self._in_step = False
        step = step or self.scheduler.step()
        if not step.batch and not step.work and not events and self.has_work():
            raise OutOfPagesError(
                f"no request can be admitted: {self.cache.n_available} of "
                f"{self.cache.allocator.n_pages} pages are free, other engines hold the rest"
            )
        self._in_step = True
        for work in step.work:
            if isinstance(work, Copy):
                self.runner.copy_page(work.source, work.target)
            elif not work.request.finished:
                events += self._prefill(work)
        if batch := [request for request in step.batch if not request.finished]:
            events += self._round(batch)
        if not self.scheduler.active:
            events += self._land(0)
        self._in_step = False
        return events

    def abort(self) -> None:
        """Cancel every request. After an error in a step, nothing that they hold is reused."""
        self._flying.clear()  # what they still write comes before what anyone will write
        self._prefilled.clear()
        for request in self.scheduler.requests():
            request.output.finish_reason = "cancelled"
            self.scheduler.leave(request, sound=not self._in_step)
        self._in_step = False

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is free, cached, or a running request's, and counted right."""
        self.cache.check_integrity(request.pages for request in self.scheduler.active)

    def _prefill(self, work: Prefill) -> list[StreamEvent]:
        """Events of those that end for want of memory."""
        request = work.request
        try:
            span = self.runner.prefill(request.tokens(work.start, work.stop), work.start, request.pages)
        except (RuntimeError, MemoryError) as e:
            error = self._want_of_memory(e, f"prefilling positions {work.start} to {work.stop - 1}")
            forked = [
                one for one in self.scheduler.active if one.source is request and not one.output.token_ids
            ]
            return [self._fail(one, error) for one in (request, *forked)]
        going = [(other, earlier) for other, earlier in self._prefilled if not other.finished]
        self._prefilled = [*going, (request, span)]
        return []

    def _fail(self, request: Request, error: str) -> StreamEvent:
        self.scheduler.leave(request)
        return request.fail(error)

    def _want_of_memory(self, e: Exception, what: str) -> str:
        """What is to be said of an error for want of memory; others are raised."""
        if not (self.runner.recovers and is_out_of_memory(e)):
            raise e
        log.warning("out of memory while %s", what, exc_info=e)
        return f"out of memory while {what}: {str(e).partition(chr(10))[0]}"

    # rounds

    def _round(self, batch: list[Request]) -> list[StreamEvent]:
        """Start a round of the batch; events of those whose results are due."""
        try:
            self._show(batch)
            plan = self._plan(len(batch))
            if self._replays is None:
                outcome = self.runner.round(plan, trace=self.trace)
            else:
                self._flying.append(Launched(batch, plan, self._replays.launch(plan)))
        except (RuntimeError, MemoryError) as e:
            error = self._want_of_memory(e, f"decoding {len(batch)} requests together")
            self._begun = -1  # the state may be anything
            events = self._land(0)
            youngest = [request for request in batch if not request.finished][-1:]
            return events + [self._fail(request, error) for request in youngest]
        return self._book(batch, plan, outcome) if self._replays is None else self._land(self._replays.ahead)

    def _land(self, left: int) -> list[StreamEvent]:
        """Wait for the oldest rounds in flight until no more than `left` are; not for those of requests that have all ended."""
        events: list[StreamEvent] = []
        while self._replays is not None and len(self._flying) > left:
            oldest = self._flying.popleft()
            if all(request.finished for request in oldest.batch):
                continue  # what it still writes comes before what anyone will write
            outcome = self._replays.collect(oldest.flight, trace=self.trace)
            events += self._book(oldest.batch, oldest.plan, outcome)
        return events

    def _is_last(self, launched: Launched) -> bool:
        """Whether every request may well end in this round by its length, so that another one launched now would be in vain.

        It may bring D + 1 tokens, and is taken to bring no more than twice what rounds of the request have brought so far.
        """
        most = launched.plan.depth + 1
        return all(
            self.scheduler.left(request) <= min(most, 2 * request.output.tokens_per_round or most)
            for request in launched.batch
        )

    def _book(self, batch: list[Request], plan: RoundPlan, outcome: RoundOutcome) -> list[StreamEvent]:
        """What a round did, for the requests that had not ended before it did."""
        for request, span in self._prefilled:  # before the round, so this waits for nothing
            request.output.prefill_seconds += span.seconds()
        self._prefilled.clear()
        self._learn(batch, plan, outcome)
        return [
            self._deliver(request, row, outcome)
            for request, row in zip(batch, outcome.rows, strict=True)
            if not request.finished
        ]

    def _is_shown(self) -> bool:
        """Whether the runner has this engine's last batch, and not that of another."""
        return self.runner.begun == self._begun

    def _show(self, batch: list[Request]) -> None:
        """Let the runner know the batch: all of it if a request came or went, else the pages that are new."""
        shown = [(id(request.pages), len(request.pages)) for request in batch]
        if not self._is_shown():
            self._shown = []
        if shown == self._shown:
            return
        before, self._shown = self._shown, shown
        self._tables = [request.pages for request in batch]  # kept, so that no new list gets an old one's id
        if [table for table, _ in before] == [table for table, _ in shown]:
            entries = [
                (row, column, page)
                for row, (request, (_, known)) in enumerate(zip(batch, before, strict=True))
                for column, page in enumerate(request.pages[known:], known)
            ]
            self.runner.set_pages(entries)
            return
        controller = self.speculation.controller
        if controller is not None and not all(request.output.rounds for request in batch):
            controller.restart()
        self.runner.begin([request.row() for request in batch])
        self._begun = self.runner.begun

    def _plan(self, batch: int) -> RoundPlan:
        s = self.speculation
        if s.controller is None:
            return s.plan(s.slots)
        if isinstance(s.controller, BucketController):
            return s.plan(s.controller.pick(padded_batch(batch)))
        if not s.controller.wants_draft():
            return PLAIN_ROUND
        depth, slots = s.controller.plan(s.slots)
        return RoundPlan(slots, depth, min(s.top_k, slots - 1), prune=partial(_prune, s.controller, depth))

    def _deliver(self, request: Request, row: RowResult, outcome: RoundOutcome) -> StreamEvent:
        emitted = len(row.emitted)
        record = RoundRecord(
            slots=row.slots,
            padded_slots=outcome.padded_slots,
            accepted=emitted - (row.done != Done.FAILED),
            emitted=emitted,
            batch=len(outcome.rows),
            expected=row.expected,
            seconds=outcome.seconds,
            trace=row.trace,
        )
        try:
            event = request.push(row.emitted, row.done, record, row.logprobs)
        except Exception as e:  # whatever its text stumbles over is no reason for others to end
            log.exception("prompt %d, sample %d", request.index, request.output.sample)
            event = request.fail(f"its tokens could not be made text: {type(e).__name__}: {e}")
        else:
            if row.done != Done.FAILED:  # a row that is done stands still, in the round after it too
                flying = any(request in launched.batch for launched in self._flying)
                self.scheduler.advance(request, repeated=row.done != Done.RUNNING and flying)
        if request.finished:
            self.scheduler.leave(request, sound=row.done != Done.FAILED)
        return event

    def _learn(self, batch: list[Request], plan: RoundPlan, outcome: RoundOutcome) -> None:
        """Tell the budget controller what the round cost and what was accepted; rows cut short teach nothing."""
        controller = self.speculation.controller
        if controller is None:
            return
        going = [
            i
            for i, (request, row) in enumerate(zip(batch, outcome.rows, strict=True))
            if row.done == Done.RUNNING and not request.finished
        ]
        accepted = [len(outcome.rows[i].emitted) - 1 for i in going]
        if isinstance(controller, BucketController):
            size = padded_batch(len(batch))
            chances = outcome.chances[going]
            controller.observe(size, plan.slots, outcome.seconds["replay"], chances, accepted)
            return
        controller.observe_cost(len(outcome.rows) * outcome.padded_slots, outcome.seconds)
        if outcome.padded_slots > 1 and going:
            promised = sum(outcome.rows[i].expected - 1 for i in going)
            controller.observe_draft(promised, sum(accepted), plan.depth, outcome.seconds)


def is_out_of_memory(e: BaseException) -> bool:
    """On a CPU, torch says so in words only."""
    return isinstance(e, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(e)


def _prune(controller: BudgetController, depth: int, tree: DraftTree) -> DraftTree:
    """Keep the slots that pay, and no more than the largest tree has."""
    live = tree.truncated(int(tree.n_slots.max()))
    return live if live.T == 1 else live.truncated(controller.pick(live, depth))
