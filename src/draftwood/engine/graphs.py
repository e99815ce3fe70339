"""Rounds as replayed CUDA graphs: nothing a round reads or writes moves, and the host learns its results one round late.

A batch is padded to one of a few sizes. Its state lies in tensors that stay where they are; a graph per state and plan is
captured when first needed. Rows that are done, and those that only pad, stand still: they are computed and change nothing.
Without CUDA the same steps run as they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from draftwood.config import MAX_REPLAYED_BATCH, table_widths
from draftwood.drafting import ReplayableDrafting, Ring
from draftwood.engine.chunks import Chunk, padded_size
from draftwood.engine.moments import Moment, Span, now
from draftwood.engine.placed import Placed, leaves
from draftwood.engine.report import RoundReport, TokenScores, most_logprobs, row_results
from draftwood.engine.row import Row
from draftwood.engine.runner import RoundOutcome, Runner
from draftwood.engine.sampling_params import SamplingParams
from draftwood.parallel import packed, unpacked
from draftwood.round import EarlyDrafting, RoundPlan, RoundState, Stages, decode_round

BATCHES = tuple(1 << i for i in range(MAX_REPLAYED_BATCH.bit_length()))
"""Sizes a batch is padded to."""

NOBODY = Row([0], [], [], 0, SamplingParams(max_new_tokens=1), ())
"""A row that pads: no pages, so nothing of it is ever written."""

MOST_HELD = 32
"""States kept with their recorded rounds; of more, the one that was not used for longest goes."""

MOST_EARLY = 256
"""Batch times slots of rounds that project features of all slots, beside other work, to save time afterwards. Beyond that the
products would no longer take the time of reading their weights."""

WARM_UPS, TIMED = 2, 3

Result = TypeVar("Result")


@dataclass(frozen=True)
class StepResult:
    """What a replayed round returns; the scores, if there are any, also as bytes, so that they go to the host in one copy."""

    report: RoundReport
    scores: TokenScores | None
    packed_scores: Tensor | None


@dataclass
class Held:
    """The state of a batch where graphs find it."""

    placed: Placed[RoundState]
    ring: Ring | None
    rounds: dict[tuple[RoundPlan, int | None, int], Replay[StepResult]] = field(default_factory=dict)
    catch_up: Replay[None] | None = None

    @property
    def state(self) -> RoundState:
        return self.placed.record


@dataclass(frozen=True)
class Flight:
    """A round that was launched: where its results arrive, and who they are for."""

    rows: list[Row]
    report: RoundReport
    scores: TokenScores | None
    span: Span


class Replay(Generic[Result]):
    """A step that runs as often as it is called, on the same tensors; its results are overwritten by the next call."""

    def __init__(self, step: Callable[[], Result], device: str, pool: Any) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        if not device.startswith("cuda"):
            self._step = step
            return
        self._graph = torch.cuda.CUDAGraph()
        failure: Exception | None = None
        try:
            with torch.cuda.graph(self._graph, pool=pool):
                try:
                    self._result = step()
                except Exception as e:
                    failure = e
                    raise
        except Exception:
            # ending the recording of a branch that nobody joined fails too, and would hide it
            if failure is not None:
                raise failure from None
            raise
        finally:
            failure = None  # its frames hold what the step made

    def __call__(self) -> Result:
        if self._graph is None:
            return self._step()
        self._graph.replay()
        return self._result

    def release(self) -> None:
        """Give the recording back; it cannot be called any more."""
        if self._graph is not None:
            self._graph.reset()


class GraphRunner(Runner):
    """A runner whose rounds are replayed: `launch` starts one, `collect` waits for its results.

    Several engines may share one; the device does what they ask for in that order. Who finds `begun` changed must begin anew.
    """

    ahead = 1

    def __init__(self, stages: Stages, *, page_size: int, max_context: int, device: str) -> None:
        super().__init__(stages, page_size=page_size, max_context=max_context, device=device)
        if stages.drafting is not None and not isinstance(stages.drafting, ReplayableDrafting):
            raise TypeError("replayed rounds need drafting that keeps nothing on the host")
        self._drafting: ReplayableDrafting | None = stages.drafting
        self._cuda = device.startswith("cuda")
        alone = stages.target.ranks.size == 1
        self._early = self._cuda and alone and isinstance(stages.drafting, EarlyDrafting)
        self._pool = torch.cuda.graph_pool_handle() if self._cuda else None
        self._held: dict[tuple[torch.Size, ...], Held] = {}  # the longest unused first
        self._now: Held | None = None
        self._waiting = 0  # plain rounds whose features are in the ring
        self._max_pages = -(-max_context // page_size)
        self._most_held = 0  # pages that a row of the batch has
        self._chunks: dict[int, tuple[Chunk, Replay[None]]] = {}
        self._rings: dict[int, Ring] = {}

    def begin(self, rows: Sequence[Row]) -> None:
        """Decode these rows from the next round on. Rounds in flight may still be collected."""
        self.settle()
        self.begun += 1
        self._rows, self._logprobs = list(rows), most_logprobs(rows)
        self._most_held = max(len(row.pages) for row in rows)
        state = self._padded(self._rows)
        self._now = self._hold(state)
        self._now.placed.set(state)
        self._state = self._now.state

    def set_pages(self, entries: Sequence[tuple[int, int, int]]) -> None:
        super().set_pages(entries)
        self._most_held = max(self._most_held, *(column + 1 for _, column, _ in entries))

    def launch(self, plan: RoundPlan) -> Flight:
        """Start a round and return at once."""
        if self._now is None:
            raise RuntimeError("no batch has begun")
        if plan.slots > 1:
            self.settle()
        replay = self._round(self._now, plan, self._logprobs)
        self._attach(self._now.ring)
        began = now(self.device)
        flight = self._send(replay(), began)
        if plan.slots == 1 and self._drafting is not None:
            self._waiting += 1
            if self._waiting == self._drafting.room:
                self.settle()
        return flight

    def collect(self, flight: Flight, *, trace: bool = False) -> RoundOutcome:
        """The results of a round that was launched; waits for them."""
        seconds = flight.span.seconds()
        rows, chances = row_results(flight.rows, flight.report, flight.scores, trace=trace)
        return RoundOutcome(rows, flight.report.slots, {"replay": seconds}, chances)

    def round(self, plan: RoundPlan, *, trace: bool = False) -> RoundOutcome:
        """Launch a round and wait for it."""
        return self.collect(self.launch(plan), trace=trace)

    def prefill(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> Span:
        self.settle()  # what waits may belong to rows that these pages were taken from
        self._attach(None)
        size = padded_size(len(tokens))
        if size is None:
            return super().prefill(tokens, start, pages)
        began = now(self.device)
        if size not in self._chunks:
            self._chunks[size] = self._record(size)
        chunk, replay = self._chunks[size]
        chunk.set(tokens, start, pages)
        replay()
        return Span(began, now(self.device))

    def _record(self, size: int) -> tuple[Chunk, Replay[None]]:
        chunk = Chunk(size, self._max_pages, self.device)
        chunk.set([0], 0, [])

        def step() -> None:
            self._fill(chunk.tokens, chunk.page_table, chunk.start, chunk.chain, chunk.count)

        self._warm_up(step)
        return chunk, Replay(step, self.device, self._pool)

    def settle(self) -> None:
        """Bring the features of plain rounds into the drafter's context."""
        if self._waiting == 0 or self._drafting is None or self._now is None:
            return
        held, drafting = self._now, self._drafting
        self._attach(held.ring)
        if held.catch_up is None:
            held.catch_up = self._capture(held, lambda: drafting.empty_ring(held.state.page_table))
        held.catch_up()
        self._waiting = 0

    def forget(self) -> None:
        """Give all recordings back, whatever still runs: NCCL ends no communicator that one refers to."""
        replays: list[Replay[Any]] = [replay for _, replay in self._chunks.values()]
        for held in self._held.values():
            replays += [*held.rounds.values(), *([] if held.catch_up is None else [held.catch_up])]
        for replay in replays:
            replay.release()
        self._chunks.clear()
        self._held.clear()
        self._now, self._waiting = None, 0

    def time_round(self, batch: int, plan: RoundPlan) -> float:
        """Seconds of a round of a batch of nobody, which has no prefix: the least of a few. Recorded for `columns`."""
        held = self._hold(self._padded([NOBODY] * batch))
        replay = self._round(held, plan, None)
        times = []
        with self._aside(held):
            for _ in range(TIMED):
                began = now(self.device)
                replay()
                times.append(Span(began, now(self.device)).seconds())
        return min(times)

    def _padded(self, rows: Sequence[Row]) -> RoundState:
        """The state of a batch filled up with nobody, on the host."""
        filled = [*rows, *[NOBODY] * (padded_batch(len(rows)) - len(rows))]
        state = self._state_of(filled, max_pages=self._max_pages)
        state.live[len(rows) :] = False
        return state

    def _hold(self, like: RoundState) -> Held:
        """The place for states of this shape."""
        key = tuple(leaf.shape for leaf in leaves(like))
        held = self._held.pop(key, None)
        if held is None:
            self._make_room()
            held = Held(Placed(like, self.device), self._ring(len(like.root)))
        self._held[key] = held
        return held

    def _ring(self, rows: int) -> Ring | None:
        """States of one size share it: it is empty whenever another one takes over."""
        if self._drafting is not None and rows not in self._rings:
            self._rings[rows] = self._drafting.new_ring(rows)
        return self._rings.get(rows)

    def _make_room(self) -> None:
        unused = [key for key, held in self._held.items() if held is not self._now]
        for key in unused[: max(0, len(self._held) - MOST_HELD + 1)]:
            if self._cuda:
                torch.cuda.synchronize()  # a recording may be running
            del self._held[key]

    @property
    def columns(self) -> int:
        """Of the page table, that the next round of the batch is recorded for."""
        return table_columns(self._most_held, self.page_size, self._max_pages)

    def _round(self, held: Held, plan: RoundPlan, k: int | None) -> Replay[StepResult]:
        columns = self.columns
        if (plan, k, columns) not in held.rounds:
            held.rounds[plan, k, columns] = self._capture(held, lambda: self._step(held, plan, k, columns))
        return held.rounds[plan, k, columns]

    @contextmanager
    def _aside(self, held: Held) -> Iterator[None]:
        """Within it the state is one of nobody, whose rounds change nothing; after it the old one is back."""
        kept, of_ring = held.placed.kept(), [leaf.clone() for leaf in leaves(held.ring)]
        held.state.page_table.fill_(-1)
        held.state.prefix_len.zero_()
        held.state.live.zero_()
        self._attach(held.ring)
        try:
            yield
        finally:
            held.placed.restore(kept)
            for leaf, value in zip(leaves(held.ring), of_ring, strict=True):
                leaf.copy_(value)

    def _attach(self, ring: Ring | None) -> None:
        if self._drafting is not None:
            self._drafting.ring = ring

    def _step(self, held: Held, plan: RoundPlan, k: int | None, columns: int) -> StepResult:
        early = self._early and 1 < plan.slots <= MOST_EARLY // len(held.state.root)
        state = replace(held.state, page_table=held.state.page_table[:, :columns].contiguous())
        result = decode_round(self.stages, state, replace(plan, early=early), _untimed)
        scores = None if k is None else TokenScores.of(self.stages, result, k)
        packed_scores = None if scores is None else packed(scores)
        return StepResult(RoundReport(result.table, plan.slots), scores, packed_scores)

    def _send(self, result: StepResult, began: Moment) -> Flight:
        """Start copying a round's results to the host."""
        report = RoundReport(self._to_host(result.report.table), result.report.slots)
        scores = None
        if result.scores is not None and result.packed_scores is not None:
            scores = unpacked(result.scores, self._to_host(result.packed_scores))
        return Flight(self._rows, report, scores, Span(began, now(self.device)))

    def _to_host(self, sent: Tensor) -> Tensor:
        if not self._cuda:
            return sent
        host = torch.empty_like(sent, device="cpu", pin_memory=True)
        return host.copy_(sent, non_blocking=True)

    def _capture(self, held: Held, step: Callable[[], Result]) -> Replay[Result]:
        """Run the step a few times for nobody, so that kernels are compiled and buffers exist, then record it."""
        self._attach(held.ring)
        if self._cuda:
            with self._aside(held):
                self._warm_up(step)
        return Replay(step, self.device, self._pool)

    def _warm_up(self, step: Callable[[], object]) -> None:
        if not self._cuda:
            return
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(aside):
                for _ in range(WARM_UPS):
                    step()
        finally:  # what was launched before an error still writes
            torch.cuda.current_stream().wait_stream(aside)


def padded_batch(rows: int) -> int:
    """How many rows a batch of `rows` is computed as."""
    size = next((n for n in BATCHES if n >= rows), None)
    if size is None:
        raise ValueError(f"max_batch: at most {BATCHES[-1]} requests can share a round, got {rows}")
    return size


def table_columns(most_held: int, page_size: int, max_pages: int) -> int:
    """Columns of the page table that a round is recorded with, if no row has more than `most_held` pages: the others have none.

    A row has pages for all that rounds in flight and the next one may write, so this is enough whatever those will bring.
    """
    return next((n for n in table_widths(page_size, max_pages) if most_held <= n), max_pages)


@contextmanager
def _untimed(stage: str) -> Iterator[None]:
    yield
