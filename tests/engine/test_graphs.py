"""Replayed rounds against rounds as written. Without CUDA a replay runs the step anew, on the same tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.drafting import RING, RingDrafting
from draftwood.engine import chunks, graphs
from draftwood.engine.graphs import GraphRunner
from draftwood.engine.placed import ALIGNED, leaves
from draftwood.engine.row import Row
from draftwood.engine.runner import Runner
from draftwood.kernels.tree_accept import Done
from draftwood.round import RoundPlan
from support.tiny import write_drafter, write_target

PLAIN, TREE, CHAIN = RoundPlan(1, 0, 1), RoundPlan(8, 3, 7), RoundPlan(4, 3, 1)
PAGE = 16


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    root = tmp_path_factory.mktemp("pair")
    folders = write_target(root / "target", 7), write_drafter(root / "drafter")
    return LLM(*folders, dtype="float64", max_batch=4, page_size=PAGE, budget=8)


def runner_of(llm: LLM, kind: type[Runner]) -> Runner:
    """A runner over the LLM's pools, with drafting of its own."""
    stages = llm._runner(llm.drafting).stages
    old = stages.drafting
    drafting = RingDrafting(old.drafter, old.target, old.context, old.kernels, old.rule)
    stages = replace(stages, drafting=drafting if kind is GraphRunner else old)
    return kind(stages, page_size=PAGE, max_context=llm.max_context, device="cpu")


def row(i: int, prompt: list[int], **params) -> Row:
    """Request i, which owns pages 4 i to 4 i + 3."""
    settings = {"max_new_tokens": 40, "ignore_eos": True} | params
    return Row(prompt, [], [4 * i + j for j in range(4)], 100 + i, SamplingParams(**settings), ())


def start(runner: Runner, rows: list[Row]) -> None:
    for r in rows:
        if len(r.prompt) > 1:
            runner.prefill(r.prompt[:-1], 0, r.pages)
    runner.begin(rows)


ROWS = [
    row(0, [3, 4, 5], temperature=0.9, logprobs=2),
    row(1, list(range(2, 20))),
    row(2, [9, 8], temperature=1.2, top_p=0.9, frequency_penalty=0.5, logit_bias={4: 2.0, 5: -1.0, 6: 0.5}),
]
PLANS = [TREE, PLAIN, PLAIN, CHAIN, PLAIN, TREE, TREE, *[PLAIN] * 4, TREE, PLAIN, PLAIN, TREE]


def facts(outcome, n: int) -> list:
    return [(r.emitted, r.done, r.slots, r.expected, r.logprobs, r.trace) for r in outcome.rows[:n]]


@pytest.mark.parametrize("early", [False, True])
def test_replayed_rounds_do_what_rounds_do(llm, early):
    """Sampled, filtered, penalised and greedy rows in one batch, plain and drafted rounds in turn, context included."""
    written, replayed = runner_of(llm, Runner), runner_of(llm, GraphRunner)
    replayed._early = early
    start(written, ROWS)
    want = [facts(written.round(plan, trace=True), 3) for plan in PLANS]
    context = llm.drafting.context.kv.clone()
    start(replayed, ROWS)
    assert [facts(replayed.round(plan, trace=True), 3) for plan in PLANS] == want
    assert len({tuple(r.emitted) for r in replayed.round(TREE).rows}) > 1
    end = min(len(r.prompt) + sum(len(w[i][0]) for w in want) - 1 for i, r in enumerate(ROWS))
    first = [r.pages[0] for r in ROWS]
    assert end >= PAGE
    torch.testing.assert_close(llm.drafting.context.kv[:, first], context[:, first])


