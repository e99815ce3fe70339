"""The scheduler alone, against a model of the device that knows which token each page holds: no tensor anywhere."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from draftwood.cache.pages import PageAllocator
from draftwood.cache.prefix import PrefixCache
from draftwood.engine.outputs import RequestOutput
from draftwood.engine.request import Request
from draftwood.engine.sampling_params import SamplingParams
from draftwood.engine.scheduler import OVERTAKES, WINDOW, Copy, Scheduler
from draftwood.engine.stops import StopStrings

PAGE = 4


def request_of(prompt: list[int], max_new: int, n: int = 1) -> Request:
    first, *others = (
        Request(
            index=0,
            params=SamplingParams(max_new_tokens=max_new),
            stop_ids=(),
            output=RequestOutput(prompt, i, sample=i),
            decoder=None,
            stops=StopStrings(()),
        )
        for i in range(n)
    )
    for one in others:
        one.source = first
    first.followers = others
    return first


class Machine:
    """A scheduler and what its orders do to pages. A round emits tokens that depend on text and seed alone."""

    def __init__(self, n_pages: int, *, max_batch=3, depth=2, budget=6, chunk=4, max_context=64, cached=True):
        self.depth = depth
        self.cache = PrefixCache(PageAllocator(n_pages), PAGE, enabled=cached)
        self.scheduler = Scheduler(
            self.cache,
            "drafted",
            max_batch=max_batch,
            max_context=max_context,
            lookahead=2 * (depth + 1),
            chunk=chunk,
            budget=budget,
        )
        self.held = {(page, i): None for page in range(n_pages) for i in range(PAGE)}
        self.prefilled = 0

    def write(self, request: Request, position: int, token: int) -> None:
        self.held[request.pages[position // PAGE], position % PAGE] = token

    def step(self) -> list[Request]:
        """Do what the scheduler says; returns the batch that was decoded."""
        step = self.scheduler.step()
        assert step.work or step.batch, "nothing to do, and yet not finished"
        for work in step.work:
            if isinstance(work, Copy):
                for i in range(PAGE):
                    self.held[work.target, i] = self.held[work.source, i]
                continue
            tokens = work.request.tokens(work.start, work.stop)
            self.check(work.request, work.start)
            self.prefilled += len(tokens)
            for position, token in enumerate(tokens, work.start):
                self.write(work.request, position, token)
        for request in step.batch:
            self.check(request, request.n_tokens - 1)
            self.round(request)
        self.cache.check_integrity(r.pages for r in self.scheduler.active)
        return step.batch

    def check(self, request: Request, positions: int) -> None:
        held = [self.held[request.pages[p // PAGE], p % PAGE] for p in range(positions)]
        assert held == request.tokens(0, positions)

    def round(self, request: Request) -> None:
        out = request.output
        rng = random.Random(f"{out.seed} {len(out.token_ids)}")
        left = min(
            request.params.max_new_tokens - len(out.token_ids),
            self.scheduler.max_context - request.n_tokens,
        )
        emitted = [rng.randrange(3) for _ in range(min(left, rng.randint(1, self.depth + 1)))]
        for position, token in enumerate([request.tokens(0, 999)[-1], *emitted[:-1]], request.n_tokens - 1):
            self.write(request, position, token)
        out.token_ids.extend(emitted)
        if len(emitted) == left:
            out.finish_reason = "length"
        self.scheduler.advance(request)
        if request.finished:
            self.scheduler.leave(request)


@pytest.mark.parametrize("cached", [True, False])
def test_every_text_is_in_its_pages_whatever_comes_and_goes(cached):
    """Random joins, cancellations, failures, shared prefixes and samples over pools that are too small."""
    preempted = forked = hits = 0
    for seed in range(120):
        rng = random.Random(seed)
        machine = Machine(
            rng.randint(7, 14), max_batch=rng.randint(1, 5), depth=rng.randint(0, 3), cached=cached
        )
        scheduler, everyone = machine.scheduler, []
        for i in range(60):
            if i < 40 and rng.random() < 0.4:
                stem = [0, 1, 2, 0, 1, 2, 1, 1][: rng.randrange(9)]
                prompt = [*stem, *(rng.randrange(3) for _ in range(rng.randint(1, 6)))]
                request = request_of(prompt, rng.randint(1, 14), rng.choice([1, 1, 1, 2, 3]))
                assert scheduler.pages_at_most(request) <= 7
                everyone += [request, *request.followers]
                scheduler.add(request)
            alive = scheduler.requests()
            if alive and rng.random() < 0.1:
                request = rng.choice(alive)
                request.output.finish_reason = "cancelled"
                scheduler.leave(request, sound=rng.random() < 0.7)
            if scheduler.requests():
                machine.step()
        while scheduler.requests():
            machine.step()
        assert all(r.finished for r in everyone)
        machine.cache.check_integrity([])
        assert machine.cache.n_available == machine.cache.allocator.n_pages
        preempted += sum(r.output.preemptions for r in everyone)
        forked += sum(r.output.cached_tokens > 0 for r in everyone if r.output.sample)
        hits += sum(r.output.cached_tokens > 0 for r in everyone if not r.output.sample)
    assert preempted > 50
    assert forked > 50
    assert hits > 50 if cached else hits == 0


def test_a_long_prompt_and_decoding_do_not_starve_each_other():
    machine = Machine(40, budget=6)
    short, long = request_of([1], 20), request_of([1] * 60, 4)
    machine.scheduler.add(short)
    machine.step()
    machine.scheduler.add(long)
    for step in range(1, 11):
        before = machine.prefilled
        batch = machine.step()
        assert short in batch or short.finished
        assert machine.prefilled - before == min(6, 59 - 6 * (step - 1))
        assert (long in batch) == (step == 10)


def test_chunks_and_budget():
    machine = Machine(40, budget=10, chunk=4)
    for prompt in ([1] * 6, [2] * 8):
        machine.scheduler.add(request_of(prompt, 1))
    work = machine.scheduler.step().work
    assert [(w.start, w.stop, w.request.output.prompt_token_ids[0]) for w in work] == [
        (0, 4, 1),
        (4, 5, 1),
        (0, 4, 2),
        (4, 5, 2),
    ]


def test_pages_come_as_the_text_grows():
    machine = Machine(40, depth=1)
    request = request_of([1, 2, 3], 30)
    machine.scheduler.add(request)
    while not request.finished:
        due = min(-(-(request.n_tokens - 1 + 4) // PAGE), 8)  # 32 positions at most
        machine.scheduler._grow()
        if request.pages:
            assert len(request.pages) == due
        machine.step()


def test_the_youngest_makes_room_and_comes_back_first():
    machine = Machine(9, max_batch=3, depth=0)
    first, _, third, fourth = requests = [request_of([i] * 4, 21) for i in range(4)]
    for request in requests:
        machine.scheduler.add(request)
    finished = []
    while machine.scheduler.requests():
        before = [len(r.output.token_ids) for r in requests]
        machine.step()
        assert all(len(r.output.token_ids) >= n for r, n in zip(requests, before, strict=True))
        finished += [r for r in requests if r.finished and r not in finished]
        waiting = machine.scheduler.waiting
        assert waiting == sorted(waiting, key=lambda r: r.arrival)
    assert finished == requests
    assert first.output.preemptions == 0
    assert third.output.preemptions > 0
    assert fourth.output.preemptions <= third.output.preemptions


def test_the_head_of_the_queue_is_overtaken_a_bounded_number_of_times():
    machine = Machine(10, max_batch=4, depth=0, cached=False)
    machine.scheduler.add(request_of([1] * 8, 12))
    machine.step()
    big, order = request_of([2] * 30, 8), []
    machine.scheduler.add(big)
    small = [request_of([3], 6) for _ in range(60)]
    for request in small:
        machine.scheduler.add(request)
    while not big.finished:
        machine.step()
        order += [r for r in (big, *small) if r.placements and r not in order]
    assert 0 < order.index(big) <= OVERTAKES + 4
    assert len(small) > WINDOW


def test_a_preempted_request_is_not_overtaken():
    machine = Machine(7, max_batch=3, depth=0, cached=False)
    old, young = request_of([1] * 8, 20), request_of([2] * 8, 12)
    for request in (old, young):
        machine.scheduler.add(request)
    while not young.output.preemptions:
        machine.step()
    small = request_of([3], 2)
    machine.scheduler.add(small)
    while not young.pages:
        assert not small.placements
        machine.step()


def test_a_hit_leaves_at_least_the_last_token():
    machine = Machine(20)
    for n, hit in ((9, 0), (8, 4), (9, 8), (10, 8)):
        request = request_of([1] * n, 1)
        machine.scheduler.add(request)
        machine.step()
        while not request.finished:
            machine.step()
        assert request.output.cached_tokens == hit


def test_pages_of_an_unread_or_unsound_prompt_are_not_published():
    machine = Machine(20)
    cancelled, failed = request_of([1] * 20, 4), request_of([2] * 9, 4)
    machine.scheduler.add(cancelled)
    machine.scheduler.step()  # six of twenty
    machine.scheduler.leave(cancelled)
    machine.scheduler.add(failed)
    machine.step()
    machine.step()
    assert machine.cache.n_cached > 0  # a round read them
    machine.scheduler.leave(failed, sound=False)
    assert machine.cache.n_cached == 0


def test_samples_share_a_prompt_that_is_prefilled_once():
    machine = Machine(20, max_batch=4)
    request = request_of([1] * 7, 1, n=4)  # one round each: the fork must come before it
    samples = [request, *request.followers]
    machine.scheduler.add(request)
    batch = machine.step()
    assert (batch, machine.prefilled) == (samples, 6)
    assert [r.output.cached_tokens for r in samples] == [0, 6, 6, 6]


def test_the_next_sample_takes_over_from_one_that_leaves_before_it_was_prefilled():
    machine = Machine(30, max_batch=4)
    request = request_of([1] * 12, 3, n=3)
    _, second, third = samples = [request, *request.followers]
    machine.scheduler.add(request)
    machine.step()
    machine.scheduler.leave(third)
    machine.scheduler.leave(request)
    assert machine.scheduler.requests() == [second]
    while machine.scheduler.requests():
        machine.step()
    assert [len(r.output.token_ids) for r in samples] == [0, 3, 0]


def test_it_needs_no_torch():
    code = "import sys, draftwood.engine.scheduler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
