"""Continuous batching on the real engine: reuse, forks, preemption, cancellation and faults change no output."""

from __future__ import annotations

import random
from itertools import cycle

import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.cache.pages import OutOfPagesError
from draftwood.engine.batch import build_state
from draftwood.engine.budget import BudgetController
from draftwood.engine.engine import Engine
from draftwood.engine.request import Request
from draftwood.engine.row import Row
from draftwood.engine.runner import Runner
from draftwood.engine.sampling_params import MAX_SEED, sample_seed

PAGE = 4
STEM = [7, 3, 9, 11, 4, 4, 21, 30, 2, 5]
LONG = SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.fixture
def make(folders):
    def make(**settings) -> LLM:
        common = {"dtype": "float64", "max_batch": 4, "page_size": PAGE, "budget": 6, "max_context": 96}
        return LLM(*folders, **common | settings)

    return make


def ids(outputs) -> list[list[int]]:
    return [o.token_ids for o in outputs]


def run(engine: Engine) -> None:
    while engine.has_work():
        engine.step()
        engine.check_integrity()


# prefix reuse


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("mode", ["plain", "tree"])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_reuse_changes_no_token(make, dtype, mode, page):
    """Turns of a conversation, and prompts that share a beginning, with and without the cache."""
    cached, fresh = (make(dtype=dtype, page_size=page, prefix_cache=on, mode=mode) for on in (True, False))
    turn, known = STEM, 0
    for i in range(4):
        params = SamplingParams(max_new_tokens=9, ignore_eos=True, seed=i, temperature=i % 2 * 1.0)
        prompts = [turn, [*turn[:12], 1 + i], [*turn, 3, 1, 4, 1, 5]]
        outputs, want = (llm.generate(prompts, params) for llm in (cached, fresh))
        assert ids(outputs) == ids(want)
        assert not any(o.cached_tokens for o in want)
        assert outputs[0].cached_tokens == known // page * page
        turn = [*turn, *outputs[0].token_ids, 6, 7, 8]
        known = len(turn) - 3 - 1  # the newest token of a request is in no page
    cached.cache.check_integrity([])


def test_a_hit_brings_the_drafter_its_context(make):
    """Where a page were found whose context nobody wrote, drafts would differ, or be NaN."""
    llm = make()
    llm.drafting.context.kv.fill_(torch.nan)
    llm.latents.pages.fill_(torch.nan)
    prompt = STEM * 2
    first, again = (llm.generate([prompt], LONG, trace=True)[0] for _ in range(2))
    assert (first.cached_tokens, again.cached_tokens) == (0, 16)
    assert [r.trace for r in first.rounds] == [r.trace for r in again.rounds]
    assert all(r.slots == 6 for r in again.rounds[:-1])


def test_pages_without_drafter_context_are_no_hit_where_one_drafts(make):
    llm = make()
    (plain,) = llm.generate([STEM], LONG, mode="plain")
    for mode, hit in (("tree", 0), ("chain", 8), ("plain", 8)):
        (out,) = llm.generate([STEM], LONG, mode=mode)
        assert (out.cached_tokens, out.token_ids) == (hit, plain.token_ids)


def test_forks_and_reused_pages_hold_the_right_context(make, monkeypatch):
    """Features of plain rounds wait; whoever takes over, shares or copies a page must not miss or get them."""
    pattern = cycle([False] * 9 + [True])
    monkeypatch.setattr(BudgetController, "wants_draft", lambda self: next(pattern))
    llm, fresh = make(budget="auto", n_pages=30, prefill_chunk=5), make(prefix_cache=False)
    engine = llm.engine()
    rng = random.Random(0)
    checked = 0
    for i in range(40):
        # Prefill of 2 and 7 tokens ends with a chunk of one, whose feature waits like those of plain rounds.
        prompt = [*STEM, 1 + i][: rng.choice([2, 6, 7, 11])]
        params = SamplingParams(n=rng.choice([1, 2, 3]), max_new_tokens=rng.randint(1, 12), temperature=1.0)
        engine.add(llm.request(prompt, params))
        while engine.has_work() and rng.random() < 0.6:
            engine.step()
            engine.check_integrity()
        if engine.scheduler.active and rng.random() < 0.4:
            engine.runner.settle()
            for request in engine.scheduler.active:
                assert_same_pages(llm, request, fresh)
                checked += request.proven
    assert checked > 300


