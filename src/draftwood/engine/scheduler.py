"""Who runs, who waits, whose pages are whose: the policy of continuous batching, as plain host logic.

It sees token ids and page ids, never tensors or text. Once per step it says what to do: pages to copy, chunks to
prefill, the batch to decode. docs/scheduling.md states the policy and what it guarantees.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter

from draftwood.cache.prefix import PrefixCache
from draftwood.engine.request import Request

WINDOW = 8
"""Requests at the front of the queue that are looked at in a step, when those before them do not fit."""
OVERTAKES = 16
"""Younger requests that may be admitted before one that does not fit; then the queue waits for it."""

_age = attrgetter("arrival")


@dataclass(frozen=True)
class Copy:
    """Page `source` is to be copied into page `target`."""

    source: int
    target: int


@dataclass(frozen=True)
class Prefill:
    """Positions start .. stop - 1 of a request are to be computed."""

    request: Request
    start: int
    stop: int


@dataclass(frozen=True)
class Step:
    """What to do now, in this order."""

    work: list[Copy | Prefill]
    batch: list[Request]
    """Decode these, all in one round; the oldest first."""


class Scheduler:
    """Continuous batching over a pool of pages.

    Args:
        cache: gives pages and takes them back.
        kind: what the pages hold, see `PrefixCache`.
        max_batch: requests that hold pages at the same time.
        max_context: tokens per request.
        lookahead: positions past the known text that a request has pages for before each round.
        chunk: tokens per prefill pass. budget: tokens prefilled per step, of all requests together.
    """

    def __init__(
        self,
        cache: PrefixCache,
        kind: str,
        *,
        max_batch: int,
        max_context: int,
        lookahead: int,
        chunk: int,
        budget: int,
    ) -> None:
        self.cache, self.kind = cache, kind
        self.max_batch, self.max_context = max_batch, max_context
        self.lookahead, self.chunk, self.budget = lookahead, chunk, budget
        self.waiting: list[Request] = []  # both by age
        self.active: list[Request] = []
        self._arrivals = 0

    def pages_at_most(self, request: Request) -> int:
        """Pages for all positions the request can ever commit: every token but the last."""
        longest = min(len(request.output.prompt_token_ids) + request.params.max_new_tokens, self.max_context)
        return self._n_pages(longest - 1)

    def left(self, request: Request) -> int:
        """Tokens that it may still bring."""
        room = self.max_context - request.n_tokens
        return min(request.params.max_new_tokens - len(request.output.token_ids), room)

    def requests(self) -> list[Request]:
        """All that have not ended."""
        queued = [*self.active, *self.waiting]
        return [*queued, *(one for request in queued for one in request.followers)]

    def add(self, request: Request) -> None:
        """Queue a request; its followers stay with it until they can fork."""
        for one in (request, *request.followers):
            one.arrival, one.most_pages = self._arrivals, self.pages_at_most(one)
            self._arrivals += 1
        self.waiting.append(request)

    def step(self) -> Step:
        """Decide what is done next. The caller does all of it before it asks again."""
        self._grow()
        work: list[Copy | Prefill] = []
        self._admit(work)
        left = self.budget
        for request in self.active:
            if request.computed < request.n_tokens - 1:
                left -= self._prefill(request, left, work)
        if self._free_followers():
            self._admit(work)
        return Step(work, [request for request in self.active if request.computed == request.n_tokens - 1])

    def again(self, batch: list[Request]) -> Step | None:
        """The next step, in the place of `step`, if it can only be another round of this batch: nobody comes, goes or makes room.
        None, and nothing is done, if it may be something else."""
        if self.active != batch or (self.waiting and len(self.active) < self.max_batch):
            return None
        short = [(request, n) for request in batch if (n := self._short(request)) > 0]
        if sum(n for _, n in short) > self.cache.n_available or any(request.followers for request in batch):
            return None
        for request, n in short:
            request.pages += self.cache.take(n)
        return Step([], batch)

    def advance(self, request: Request, *, repeated: bool = False) -> None:
        """A round has chosen tokens for the request, which its output has by now.

        `repeated`: another one commits from the same position on once more, and where two tokens are close perhaps others.
        """
        before, request.computed = request.computed, request.n_tokens - 1
        request.proven = before if repeated else request.computed
        if not request.published:
            request.published = True
            self._publish(request)

    def leave(self, request: Request, *, sound: bool = True) -> None:
        """The request has ended, or is not wanted any more. `sound` = False: what its pages hold is in doubt."""
        if request.source is not None and request in request.source.followers:
            request.source.followers.remove(request)
            return
        (self.active if request.pages else self.waiting).remove(request)
        self._release(request, sound=sound)
        if request.followers:  # it was not prefilled to the end; the next sample takes its part
            heir, *rest = request.followers
            heir.source, heir.followers, request.followers = None, rest, []
            for one in rest:
                one.source = heir
            insort(self.waiting, heir, key=_age)

    # pages

    def _n_pages(self, positions: int) -> int:
        return -(-positions // self.cache.page_size)

    def _pages_due(self, request: Request) -> int:
        return min(self._n_pages(request.n_tokens - 1 + self.lookahead), request.most_pages)

    def _short(self, request: Request) -> int:
        """How many pages it lacks for the next round."""
        return max(0, self._pages_due(request) - len(request.pages))

    def _grow(self) -> None:
        """Pages for the next round, the oldest request first; the youngest make room."""
        at = 0
        while at < len(self.active):
            request = self.active[at]
            short = self._short(request)
            if short > 0:
                while short > self.cache.n_available:
                    youngest = self.active[-1]
                    self._preempt(youngest)
                    if youngest is request:
                        return
                request.pages += self.cache.take(short)
            at += 1

    def _preempt(self, request: Request) -> None:
        """Back to the queue, where its age is its place and nobody overtakes it; it keeps its tokens."""
        self.active.remove(request)
        self._release(request, sound=True)
        request.overtaken = OVERTAKES
        request.output.preemptions += 1
        insort(self.waiting, request, key=_age)

    def _publish(self, request: Request) -> None:
        self.cache.publish(request.tokens(0, request.proven), request.pages, self.kind)

    def _release(self, request: Request, *, sound: bool) -> None:
        if sound:
            self._publish(request)
        else:
            self.cache.forget(request.pages)
        self.cache.release(request.pages)
        request.pages, request.computed, request.proven, request.published = [], 0, 0, False

    # admission

    def _admit(self, work: list[Copy | Prefill]) -> None:
        """First come, first served, but a request that does not fit lets some younger ones pass.

        One page per growing request stays free, lest the next growth throws the newcomer out again.
        """
        growing = sum(request.growing for request in self.active) if self.waiting else 0
        at = 0
        while at < min(len(self.waiting), WINDOW) and len(self.active) < self.max_batch:
            request = self.waiting[at]
            if self._place(request, growing, work):
                insort(self.active, self.waiting.pop(at), key=_age)
                growing += request.growing
                for older in self.waiting[:at]:
                    older.overtaken += 1
            else:
                at += 1
            if any(refused.overtaken >= OVERTAKES for refused in self.waiting[:at]):
                return

    def _place(self, request: Request, reserve: int, work: list[Copy | Prefill]) -> bool:
        """Give the request its first pages, those of others where they hold the same.

        False if not so many are free, and `reserve` more.
        """
        known = request.n_tokens - 1
        source = request.source if self._can_fork(request) else None
        if source is None:
            shared = self.cache.match(request.tokens(0, known), self.kind)
            computed = proven = len(shared) * self.cache.page_size
        else:
            shared = source.pages[: known // self.cache.page_size]
            self.cache.share(shared)
            computed, proven = known, min(known, source.proven)
        need = self._pages_due(request) - len(shared)
        if need + reserve > self.cache.n_available:
            self.cache.release(shared)
            return False
        request.pages = shared + self.cache.take(need)
        if source is not None and computed % self.cache.page_size:
            work.append(Copy(source.pages[len(shared)], request.pages[len(shared)]))
        request.computed, request.proven, request.overtaken = computed, proven, 0
        if request.placements == 0:
            request.output.cached_tokens = computed
        request.placements += 1
        return True

    def _can_fork(self, request: Request) -> bool:
        """Whether its source still holds their whole prompt. Beyond the prompt, their texts differ."""
        source = request.source
        return (
            source is not None
            and bool(source.pages)
            and not request.output.token_ids
            and source.computed >= request.n_tokens - 1
        )

    def _free_followers(self) -> bool:
        """Queue the samples whose prompt has just been prefilled; whether there are any."""
        ready = [
            request
            for request in self.active
            if request.followers and request.computed == request.n_tokens - 1
        ]
        for request in ready:
            for one in request.followers:
                insort(self.waiting, one, key=_age)
            request.followers = []
        return bool(ready)

    def _prefill(self, request: Request, most: int, work: list[Copy | Prefill]) -> int:
        """Chunks of what the request still lacks, `most` tokens at most; how many they are."""
        start = request.computed
        stop = min(request.n_tokens - 1, start + most)
        for at in range(start, stop, self.chunk):
            work.append(Prefill(request, at, min(at + self.chunk, stop)))
        request.computed = stop
        return stop - start
