"""Where memory does not suffice: one request ends and says so, the others go on."""

from __future__ import annotations

import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.engine import pool_size
from draftwood.engine.footprint import Layout, footprint
from draftwood.engine.graphs import GraphRunner
from draftwood.engine.pool_size import choose_n_pages
from draftwood.engine.runner import Runner
from draftwood.parallel import ALONE

PROMPTS = [[3, 4, 5], list(range(1, 30)), [6, 7]]
PARAMS = SamplingParams(max_new_tokens=20, ignore_eos=True, logprobs=1)
ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
]


@pytest.fixture(scope="module", params=[False, True], ids=["eager", "graphs"])
def llm(folders, request) -> LLM:
    settings = {"max_batch": 4, "page_size": 16, "budget": 8, "prefill_chunk": 8, "prefill_budget": 64}
    return LLM(*folders, dtype="float64", graphs=request.param, **settings)


def runner_kind(llm):
    return GraphRunner if llm.config.graphs else Runner


def finish(llm, requests):
    engine = llm.engine()
    for request in requests:
        engine.add(request)
    events = []
    while engine.has_work():
        events += engine.step()
        engine.check_integrity()
    return events


def failing(monkeypatch, owner, name, error, when):
    """`owner.name` raises the error in those calls for whose arguments `when` holds."""
    whole = getattr(owner, name)

    def call(*arguments, **options):
        if when(*arguments):
            raise error
        return whole(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("error", ERRORS, ids=["cuda", "cpu"])
def test_a_prompt_too_much_for_memory_ends_alone(llm, monkeypatch, error):
    want = llm.generate(PROMPTS, PARAMS)
    llm.cache.clear()
    failing(monkeypatch, runner_kind(llm), "prefill", error, lambda runner, tokens, start, pages: start == 16)
    requests = [llm.request(p, PARAMS, index=i) for i, p in enumerate(PROMPTS)]
    requests[1] = llm.request(PROMPTS[1], PARAMS.model_copy(update={"n": 2}), index=1)
    events = finish(llm, requests)
    for i in (0, 2):
        assert requests[i].output.token_ids == want[i].token_ids
    for sample in requests[1].output.outputs:
        assert sample.finish_reason == "error"
        assert sample.error.startswith("out of memory while prefilling positions 16 to 23: ")
        assert "\n" not in sample.error
        assert sum(event.output is sample for event in events) == 1
    llm.cache.check_integrity([])


def test_samples_that_forked_in_the_step_end_with_their_prompt(llm, monkeypatch):
    llm.cache.clear()
    failing(
        monkeypatch,
        runner_kind(llm),
        "prefill",
        ERRORS[0],
        lambda runner, tokens, start, pages: len(tokens) == 2,
    )
    request = llm.request(PROMPTS[0], PARAMS.model_copy(update={"n": 3}))
    finish(llm, [request])
    assert [o.finish_reason for o in request.output.outputs] == ["error"] * 3
    llm.cache.check_integrity([])


def test_a_round_too_much_for_memory_ends_the_youngest(llm, monkeypatch):
    want = llm.generate(PROMPTS, PARAMS)
    target = llm.target
    whole, calls = target.logits, []

    def logits(hidden):
        calls.append(len(hidden))
        if len(hidden) > 2 and len(calls) > 6:
            raise ERRORS[0]
        return whole(hidden)

    monkeypatch.setattr(target, "logits", logits)
    requests = [llm.request(p, PARAMS, index=i) for i, p in enumerate(PROMPTS)]
    finish(llm, requests)
    assert [r.output.token_ids for r in requests[:2]] == [o.token_ids for o in want[:2]]
    youngest = requests[2].output
    assert youngest.error.startswith("out of memory while decoding 3 requests together: CUDA out of memory")
    assert youngest.token_ids == want[2].token_ids[: len(youngest.token_ids)]
    assert 0 < len(youngest.token_ids) < 20
    llm.cache.check_integrity([])


def test_a_tree_too_much_for_memory_is_never_picked(folders, monkeypatch):
    llm = LLM(*folders, graphs=True, max_batch=1, page_size=16, max_budget=16)
    failing(monkeypatch, GraphRunner, "time_round", ERRORS[0], lambda runner, batch, plan: plan.slots > 8)
    output = llm.generate(PROMPTS[0], PARAMS)[0]
    assert output.finish_reason == "length"
    assert {record.padded_slots for record in output.rounds} <= {1, 8}
    assert max(record.padded_slots for record in output.rounds) == 8


def test_prompts_that_are_cancelled_before_a_round_leave_nothing_behind(llm):
    engine = llm.engine()
    for index in range(3):
        request = llm.request([3 + index] * 99, PARAMS, index=index)
        engine.add(request)
        engine.step()
        engine.cancel(request)
        assert {id(one) for one, _ in engine._prefilled} == {id(request)}


def test_other_errors_are_raised(llm, monkeypatch):
    failing(monkeypatch, runner_kind(llm), "prefill", RuntimeError("some fault"), lambda *_: True)
    engine = llm.engine()
    engine.add(llm.request(PROMPTS[0], PARAMS))
    with pytest.raises(RuntimeError, match="some fault"):
        engine.step()
    with pytest.raises(RuntimeError, match="abort it first"):
        engine.step()
    engine.abort()
    assert engine.step() == []
    llm.cache.check_integrity([])


class TestPool:
    """The number of pages, from what there is room for."""

    @pytest.fixture(scope="class")
    @classmethod
    def sizes(cls, folders):
        llm = LLM(*folders, max_batch=2, max_context=64, page_size=16)
        pools = llm.latents.pages.nbytes + llm.drafting.context.kv.nbytes
        return llm, pools // llm.allocator.n_pages

    def chosen(self, llm, **settings):
        config = llm.config.model_copy(update=settings)
        return choose_n_pages(
            llm.target.config,
            llm.drafting.drafter.config,
            config,
            max_context=config.max_context or 64,
            ranks=ALONE,
            dtype=llm.dtype,
            device=llm.device,
        )

    def test_enough_for_every_request_where_there_is_room(self, sizes):
        assert sizes[0].allocator.n_pages == 8

    def test_what_fits_where_there_is_less(self, sizes, monkeypatch):
        llm, page = sizes
        monkeypatch.setattr(pool_size, "CPU_BYTES", 6 * page - 1)
        assert self.chosen(llm) == 5
        assert self.chosen(llm, n_pages=7) == 7
        monkeypatch.setattr(pool_size, "CPU_BYTES", 3 * page)
        assert self.chosen(llm, max_context=None) == 3
        with pytest.raises(
            ValueError, match=r"max_context: a request of 64 tokens takes .* room for .*n_pages"
        ):
            self.chosen(llm)
        monkeypatch.setattr(pool_size, "CPU_BYTES", page - 1)
        with pytest.raises(ValueError, match="page_size: a page of 16 tokens"):
            self.chosen(llm, max_context=None)

    def test_the_context_is_what_the_pool_holds(self, folders, sizes, monkeypatch, caplog):
        monkeypatch.setattr(pool_size, "CPU_BYTES", 2 * sizes[1])
        llm = LLM(*folders, max_batch=2, page_size=16)
        assert (llm.allocator.n_pages, llm.max_context) == (2, 32)
        assert "room for 32 tokens of the model's 256" in caplog.text
        with pytest.raises(ValueError, match="prompt 0 has 32 tokens; the context holds 32"):
            llm.generate([[1] * 32])
        output = llm.generate([[1] * 20], SamplingParams(max_new_tokens=20, ignore_eos=True))[0]
        assert (output.finish_reason, len(output.token_ids)) == ("length", 12)

    def test_a_gpu_gives_what_rounds_leave(self, sizes, monkeypatch):
        llm, page = sizes
        takes = footprint(llm.target.config, llm.drafting.drafter.config, llm.config, Layout(itemsize=4))
        assert takes.page_bytes == page
        runtime, _ = takes.estimates
        beside = sum(line.per_gpu for line in (*takes.scratch, runtime))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (beside + 5 * page, 0))
        monkeypatch.setattr(pool_size, "_least", lambda ranks, size: size)
        monkeypatch.setattr(llm, "device", "cuda")
        assert self.chosen(llm) == 5
        assert self.chosen(llm, n_pages=8) == 8
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 * page, 0))
        with pytest.raises(ValueError, match=r"n_pages: 8 pages take .* of a GPU, and .* are free"):
            self.chosen(llm, n_pages=8)