def test_replayed_chunks_fill_what_chunks_fill(llm, monkeypatch):
    """In two chunks of any length, past the largest that is replayed too; padding touches no other page."""
    monkeypatch.setattr(chunks, "SIZES", (4, 16))
    runner, written = runner_of(llm, GraphRunner), runner_of(llm, Runner)
    prompt, page = list(range(2, 26)), [0, 1]
    for cut in (1, 3, 4, 9, 16, 20):
        found = []
        for kind in (written, runner):
            llm.latents.pages.fill_(torch.nan)
            llm.drafting.context.kv.fill_(torch.nan)
            for start, stop in ((0, cut), (cut, 24)):
                assert kind.prefill(prompt[start:stop], start, page).seconds() > 0
            found.append([x.clone() for x in (llm.latents.pages, llm.drafting.context.kv)])
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-9, atol=1e-9)
            assert got.isnan().any()
    assert set(runner._chunks) == {4, 16}
    llm.latents.pages.zero_()
    llm.drafting.context.kv.zero_()


def test_the_host_may_be_a_round_behind(llm):
    runner = runner_of(llm, GraphRunner)
    start(runner, ROWS)
    want = [facts(runner.round(plan), 3) for plan in PLANS]
    start(runner, ROWS)
    got = []
    flight = runner.launch(PLANS[0])
    for plan in PLANS[1:]:
        flight, oldest = runner.launch(plan), flight
        got.append(facts(runner.collect(oldest), 3))
    runner.begin(ROWS[:1])  # another batch changes nothing about what is in flight
    got.append(facts(runner.collect(flight), 3))
    assert got == want


def test_state_stays_where_it_is(llm):
    """Batches of one shape share tensors and recorded rounds; another shape has its own."""
    runner = runner_of(llm, GraphRunner)
    start(runner, ROWS)
    held = runner._now
    places = [leaf.data_ptr() for leaf in leaves(held.state)]
    assert all(place % ALIGNED == 0 for place in places)
    runner.round(TREE)
    recorded = dict(held.rounds)
    start(runner, [*ROWS, row(3, [1, 2])])
    runner.round(TREE)
    assert runner._now is held
    assert held.rounds == recorded
    assert [leaf.data_ptr() for leaf in leaves(held.state)] == places
    start(runner, [row(0, [3])])
    assert runner._now is not held


def test_states_of_one_size_share_the_ring(llm):
    """Plain rounds of one wait in it until another begins, and are in the context then."""
    runner, written = runner_of(llm, GraphRunner), runner_of(llm, Runner)
    contexts = []
    for kind in (written, runner):
        llm.drafting.context.kv.zero_()
        for one in (row(0, [3, 4, 5]), row(1, [6, 7, 8], frequency_penalty=0.5)):
            start(kind, [one])
            for _ in range(3):
                kind.round(PLAIN)
        kind.settle()
        contexts.append(llm.drafting.context.kv.clone())
    torch.testing.assert_close(*contexts)
    first, second = runner._held.values()
    assert first.ring is second.ring


def test_few_states_are_kept(llm, monkeypatch):
    """Whatever is asked for: rows, penalties, and as many biases and stop tokens as one likes."""
    monkeypatch.setattr(graphs, "MOST_HELD", 5)
    runner = runner_of(llm, GraphRunner)
    biases = [{"logit_bias": dict.fromkeys(range(n), 0.5)} for n in (0, 1, 5, 9, 17)]
    first = None
    for kept, params in enumerate([*biases, {"frequency_penalty": 0.5}, *biases], 1):
        start(runner, [row(0, [3, 4, 5], **params)])
        emitted = runner.round(TREE).rows[0].emitted
        first = first or emitted
        assert len(runner._held) == min(kept, 5)
        assert any(held is runner._now for held in runner._held.values())
    start(runner, [row(0, [3, 4, 5])])
    assert runner.round(TREE).rows[0].emitted == first
    for n in range(5):
        start(runner, [replace(row(0, [3, 4, 5], logprobs=n), stop_ids=tuple(range(90, 90 + n)))])
        runner.round(TREE)
    assert {k for _, k, _ in runner._now.rounds} == {None, 1, 2, 4}


