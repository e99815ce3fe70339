"""The engine a round ahead of what it knows: the same outputs, whoever comes, goes, makes room or is cancelled."""

from __future__ import annotations

import numpy as np
import pytest

from draftwood import LLM, SamplingParams
from draftwood.config import EngineConfig
from draftwood.engine.graphs import GraphRunner
from support.tiny import write_drafter, write_target

PROMPTS = [[3, 4, 5], [6], list(range(1, 38)), [8, 9], [10, 11, 12, 13], [14, 15], list(range(1, 35))]
PARAMS = [
    SamplingParams(max_new_tokens=20, ignore_eos=True),
    SamplingParams(max_new_tokens=31, temperature=0.9, seed=5, logprobs=2),
    SamplingParams(max_new_tokens=12, temperature=1.1, seed=6, top_p=0.9, stop="t7"),
    SamplingParams(max_new_tokens=1),
    SamplingParams(max_new_tokens=40, temperature=1.3, seed=7, n=3, repetition_penalty=1.3),
    SamplingParams(max_new_tokens=25, temperature=0.7, seed=8, stop_token_ids=(9, 12)),
    SamplingParams(max_new_tokens=9, ignore_eos=True),
]
SETTINGS = {"dtype": "float64", "max_batch": 3, "page_size": 16, "n_pages": 9, "prefill_budget": 16}


@pytest.fixture(scope="module")
def llms(tmp_path_factory) -> dict[bool, LLM]:
    root = tmp_path_factory.mktemp("pair")
    folders = write_target(root / "target", 7), write_drafter(root / "drafter")
    return {graphs: LLM(*folders, graphs=graphs, **SETTINGS) for graphs in (False, True)}


def facts(outputs) -> list:
    return [
        (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs)
        for output in outputs
        for one in output.outputs
    ]


@pytest.mark.parametrize(
    "how", [{"mode": "plain"}, {"mode": "chain"}, {"budget": 8}, {"budget": "auto"}], ids=str
)
def test_same_outputs(llms, how):
    """More requests than places, fewer pages than they want, stops found on the host, samples that fork."""
    want = facts(llms[False].generate(PROMPTS, PARAMS, **how))
    outputs = llms[True].generate(PROMPTS, PARAMS, **how)
    assert facts(outputs) == want
    llms[True].cache.check_integrity([])
    assert max(r.batch for o in outputs for r in o.rounds) > 1


@pytest.mark.parametrize("how", [{"mode": "plain"}, {"budget": 8}], ids=str)
def test_no_round_is_launched_in_vain(llms, monkeypatch, how):
    """Where the round in flight may be the last of all, the engine waits for it; else it works ahead."""
    seen, launch, collect = [], GraphRunner.launch, GraphRunner.collect
    monkeypatch.setattr(GraphRunner, "launch", lambda self, plan: seen.append("launch") or launch(self, plan))
    monkeypatch.setattr(
        GraphRunner,
        "collect",
        lambda self, flight, **kw: seen.append("collect") or collect(self, flight, **kw),
    )
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    (output,) = llms[True].generate([PROMPTS[0]], params, **how)
    assert seen.count("launch") == seen.count("collect") == len(output.rounds)
    assert seen[:3] == ["launch", "launch", "collect"]


