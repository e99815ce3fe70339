"""Where memory does not suffice: one request ends and says so, the others go on."""

from __future__ import annotations

import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.engine.runner import Runner
from support.tiny import write_drafter, write_target

PROMPTS = [[3, 4, 5], list(range(1, 30)), [6, 7]]
PARAMS = SamplingParams(max_new_tokens=20, ignore_eos=True, logprobs=1)
ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    return write_target(root / "target", 7), write_drafter(root / "drafter")


@pytest.fixture(scope="module", params=[False, True], ids=["eager", "graphs"])
def llm(folders, request) -> LLM:
    settings = {"max_batch": 4, "page_size": 16, "budget": 8, "prefill_chunk": 8, "prefill_budget": 64}
    return LLM(*folders, dtype="float64", graphs=request.param, **settings)


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
    failing(monkeypatch, Runner, "prefill", error, lambda runner, tokens, start, pages: start == 16)
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
    failing(monkeypatch, Runner, "prefill", ERRORS[0], lambda runner, tokens, start, pages: len(tokens) == 2)
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


def test_other_errors_are_raised(llm, monkeypatch):
    failing(monkeypatch, Runner, "prefill", RuntimeError("some fault"), lambda *_: True)
    engine = llm.engine()
    engine.add(llm.request(PROMPTS[0], PARAMS))
    with pytest.raises(RuntimeError, match="some fault"):
        engine.step()
    engine.abort()
    llm.cache.check_integrity([])