def test_rows_that_are_done_stand_still(llm):
    """Whatever is launched after its end, a row writes no page but its own, and no other row notices."""
    runner = runner_of(llm, GraphRunner)
    short = row(0, [3, 4, 5], max_new_tokens=3)
    start(runner, [ROWS[1]])
    alone = [t for _ in range(6) for t in runner.round(TREE).rows[0].emitted]
    start(runner, [short, ROWS[1]])
    taken, done = [], Done.RUNNING
    prefix = None
    other = []
    for _ in range(6):
        outcome = runner.round(TREE)
        other += outcome.rows[1].emitted
        if done == Done.RUNNING:
            taken += outcome.rows[0].emitted
            done = outcome.rows[0].done
        elif prefix is None:
            prefix = runner._now.state.prefix_len[0].item()
            latents = llm.latents.pages[:, short.pages].clone()
    assert len(taken) == 3
    assert done == Done.LENGTH
    assert runner._now.state.prefix_len[0].item() == prefix
    assert other == alone
    used = prefix
    assert torch.equal(
        llm.latents.pages[:, short.pages].flatten(1, 2)[:, :used], latents.flatten(1, 2)[:, :used]
    )


def test_padding_writes_nothing(llm):
    runner = runner_of(llm, GraphRunner)
    start(runner, ROWS)  # three rows in a batch of four
    others = [p for p in range(llm.allocator.n_pages) if all(p not in r.pages for r in ROWS)]
    llm.latents.pages[:, others] = torch.nan
    llm.drafting.context.kv[:, others] = torch.nan
    for plan in PLANS:
        runner.round(plan)
    runner.settle()
    assert llm.latents.pages[:, others].isnan().all()
    assert llm.drafting.context.kv[:, others].isnan().all()
    llm.latents.pages.zero_()
    llm.drafting.context.kv.zero_()


def test_a_long_plain_stretch_empties_the_ring_in_time(llm):
    written, replayed = runner_of(llm, Runner), runner_of(llm, GraphRunner)
    plans = [*[PLAIN] * (RING + 3), TREE, TREE]
    rows = [row(0, [3, 4, 5]), row(1, [6])]
    start(written, rows)
    want = [facts(written.round(plan), 2) for plan in plans]
    start(replayed, rows)
    assert [facts(replayed.round(plan), 2) for plan in plans] == want


@pytest.mark.parametrize("kind", [Runner, GraphRunner])
def test_pages_change_hands_while_features_wait(llm, kind):
    """After plain rounds one page of an ended row is prefilled for another request, and one gets a copy of it."""
    runner = runner_of(llm, kind)
    heir = row(1, list(range(2, 19)))
    start(runner, [heir])
    want = llm.drafting.context.kv[:, heir.pages[0]].clone()
    ended = row(0, [3])
    start(runner, [ended])
    for _ in range(5):
        runner.round(PLAIN)
    first, second = ended.pages[:2]
    runner.prefill(heir.prompt[:-1], 0, [first])
    runner.copy_page(first, second)
    runner.begin([replace(heir, pages=[second])])
    runner.set_pages([(0, 1, first)])
    assert runner._state.page_table[0, :3].tolist() == [second, first, -1]
    runner.round(PLAIN)
    runner.settle()
    for page in (first, second):  # position 0 of the first is now position 16 of the row
        torch.testing.assert_close(llm.drafting.context.kv[:, page, 1:], want[:, 1:])


def test_timing_a_round_disturbs_nothing(llm):
    runner = runner_of(llm, GraphRunner)
    start(runner, ROWS)
    want = [facts(runner.round(plan), 3) for plan in PLANS]
    start(runner, ROWS)
    got = []
    for plan in PLANS:
        assert runner.time_round(4, TREE) > 0
        assert runner.time_round(2, PLAIN) > 0
        got.append(facts(runner.round(plan), 3))
    assert got == want


def test_misuse_is_named(llm):
    runner = runner_of(llm, GraphRunner)
    with pytest.raises(RuntimeError, match="no batch has begun"):
        runner.launch(TREE)
    with pytest.raises(ValueError, match="at most 128 requests"):
        runner.begin([ROWS[0]] * 129)
    stages = runner_of(llm, Runner).stages
    with pytest.raises(TypeError, match="keeps nothing on the host"):
        GraphRunner(stages, page_size=PAGE, max_context=64, device="cpu")