def test_what_a_round_in_flight_writes_again_is_not_reused(tmp_path, monkeypatch):
    """It may choose another token than the row's last round did, where two are close: here it leaves nothing fit for use."""
    folders = write_target(tmp_path / "target", 7), write_drafter(tmp_path / "drafter")
    llm = LLM(*folders, graphs=True, dtype="float64", page_size=2, budget=8)
    launch, spoilt = GraphRunner.launch, []

    def spoiling(self, plan):
        root, stands = self._state.prefix_len[0].item(), not self._state.live[0]
        flight = launch(self, plan)
        if stands:
            spoilt.append(root)
            for at in range(root + 1, root + 1 + plan.depth):
                llm.latents.pages[:, self._state.page_table[0, at // 2], at % 2] = np.nan
        return flight

    monkeypatch.setattr(GraphRunner, "launch", spoiling)
    (free,) = llm.generate(
        [[3, 4, 5]], SamplingParams(max_new_tokens=30, ignore_eos=True, seed=1, temperature=0.8)
    )
    assert free.rounds[0].emitted == 2
    assert not spoilt
    llm.cache.clear()
    stop = SamplingParams(max_new_tokens=30, stop_token_ids=(free.token_ids[1],), seed=1, temperature=0.8)
    (ended,) = llm.generate([[3, 4, 5]], stop)
    assert ended.token_ids == free.token_ids[:2]
    assert spoilt == [2]
    (after,) = llm.generate([[3, 4, 5, *free.token_ids[:4]]], SamplingParams(max_new_tokens=3))
    assert after.cached_tokens == 2
    assert after.error is None


def test_events_add_up(llms):
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    ids = [[] for _ in PROMPTS]
    for event in llms[True].stream(PROMPTS, params, budget=8):
        ids[event.index] += event.token_ids
    assert ids == [o.token_ids for o in llms[False].generate(PROMPTS, params, budget=8)]


def test_cancelled_at_any_step(llms):
    """Others are as they would have been; the engine is as good as new."""
    want = {i: o.token_ids for i, o in enumerate(llms[False].generate(PROMPTS[:3], PARAMS[:3], budget=8))}
    for at in range(1, 9):
        engine = llms[True].engine(budget=8)
        requests = [
            llms[True].request(p, s, index=i)
            for i, (p, s) in enumerate(zip(PROMPTS[:3], PARAMS[:3], strict=True))
        ]
        for request in requests:
            engine.add(request)
        steps = 0
        while engine.has_work():
            engine.step()
            engine.check_integrity()
            steps += 1
            if steps == at:
                engine.cancel(requests[1])
        assert requests[0].output.token_ids == want[0]
        assert requests[2].output.token_ids == want[2]
        n = len(requests[1].output.token_ids)
        assert requests[1].output.token_ids == want[1][:n]
    assert [o.token_ids for o in llms[True].generate(PROMPTS[:3], PARAMS[:3], budget=8)] == list(
        want.values()
    )


def test_an_abandoned_stream_leaves_nothing_in_flight(llms):
    params = SamplingParams(max_new_tokens=50, ignore_eos=True)
    for steps in (1, 2, 3):
        stream = llms[True].stream(PROMPTS, params, budget=8)
        for _ in range(steps):
            next(stream)
        stream.close()
        llms[True].cache.check_integrity([])
    assert facts(llms[True].generate(PROMPTS, params, budget=8)) == facts(
        llms[False].generate(PROMPTS, params, budget=8)
    )


def test_joining_at_random(llms):
    """Requests added between steps, in two engines' worth of orders; each output equals its solo run."""
    params = [SamplingParams(max_new_tokens=14, temperature=0.8, seed=i, ignore_eos=True) for i in range(7)]
    want = [llms[False].generate([p], s, budget=8)[0].token_ids for p, s in zip(PROMPTS, params, strict=True)]
    for seed in range(4):
        rng = np.random.default_rng(seed)
        engine = llms[True].engine(budget=["auto", 8, 4, 8][seed])
        requests = [
            llms[True].request(p, s, index=i) for i, (p, s) in enumerate(zip(PROMPTS, params, strict=True))
        ]
        left = list(rng.permutation(7))
        while left or engine.has_work():
            while left and (rng.random() < 0.4 or not engine.has_work()):
                engine.add(requests[left.pop()])
            engine.step()
            engine.check_integrity()
        assert [r.output.token_ids for r in requests] == want


@pytest.mark.parametrize("other", ["tree", "plain"])
def test_engines_take_turns(llms, other):
    """Each launches rounds ahead on one runner, with a batch of its own; one is left with a round in flight."""
    params = [SamplingParams(max_new_tokens=14, temperature=0.8, seed=i, ignore_eos=True) for i in range(4)]
    want = [
        llms[False].generate([p], s, budget=8)[0].token_ids for p, s in zip(PROMPTS, params, strict=False)
    ]
    engines = [llms[True].engine(budget=8), llms[True].engine(mode=other, budget=8)]
    requests = [llms[True].request(p, s) for p, s in zip(PROMPTS, params, strict=False)]
    for i, request in enumerate(requests):
        engines[i % 2].add(request)
    turns = 0
    while any(engine.has_work() for engine in engines):
        for engine in engines:
            for _ in range(1 + turns % 3):
                engine.step()
        engines[0].cache.check_integrity(r.pages for r in requests)
        turns += 1
    assert [r.output.token_ids for r in requests] == want
    abandoned = llms[True].request(PROMPTS[0], params[0])
    engines[0].add(abandoned)
    engines[0].step()
    engines[0].cancel(abandoned)
    assert [llms[True].generate([PROMPTS[1]], params[1], budget=8)[0].token_ids] == want[1:2]
    llms[True].cache.check_integrity([])


def test_rounds_are_replayed_by_default_where_that_has_run():
    def replayed(**settings):
        return EngineConfig(**settings).with_graphs(where_open=True).graphs

    assert replayed()
    assert replayed(tp=2, graphs=True)
    assert not replayed(tp=2)
    assert not replayed(max_batch=129)
    assert not replayed(graphs=False)
    assert not EngineConfig().with_graphs(where_open=False).graphs


def test_settings_that_do_not_go_together():
    with pytest.raises(ValueError, match="max_batch: at most 128 with graphs"):
        LLM(graphs=True, max_batch=129)
