"""The engine as a machine: streaming, batches, pages, logprobs, faults, statistics."""

from __future__ import annotations

import gc
from itertools import cycle

import numpy as np
import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.drafting import MOST_WAITING
from draftwood.engine.budget import BudgetController, CostTable
from draftwood.scores import NEUTRAL, ScoreRule
from support.scripted import ScriptedDrafting
from support.tiny import TARGET, write_drafter, write_target

PROMPTS = [[3, 4, 5], [6], list(range(1, 38)), [8, 9], [10, 11, 12, 13], [14, 15]]


@pytest.fixture
def llm(folders) -> LLM:
    return LLM(*folders, dtype="float64", max_batch=4, page_size=16, budget=8)


def test_stream_adds_up_to_the_output(llm):
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    whole = llm.generate(PROMPTS, params)
    texts, ids = [""] * len(PROMPTS), [[] for _ in PROMPTS]
    for event in llm.stream(PROMPTS, params):
        texts[event.index] += event.text
        ids[event.index] += event.token_ids
    assert texts == [o.text for o in whole]
    assert ids == [o.token_ids for o in whole]
    assert all(o.text == llm.tokenizer.decode(o.token_ids) for o in whole)


def test_one_prompt_or_many_text_or_ids(llm):
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    by_text = llm.generate("t3 t4 t5", params)
    by_ids = llm.generate([3, 4, 5], params)
    both = llm.generate(["t3 t4 t5", [6]], params)
    assert by_text[0].token_ids == by_ids[0].token_ids == both[0].token_ids
    with pytest.raises(ValueError, match="params: 2 given for 1 prompts"):
        llm.generate("t3", [params, params])