def assert_same_pages(llm: LLM, request: Request, fresh: LLM) -> None:
    """The latents and drafter context of a running request are those of prefilling its text."""
    n = request.proven
    engine, twin = fresh.engine(), fresh.request(request.tokens(0, n + 1), LONG)
    engine.add(twin)
    engine.step()
    for have, want in zip(held(llm, request, n), held(fresh, twin, n), strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-10)
    engine.abort()


def held(llm: LLM, request: Request, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    pages = [request.pages[p // PAGE] for p in range(n)]
    offsets = [p % PAGE for p in range(n)]
    return llm.latents.pages[:, pages, offsets], llm.drafting.context.kv[:, pages, offsets]


# samples


def test_samples_are_solo_runs_under_their_seeds(make):
    llm = make()
    params = SamplingParams(max_new_tokens=14, ignore_eos=True, temperature=1.0, seed=5)
    outs = llm.generate([STEM, [3]], params.model_copy(update={"n": 6}))  # more samples than places
    assert [[o.sample for o in out.outputs] for out in outs] == [list(range(6))] * 2
    assert len({o.seed for o in outs[0].outputs}) == 6
    for out in outs:
        assert len({tuple(o.token_ids) for o in out.outputs}) > 3
        for one in out.outputs:
            alone = params.model_copy(update={"seed": one.seed})
            (want,) = make(prefix_cache=False).generate([one.prompt_token_ids], alone, mode="plain")
            assert (one.token_ids, one.text, one.others) == (want.token_ids, want.text, one.others)
    assert outs[0].token_ids == llm.generate([STEM], params)[0].token_ids
    llm.cache.check_integrity([])


def test_sample_seeds():
    for seed in (0, 1, 2**40, MAX_SEED):
        seeds = [sample_seed(seed, i) for i in range(128)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 128
        assert all(0 <= s <= MAX_SEED for s in seeds)
    assert sample_seed(3, 1) == 4226740076938255849


def test_a_prompt_is_prefilled_once_for_all_samples(make, monkeypatch):
    llm, counted = make(), []
    original = Runner.prefill

    def prefill(self, tokens, *where):
        counted.append(len(tokens))
        return original(self, tokens, *where)

    monkeypatch.setattr(Runner, "prefill", prefill)
    events = list(llm.stream([STEM], SamplingParams(n=4, max_new_tokens=1, temperature=1.0)))
    assert sum(counted) == len(STEM) - 1
    assert sorted(e.output.sample for e in events) == [0, 1, 2, 3]
    assert [o.cached_tokens for o in events[0].output.outputs] == [0, 9, 9, 9]


# preemption


def test_preemption_changes_no_output(make):
    """Sampled under penalties, with log-probabilities: all state is made again from the text."""
    tight, roomy = make(n_pages=15, max_batch=5), make(max_batch=5)
    params = [
        SamplingParams(
            max_new_tokens=40,
            ignore_eos=True,
            seed=i,
            temperature=0.8,
            repetition_penalty=1.3,
            frequency_penalty=0.4,
            logprobs=2,
        )
        for i in range(5)
    ]
    prompts = [STEM[:i] for i in (1, 3, 5, 7, 9)]
    outputs, want = tight.generate(prompts, params), roomy.generate(prompts, params)
    assert ids(outputs) == ids(want)
    assert [o.text for o in outputs] == [o.text for o in want]
    assert sum(o.preemptions for o in outputs) > 1
    assert outputs[0].preemptions == 0
    for out, other in zip(outputs, want, strict=True):
        assert [t.token_id for t in out.logprobs] == out.token_ids
        assert [t.logprob for t in out.logprobs] == pytest.approx([t.logprob for t in other.logprobs])
    tight.cache.check_integrity([])


# joining and leaving


def test_requests_join_while_others_run(make):
    llm = make(prefill_budget=6, prefill_chunk=4)
    prompts = [[3], STEM * 3, STEM, [9, 9], STEM[::-1]]
    engine, requests = llm.engine(), []
    events = {i: [] for i in range(5)}
    while len(requests) < 5 or engine.has_work():
        if len(requests) < 5:
            requests.append(llm.request(prompts[len(requests)], LONG, index=len(requests)))
            engine.add(requests[-1])
        for event in engine.step():
            events[event.index] += event.token_ids
        engine.check_integrity()
    want = ids(make().generate(prompts, LONG))
    assert [events[i] for i in range(5)] == want == [r.output.token_ids for r in requests]


def test_cancelled_anywhere(make):
    """Waiting, half prefilled, decoding, done: the pages come back, and the others go on as if nothing had been."""
    prompts = [STEM, STEM * 3, [3, 4], STEM[:5], [8]]
    params = SamplingParams(max_new_tokens=10, ignore_eos=True, n=2, temperature=1.0, seed=1)
    want = [[o.token_ids for o in out.outputs] for out in make().generate(prompts, params)]
    met = set()
    for at in range(0, 16, 2):
        llm = make(max_batch=3, prefill_budget=8, prefill_chunk=4)
        engine, requests = llm.engine(), [llm.request(p, params) for p in prompts]
        for request in requests:
            engine.add(request)
        for _ in range(at):
            engine.step()
        for request in (requests[1], requests[3].followers[0] if at < 2 else requests[3], requests[0]):
            met.add((bool(request.pages), bool(request.output.token_ids), request.finished))
            done = request.finished
            engine.cancel(request)
            engine.cancel(request)
            assert request.pages == []
            assert (request.output.finish_reason == "cancelled") == (not done)
            engine.check_integrity()
        run(engine)
        for request, texts in zip(requests, want, strict=True):
            for one, text in zip(request.output.outputs, texts, strict=True):
                assert one.token_ids == text[: len(one.token_ids)]
                assert one.finish_reason == ("length" if one.token_ids == text else "cancelled")
        llm.cache.check_integrity([])
    assert len(met) == 4


def test_an_abandoned_stream_is_cancelled_and_leaves_its_pages_to_be_reused(make):
    llm = make()
    stream = llm.stream([STEM * 2], LONG)
    output = next(stream).output
    stream.close()
    assert output.finish_reason == "cancelled"
    assert llm.generate([STEM * 2], LONG)[0].cached_tokens == 16


def test_an_idle_engine_steps_and_a_request_runs_once(make):
    llm = make()
    engine, request = llm.engine(), llm.request([3], SamplingParams(max_new_tokens=1))
    assert engine.step() == []
    with pytest.raises(ValueError, match="prompt 0: the request has not been added"):
        engine.cancel(request)
    engine.add(request)
    run(engine)
    with pytest.raises(ValueError, match="prompt 0: the request has been added before"):
        engine.add(request)
    assert engine.step() == []


def test_an_engine_that_another_leaves_no_page_says_so(make):
    llm = make(n_pages=24)
    first, second = (llm.stream([STEM], SamplingParams(max_new_tokens=80, ignore_eos=True)) for _ in range(2))
    outputs = [next(first).output, next(second).output]
    with pytest.raises(OutOfPagesError, match=r"no request can be admitted: \d+ of 24 pages are free"):
        list(zip(first, second, strict=False))
    assert list(first) or list(second)  # the other goes on
    (want,) = make().generate([STEM], SamplingParams(max_new_tokens=80, ignore_eos=True))
    finished = [o for o in outputs if o.finish_reason == "length"]
    assert ids(finished) == [want.token_ids]
    llm.cache.check_integrity([])


# faults


def test_text_that_fails_ends_its_request_alone(make, monkeypatch):
    llm = make()
    want = llm.generate([STEM, [3], [4]], LONG)
    engine = llm.engine()
    requests = [llm.request(p, LONG, index=i) for i, p in enumerate((STEM, [3], [4]))]
    pushed = []

    def push(tokens):
        pushed.extend(tokens)
        if len(pushed) > 4:
            raise UnicodeError("no such text")
        return ""

    monkeypatch.setattr(requests[1].decoder, "push", push)
    for request in requests:
        engine.add(request)
    run(engine)
    bad, good = requests[1].output, (requests[0].output, requests[2].output)
    assert (bad.finish_reason, bad.error) == (
        "error",
        "its tokens could not be made text: UnicodeError: no such text",
    )
    assert bad.token_ids == want[1].token_ids[: len(bad.token_ids)]
    assert ids(good) == ids([want[0], want[2]])
    llm.cache.check_integrity([])


def test_poisoned_pages_end_their_own_requests_and_are_never_reused(make, monkeypatch):
    """NaN latents in one prompt, amid trees, forks, shared prefixes and preemption."""
    roomy = make(max_batch=5)
    poisoned = [*STEM, 13, 13, 13, 13]
    prompts = [[*STEM, 1, 2, 3], poisoned, [*STEM, 6], [5], poisoned]
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, n=2, temperature=1.0, seed=3)
    want = [[o.token_ids for o in out.outputs] for out in roomy.generate(prompts, params)]
    llm = make(n_pages=22, max_batch=5)
    original = type(llm.target).forward

    def forward(self, tokens, *rest):
        output = original(self, tokens, *rest)
        chain = tokens.shape[0] == 1 and bool(
            (tokens == 13).sum() > 1
        )  # a prefill chunk of the poisoned prompt
        if chain:
            output.latents[-1, :, tokens[0] == 13] = torch.nan
        return output

    with monkeypatch.context() as patch:
        patch.setattr(type(llm.target), "forward", forward)
        outputs = llm.generate(prompts, params)
    for out, texts, prompt in zip(outputs, want, prompts, strict=True):
        for one, text in zip(out.outputs, texts, strict=True):
            if prompt is poisoned:
                assert (one.finish_reason, one.token_ids) == ("error", [])
                assert "not finite" in one.error
            else:
                assert one.token_ids == text
    assert sum(one.preemptions for out in outputs for one in out.outputs) > 0
    llm.cache.check_integrity([])
    (healed,) = llm.generate([poisoned], params)
    assert [o.token_ids for o in healed.outputs] == want[1]


def test_after_an_error_in_a_step_nothing_is_reused(make, monkeypatch):
    llm = make()
    (want,) = llm.generate([STEM * 2], LONG)
    llm.cache.clear()
    stream = llm.stream([STEM * 2], LONG)
    output = next(stream).output
    assert llm.cache.n_cached > 0

    def broken(self, *args, **kwargs):
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "round", broken)
        with pytest.raises(RuntimeError, match="device lost"):
            list(stream)
    assert (output.finish_reason, llm.cache.n_cached) == ("cancelled", 0)
    llm.cache.check_integrity([])
    assert llm.generate([STEM * 2], LONG)[0].token_ids == want.token_ids


@pytest.mark.parametrize(
    ("params", "spared"),
    [
        ([{}, {"temperature": 1.0}], True),
        ([{"top_k": 3, "top_p": 0.5, "min_p": 0.1}], True),  # greedy: a filter changes nothing
        ([{"temperature": 0.7, "logit_bias": {4: 1.0}, "repetition_penalty": 1.2}], True),
        *(
            ([{}, {"temperature": 1.0} | one], False)
            for one in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1})
        ),
    ],
)
def test_sample_is_spared_filters_only_where_no_row_has_one(params, spared):
    rows = [Row([1, 2], [], [0], 0, SamplingParams(**one), ()) for one in params]
    state = build_state(rows, max_pages=1, max_context=8, vocab_size=11)
    assert (state.params.unfiltered is not None) == spared
