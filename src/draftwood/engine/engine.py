"""The engine: admits requests, prefills them, runs rounds, hands out what they emit.

It sees requests and device state, never text formats or files. One step is one round.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import torch

from draftwood.cache.pages import OutOfPagesError, PageAllocator
from draftwood.engine.batch import HostResult, build_state, to_host
from draftwood.engine.budget import BudgetController
from draftwood.engine.outputs import RoundRecord, StreamEvent, TokenLogprob, TracedTree
from draftwood.engine.request import Request
from draftwood.kernels.tree_accept import Done
from draftwood.models.target import TreeBatch
from draftwood.round import RoundPlan, RoundResult, RoundState, Stages, decode_round
from draftwood.tree import DraftTree, from_parents

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
        stages: Stages,
        speculation: Speculation,
        allocator: PageAllocator,
        *,
        page_size: int,
        max_context: int,
        max_batch: int,
        prefill_chunk: int,
        device: str,
        trace: bool = False,
    ) -> None:
        self.stages, self.speculation, self.allocator = stages, speculation, allocator
        self.page_size, self.max_context, self.max_batch = page_size, max_context, max_batch
        self.prefill_chunk, self.device, self.trace = prefill_chunk, device, trace
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._state: RoundState | None = None

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
        if self._state is None:
            self._state = build_state(
                self.running,
                max_pages=-(-self.max_context // self.page_size),
                max_context=self.max_context,
                vocab_size=self.stages.target.config.vocab_size,
                device=self.device,
            )
        plan = self._plan()
        timer = StageTimer(self.device)
        result = decode_round(self.stages, self._state, plan, timer)
        with timer("accept"):
            host = to_host(result)
            logprobs = _logprobs(self.stages, self.running, result, host)
        events = self._deliver(plan, result, host, logprobs, timer.seconds)
        self._retire()
        return events

    def abort(self) -> None:
        """Drop every request and give their pages back."""
        self._release(self.running)
        self.waiting.clear()
        self.running, self._state = [], None

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
            self._state = None
            if self.speculation.controller is not None:
                self.speculation.controller.restart()
            started = time.perf_counter()
            self._prefill(request)
            request.output.prefill_seconds = time.perf_counter() - started

    def _prefill(self, request: Request) -> None:
        """Fill pages and drafter context with all prompt tokens but the last, which is the first root."""
        tokens = torch.tensor([request.output.prompt_token_ids[:-1]], dtype=torch.int32, device=self.device)
        table = torch.tensor([request.pages], dtype=torch.int32, device=self.device)
        stages, taps = self.stages, self.stages.drafting.taps if self.stages.drafting else ()
        for start in range(0, tokens.shape[1], self.prefill_chunk):
            chunk = tokens[:, start : start + self.prefill_chunk]
            size = chunk.shape[1]
            chain = _chain(size).torch(self.device)
            prefix = torch.tensor([start], dtype=torch.int32, device=self.device)
            batch = TreeBatch(table, prefix, chain.ancestors, chain.n_slots)
            output = stages.target(chunk, start + chain.depths, stages.latents.pages, batch, taps)
            stages.kernels.commit_kv(
                stages.latents.pages, output.latents, table, prefix, chain.depths, chain.n_slots
            )
            if stages.drafting is not None:
                stages.drafting.extend(output.features, table, prefix, chain.n_slots)

    # rounds

    def _plan(self) -> RoundPlan:
        s = self.speculation
        if s.controller is None:
            return RoundPlan(s.slots, s.depth, s.top_k)
        if not s.controller.wants_draft():
            return RoundPlan(1, 0, 1)
        depth, slots = s.controller.plan(s.slots)
        return RoundPlan(slots, depth, min(s.top_k, slots - 1), prune=partial(_prune, s.controller, depth))

    def _deliver(
        self,
        plan: RoundPlan,
        result: RoundResult,
        host: HostResult,
        logprobs: list[list[TokenLogprob] | None],
        seconds: dict[str, float],
    ) -> list[StreamEvent]:
        tree, batch = result.tree, len(self.running)
        promised = tree.scores.exp().sum(1).tolist()  # inert slots score -inf
        self._learn(plan, tree, promised, host, seconds)
        events = []
        for row, request in enumerate(self.running):
            tokens, n = host.emitted[row], host.n_slots[row]
            record = RoundRecord(
                slots=n,
                padded_slots=tree.T,
                accepted=len(tokens) - (host.done[row] != Done.FAILED),
                emitted=len(tokens),
                batch=batch,
                expected=promised[row],
                seconds=seconds,
            )
            if self.trace:
                traced = TracedTree(
                    tree.tokens[row, :n].tolist(),
                    tree.parents[row, :n].tolist(),
                    tree.scores[row, :n].tolist(),
                    [slot for slot in result.accepted.path[row].tolist() if slot >= 0],
                    tokens,
                )
                record = replace(record, trace=traced)
            events.append(request.push(tokens, host.done[row], record, logprobs[row]))
        return events

    def _learn(
        self,
        plan: RoundPlan,
        tree: DraftTree,
        promised: list[float],
        host: HostResult,
        seconds: dict[str, float],
    ) -> None:
        """Tell the budget controller what the round cost and what was accepted; rows cut short teach nothing."""
        controller = self.speculation.controller
        if controller is None:
            return
        controller.observe_cost(tree.B * tree.T, seconds)
        going = [row for row, done in enumerate(host.done) if done == Done.RUNNING]
        if tree.T > 1 and going:
            accepted = sum(len(host.emitted[row]) - 1 for row in going)
            controller.observe_draft(sum(promised[row] - 1 for row in going), accepted, plan.depth, seconds)

    def _retire(self) -> None:
        finished = [r for r in self.running if r.finished]
        if finished:
            self._release(finished)
            self.running = [r for r in self.running if not r.finished]
            self._state = None

    def _release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.allocator.release(request.pages)
            request.pages = []


def _prune(controller: BudgetController, depth: int, tree: DraftTree) -> DraftTree:
    """Keep the slots that pay, and no more than the largest tree has."""
    live = tree.truncated(int(tree.n_slots.max()))
    return live if live.T == 1 else live.truncated(controller.pick(live, depth))


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


@lru_cache(maxsize=8)
def _chain(size: int) -> DraftTree:
    """A chain of `size` slots: how a prefill chunk looks to the target."""
    parents = np.arange(-1, size - 1)[None]
    return from_parents(np.zeros((1, size)), parents, [size])


def _logprobs(
    stages: Stages, requests: Sequence[Request], result: RoundResult, host: HostResult
) -> list[list[TokenLogprob] | None]:
    """Log-probabilities of the emitted tokens, path rows only; None for requests that want none."""
    wanted = [r.params.logprobs for r in requests]
    most = max((n for n in wanted if n is not None), default=None)
    if most is None:
        return [None] * len(requests)
    path = result.accepted.path.clamp(min=0).long()
    rows = result.logits.gather(1, path[..., None].expand(-1, -1, result.logits.shape[-1]))  # [B, D + 1, V]
    emitted = result.accepted.emitted.clamp(min=0).long()
    chosen = rows.log_softmax(-1).gather(2, emitted[..., None])[..., 0].tolist()
    lp, ids = (t.tolist() for t in stages.kernels.topk_logprobs(rows, min(max(most, 1), rows.shape[-1])))

    def at(b: int, j: int, n: int) -> TokenLogprob:
        top = tuple(zip(ids[b][j][:n], lp[b][j][:n], strict=True))
        return TokenLogprob(host.emitted[b][j], chosen[b][j], top)

    return [
        None if n is None else [at(b, j, n) for j in range(len(host.emitted[b]))]
        for b, n in enumerate(wanted)
    ]