def test_more_prompts_than_places_and_pages(folders):
    """Requests wait for places and pages; every output equals its solo run; all pages come back."""
    llm = LLM(*folders, dtype="float64", max_batch=3, page_size=16, n_pages=5, budget=8)
    params = [SamplingParams(max_new_tokens=5 + 3 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    together = llm.generate(PROMPTS, params)
    alone = [llm.generate([p], s)[0] for p, s in zip(PROMPTS, params, strict=True)]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert max(r.batch for o in together for r in o.rounds) > 1
    llm.cache.check_integrity([])


def test_a_request_larger_than_the_pool_is_refused(folders):
    llm = LLM(*folders, page_size=16, n_pages=2)
    with pytest.raises(ValueError, match="needs 3 cache pages"):
        llm.generate([[3] * 30], SamplingParams(max_new_tokens=10))
    llm.cache.check_integrity([])


def test_an_abandoned_stream_gives_its_pages_back(llm):
    stream = llm.stream(PROMPTS, SamplingParams(max_new_tokens=50, ignore_eos=True))
    next(stream)
    assert llm.allocator.n_free < llm.allocator.n_pages
    stream.close()
    llm.cache.check_integrity([])


def test_two_streams_of_one_engine_interleave(llm):
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    want = [o.token_ids for o in llm.generate(PROMPTS[:2], params)]
    streams = [llm.stream([p], params) for p in PROMPTS[:2]]
    ids = [[], []]
    live = {0, 1}
    while live:
        for i in sorted(live):
            event = next(streams[i], None)
            if event is None:
                live.discard(i)
            else:
                ids[i] += event.token_ids
    assert ids == want


@pytest.mark.parametrize("mode", ["plain", "chain", "tree"])
def test_logprobs(llm, mode):
    """Of emitted tokens, before temperature and penalties, the same in every mode."""
    params = SamplingParams(max_new_tokens=9, ignore_eos=True, logprobs=3, temperature=0.7, seed=4, top_k=3)
    out, silent = llm.generate([[3, 4], [5]], [params, SamplingParams(max_new_tokens=9)], mode=mode)
    assert silent.logprobs is None
    assert [t.token_id for t in out.logprobs] == out.token_ids
    want = llm.generate([[3, 4]], params, mode="plain")[0].logprobs
    for have, expected in zip(out.logprobs, want, strict=True):
        assert have.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert [t for t, _ in have.top] == [t for t, _ in expected.top]
        assert len(have.top) == 3
        assert have.logprob <= have.top[0][1] + 1e-6
        assert sum(np.exp(lp) for _, lp in have.top) <= 1 + 1e-6


def test_nan_logits_end_their_request_and_no_other(llm, monkeypatch):
    want = llm.generate(PROMPTS, SamplingParams(max_new_tokens=10, ignore_eos=True))
    original = type(llm.target).logits
    calls = 0

    def poisoned(self, hidden):
        nonlocal calls
        logits = original(self, hidden)
        if hidden.shape[0] == 4 and hidden.shape[1] == 8 and calls < 1:  # a verify pass of the full batch
            calls += 1
            logits[1] = torch.nan
        return logits

    monkeypatch.setattr(type(llm.target), "logits", poisoned)
    outputs = llm.generate(PROMPTS, SamplingParams(max_new_tokens=10, ignore_eos=True))
    assert calls == 1
    assert outputs[1].finish_reason == "error"
    assert "not finite" in outputs[1].error
    for i in (0, 2, 3, 4, 5):
        assert outputs[i].token_ids == want[i].token_ids
    llm.cache.check_integrity([])


def test_nan_in_the_drafter_costs_speed_only(llm, monkeypatch):
    want = llm.generate(PROMPTS[:2], SamplingParams(max_new_tokens=10, ignore_eos=True))
    monkeypatch.setattr(
        type(llm.drafting),
        "logits",
        lambda self, state, depth: torch.full((len(state.root), depth, 40), torch.nan),
    )
    outputs = llm.generate(PROMPTS[:2], SamplingParams(max_new_tokens=10, ignore_eos=True))
    assert [o.token_ids for o in outputs] == [o.token_ids for o in want]
    assert all(r.slots == 1 for o in outputs for r in o.rounds)


def test_records_count_what_happened(llm):
    plain = llm.generate([[3, 4]], SamplingParams(max_new_tokens=25, ignore_eos=True), mode="plain")[0]
    llm.drafting = ScriptedDrafting({1: [3, 4, *plain.token_ids]}, TARGET["vocab_size"], "perfect", 4)
    out = llm.generate(
        [[3, 4]], SamplingParams(max_new_tokens=25, ignore_eos=True, seed=1), budget=8, trace=True
    )[0]
    assert len(plain.rounds) == 25
    assert len(out.rounds) == 5
    assert out.tokens_per_round == 5.0
    for record in out.rounds:
        assert record.emitted == record.accepted + 1 == 5
        assert record.slots == len(record.trace.tokens) == 8
        assert record.trace.emitted[:-1] == [record.trace.tokens[s] for s in record.trace.path[1:]]
        assert set(record.seconds) == {"draft", "build", "verify", "accept", "commit"}
    assert set(out.stage_seconds) == {"prefill", "draft", "build", "verify", "accept", "commit"}


def test_drafter_context_is_the_same_however_it_was_made(folders):
    """Prefilled in chunks or committed round by round, the context K/V of a position is the same."""
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    llm = LLM(*folders, dtype="float64", max_batch=1, budget=8)
    text = [3, 4, 5, *llm.generate([[3, 4, 5]], params)[0].token_ids]
    n = len(text) - 1  # the last token is in no page
    llm.drafting.catch_up()
    grown = llm.drafting.context.kv.flatten(1, 2)[:, : 64 * 1].clone()
    llm = LLM(*folders, dtype="float64", max_batch=1, budget=8, prefill_chunk=7)
    llm.generate([text], SamplingParams(max_new_tokens=1))
    prefilled = llm.drafting.context.kv.flatten(1, 2)[:, :64]
    torch.testing.assert_close(grown[:, :n], prefilled[:, :n], rtol=0, atol=1e-10)
    assert grown[:, :n].abs().amin(dim=(0, 2, 3, 4)).gt(0).all()


@pytest.mark.parametrize("drafted", [(True, False, False, False), (False,)])
def test_plain_rounds_enter_the_context_together(folders, monkeypatch, drafted):
    """Features of rounds without drafts wait; more than fit are projected on the way, and the rest on demand."""
    pattern = cycle(drafted)
    monkeypatch.setattr(BudgetController, "wants_draft", lambda self: next(pattern))
    params = SamplingParams(max_new_tokens=MOST_WAITING + 20, ignore_eos=True)
    llm = LLM(*folders, dtype="float64", max_batch=1, prefix_cache=False)
    prompts = [[3, 4, 5], [7], [9, 9]]  # the pages of a finished request serve the next one
    outputs = llm.generate(prompts, params, budget="auto")
    text = [*prompts[-1], *outputs[-1].token_ids]
    llm.drafting.catch_up()
    grown = llm.drafting.context.kv.flatten(1, 2)[:, : len(text) - 1].clone()
    llm = LLM(*folders, dtype="float64", max_batch=1, budget=8)
    llm.generate([text], SamplingParams(max_new_tokens=1))
    prefilled = llm.drafting.context.kv.flatten(1, 2)[:, : len(text) - 1]
    torch.testing.assert_close(grown, prefilled, rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 3, 16, 256])
def test_prefill_chunks_do_not_matter(folders, chunk):
    llm = LLM(*folders, dtype="float64", prefill_chunk=chunk, budget=8)
    want = LLM(*folders, dtype="float64", budget=8)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    assert llm.generate([PROMPTS[2]], params)[0].token_ids == want.generate([PROMPTS[2]], params)[0].token_ids


def test_one_bad_request_does_not_spoil_the_next(folders):
    """Budget auto backs off on text the drafter cannot guess, and is back on the next request."""
    llm = LLM(*folders, dtype="float64", max_batch=1, budget="auto")
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, seed=1)
    plain = llm.generate([[3, 4]], params, mode="plain")[0]
    texts = {1: [3, 4, *plain.token_ids]}
    cost = CostTable(lambda n: 1e-3 * (1 + 0.1 * n), (1, 2, 4, 8, 16, 32, 64))
    controller = llm._controller = BudgetController(cost, [3e-4] * 5)
    learn = controller.observe_draft  # from acceptance only: this machine's timing noise is not the subject
    controller.observe_cost = lambda rows, seconds: None
    controller.observe_draft = lambda promised, accepted, depth, _: learn(
        promised, accepted, depth, {"draft": 3e-4, "build": 0}
    )
    for style, least in (("adversarial", 30), ("perfect", 20)):
        llm.drafting = ScriptedDrafting(texts, TARGET["vocab_size"], style, 5)
        out = llm.generate([[3, 4]], params)[0]
        assert out.token_ids == plain.token_ids
        drafted = sum(r.padded_slots > 1 for r in out.rounds)
        if style == "adversarial":
            assert len(out.rounds) == 60
            assert drafted < least
        else:
            assert len(out.rounds) <= least


