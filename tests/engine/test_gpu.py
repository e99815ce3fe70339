"""Replayed rounds on an NVIDIA GPU: the same tokens as rounds that are launched kernel by kernel, no word from the host, flat memory."""

from __future__ import annotations

import pytest
import torch

from draftwood import LLM, SamplingParams, config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PROMPTS = [
    "def fibonacci(n):\n",
    "import os\n\n",
    "class Node:\n    def __init__(self",
    "for i in range(",
    "x = {",
]
PARAMS = [
    SamplingParams(max_new_tokens=48, ignore_eos=True),
    SamplingParams(max_new_tokens=64, temperature=0.8, seed=1, ignore_eos=True),
    SamplingParams(max_new_tokens=30, temperature=1.0, top_p=0.9, seed=2, logprobs=3),
    SamplingParams(max_new_tokens=40, temperature=0.7, seed=3, repetition_penalty=1.2, stop="return"),
    SamplingParams(max_new_tokens=33, temperature=0.9, seed=4, n=2),
]


@pytest.fixture(scope="module")
def llms() -> dict[bool, LLM]:
    settings = {
        "device": "cuda",
        "dtype": "float32",
        "max_context": 256,
        "max_batch": 5,
        "prefix_cache": False,
    }
    return {graphs: LLM(graphs=graphs, **settings) for graphs in (False, True)}


def facts(outputs) -> list:
    return [(one.token_ids, one.text, one.finish_reason) for output in outputs for one in output.outputs]


@pytest.mark.parametrize(
    "how", [{"mode": "plain"}, {"mode": "chain"}, {"budget": 8}, {"budget": 32}, {"budget": "auto"}], ids=str
)
def test_same_tokens(llms, how):
    assert facts(llms[True].generate(PROMPTS, PARAMS, **how)) == facts(
        llms[False].generate(PROMPTS, PARAMS, **how)
    )
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        alone = llms[True].generate(prompt, params, **how)
        assert facts(alone) == facts(llms[False].generate(prompt, params, **how))
    llms[True].cache.check_integrity([])


@pytest.mark.parametrize("how", [{"mode": "plain"}, {"budget": 8}], ids=str)
def test_same_tokens_across_the_widths_of_page_tables(llms, how, monkeypatch):
    launched = facts(llms[False].generate(PROMPTS, PARAMS, **how))
    monkeypatch.setattr(config, "CONTEXTS", (64, 128))
    with LLM(
        graphs=True, device="cuda", dtype="float32", max_context=256, max_batch=5, page_size=16
    ) as narrow:
        assert facts(narrow.generate(PROMPTS, PARAMS, **how)) == launched
        runner = narrow.engine(**how).runner
        widths = {columns for held in runner._held.values() for _, _, columns in held.rounds}
    assert {4, 8} <= widths


def test_a_round_waits_for_nobody(llms):
    """Nothing between launching a recorded round and reading its results waits for the device, nor do new pages."""
    llm = llms[True]
    llm.generate(PROMPTS[:1], PARAMS[:1], budget=16)  # records
    engine = llm.engine(budget=16)
    engine.add(llm.request(PROMPTS[0], SamplingParams(max_new_tokens=100, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    runner = engine.runner
    plan = engine.speculation.plan(16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():  # as in a step
            flights = [runner.launch(plan)]
            runner.set_pages([(0, 0, engine.scheduler.active[0].pages[0])])
            flights.append(runner.launch(plan))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for flight in flights:
        runner.collect(flight)
    engine.abort()


def test_memory_is_flat(llms):
    llm = llms[True]
    params = [
        SamplingParams(max_new_tokens=20 + 7 * i, temperature=0.8, seed=i, ignore_eos=True) for i in range(5)
    ]
    for _ in range(2):
        llm.generate(PROMPTS, params, budget=16)
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(8):
        llm.generate(PROMPTS, params, budget=16)
    assert torch.cuda.memory_allocated() <= before[0] + 2**20
    assert torch.cuda.memory_reserved() <= before[1] + 2**22