def test_one_drafter_pass_and_one_target_pass_per_round(llm, monkeypatch):
    calls = {"target": 0, "drafter": 0}

    def counted(module, name):
        original = type(module).forward

        def forward(self, *args, **kwargs):
            calls[name] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(type(module), "forward", forward)

    counted(llm.target, "target")
    counted(llm.drafting.drafter, "drafter")
    out = llm.generate([[3]], SamplingParams(max_new_tokens=12, ignore_eos=True))[0]
    assert calls == {"target": len(out.rounds), "drafter": len(out.rounds)}


def test_a_tree_accepts_at_least_its_own_spine(folders):
    """Per round, under the same drafts: a tree that holds the whole chain never accepts less than the chain."""
    llm = LLM(folders[0], dtype="float64", max_batch=1, mode="plain")
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, seed=1)
    plain = llm.generate([[3, 4]], params)[0]
    texts = {1: [3, 4, *plain.token_ids]}
    rounds = {}
    for mode in ("chain", "tree"):
        llm.drafting = ScriptedDrafting(texts, TARGET["vocab_size"], "perfect", 5)
        rounds[mode] = len(llm.generate([[3, 4]], params, mode=mode, budget=24)[0].rounds)
    assert rounds["tree"] <= rounds["chain"]


@pytest.mark.parametrize("vocab", [1, 2, 3])
def test_tiny_vocabularies_and_depth_one(tmp_path, vocab):
    shape = {"vocab_size": vocab, "eos_token_id": 0, "bos_token_id": None}
    drafter = {"dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 1]}}
    target = write_target(tmp_path / "t", 3, **shape)
    llm = LLM(target, write_drafter(tmp_path / "d", shape, **drafter), dtype="float64", depth=1)
    params = SamplingParams(max_new_tokens=7, ignore_eos=True, logprobs=5, temperature=1.0, seed=2)
    plain = llm.generate([[0]], params, mode="plain")[0]
    for budget in (1, 2, 16, 128):
        assert llm.generate([[0]], params, budget=budget)[0].token_ids == plain.token_ids
    assert len(plain.logprobs[0].top) == min(5, vocab)


def test_a_branch_without_choice_harms_nobody_off_its_path(llm):
    """Only the path counts: a drafted token that penalties leave without successors ends nothing it is not on."""
    only = {v: float("-inf") for v in range(1, 40)}
    params = SamplingParams(max_new_tokens=1, logit_bias=only, temperature=0.0, seed=1)
    llm.drafting = ScriptedDrafting({1: [3, 4, 0, 0, 0]}, TARGET["vocab_size"], "perfect", 4)
    for mode in ("plain", "tree", "chain"):
        assert llm.generate([[3, 4]], params, mode=mode)[0].token_ids == [0]


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_forbidding_every_token_is_an_error_that_says_so(llm, mode):
    params = SamplingParams(max_new_tokens=5, logit_bias=dict.fromkeys(range(40), float("-inf")))
    bad, good = llm.generate([[3, 4], [5]], [params, SamplingParams(max_new_tokens=5)], mode=mode)
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert "output position 0" in bad.error
    assert "logit_bias" in bad.error
    assert good.finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "foo"}, "mode"),
        ({"budget": 129}, "budget"),
        ({"budget": 0}, "budget"),
        ({"budget": 3.5}, "budget"),
        ({"budget": True}, "budget"),
    ],
)
def test_wrong_overrides_are_named_at_the_call(llm, arguments, message):
    with pytest.raises(ValueError, match=message):
        llm.stream([[3]], **arguments)


def test_prompts_of_the_wrong_kind_are_named(llm):
    for prompt in ([[3.7]], [[None]], ["\ud800"]):
        with pytest.raises(ValueError, match="prompt 0"):
            llm.stream(prompt)
    with pytest.raises(ValueError, match="params: expected SamplingParams"):
        llm.stream([[3]], {"temperature": 1.0})
    llm.config = llm.config.model_copy(update={"depth": 9})
    with pytest.raises(ValueError, match="depth: 9 is beyond the drafter's 5"):
        llm.stream([[3]])


@pytest.mark.parametrize("page", [1, 16, 64])
def test_page_sizes_do_not_matter(folders, page):
    llm = LLM(*folders, dtype="float64", page_size=page, max_context=80, budget=8)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=1.0, seed=5)
    want = LLM(*folders, dtype="float64", max_context=80, budget=8).generate([PROMPTS[2]], params)[0]
    assert llm.generate([PROMPTS[2]], params)[0].token_ids == want.token_ids


def test_memory_is_flat_over_many_rounds_of_changing_batches(llm):
    """Hundreds of rounds with batches of one and of four: live tensors do not pile up."""
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)

    def tensors() -> int:
        gc.collect()
        return sum(type(o) is torch.Tensor for o in gc.get_objects())

    counts = []
    for _ in range(4):
        for prompts in (PROMPTS[:4], PROMPTS[:1], PROMPTS[:4]):
            llm.generate(prompts, params)
        counts.append(tensors())
    assert counts[-1] <= counts[1]


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_score_rules_change_trees_and_never_the_output(llm, coupled, temperature):
    params = SamplingParams(max_new_tokens=16, ignore_eos=True, temperature=temperature, seed=3)
    llm.config = llm.config.model_copy(update={"noise_coupled": coupled})
    plain = llm.generate(PROMPTS[:3], params, mode="plain")
    shapes = set()
    for rule in (NEUTRAL, ScoreRule(sharpness=1.4, noise=(1.2, 0.7), coldest=0.47), ScoreRule(sharpness=9.0)):
        llm.drafting.rule = rule
        outputs = llm.generate(PROMPTS[:3], params, trace=True)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        shapes.add(tuple(tuple(r.trace.parents) for o in outputs for r in o.rounds))
    assert len(shapes) > 1
