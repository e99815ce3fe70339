"""Rounds recorded for short contexts: the same bits as with the whole page table, and room for all that a round may write."""

from __future__ import annotations

import random

import pytest

from draftwood import LLM, SamplingParams, config
from draftwood.engine.graphs import GraphRunner, table_columns

PAGE, PAGES = 16, 5  # of the longest request


@pytest.fixture
def widths(monkeypatch):
    """Columns of the page table in every round, each of which has been checked."""
    seen, step = [], GraphRunner._step

    def checked(self, held, plan, k, columns):
        seen.append(columns)
        result = step(self, held, plan, k, columns)
        state = held.state
        assert (state.page_table[:, columns:] == -1).all()
        pages = (state.prefix_len + PAGE - 1) // PAGE  # committed to, by now
        assert (pages[state.live] <= columns).all()
        for row in range(len(pages)):
            assert (state.page_table[row, : pages[row]] >= 0).all() or not state.live[row]
        return result

    monkeypatch.setattr(GraphRunner, "_step", checked)
    return seen


def make(folders, monkeypatch, contexts, **settings) -> LLM:
    monkeypatch.setattr(config, "CONTEXTS", contexts)
    return LLM(*folders, graphs=True, page_size=PAGE, max_context=PAGE * PAGES, **settings)


@pytest.mark.parametrize("how", [{"mode": "plain"}, {"mode": "chain"}, {"budget": 8}], ids=str)
def test_the_same_tokens(folders, monkeypatch, widths, how):
    """Through all widths, alone and in a batch whose rows cross their edges at different times."""
    prompts = [[3, 4, 5], [6, *range(1, 21)], list(range(1, 38))]
    params = [
        SamplingParams(max_new_tokens=new, temperature=t, seed=1, ignore_eos=True)
        for new, t in ((64, 0.0), (50, 0.9), (9, 1.2))
    ]
    found, used = [], []
    for contexts in ((), (PAGE, 3 * PAGE)):
        llm = make(folders, monkeypatch, contexts, deterministic=True, dtype="float32", max_batch=3)
        widths.clear()
        outputs = [*llm.generate(prompts, params, **how), *llm.generate(prompts[:1], params[:1], **how)]
        found.append([o.token_ids for o in outputs])
        used.append(set(widths))
    assert found[0] == found[1]
    assert used == [{PAGES}, {1, 3, PAGES}]


@pytest.mark.parametrize("seed", range(3))
def test_the_table_is_always_wide_enough(folders, monkeypatch, widths, seed):
    """A round ahead of the host, while requests come, fork, are cancelled and crowd each other out."""
    rng = random.Random(seed)
    llm = make(folders, monkeypatch, (2 * PAGE, 3 * PAGE), dtype="float64", max_batch=3, n_pages=9)
    engine, running = llm.engine(budget=8), []
    for _ in range(150):
        if rng.random() < 0.2:
            prompt = [rng.randrange(3, 40) for _ in range(rng.choice([1, 5, 15, 16, 17, 30]))]
            params = SamplingParams(
                max_new_tokens=rng.choice([1, 9, 30, 60]), n=rng.choice([1, 1, 2]), temperature=1.0, seed=seed
            )
            running.append(llm.request(prompt, params))
            engine.add(running[-1])
        if running and rng.random() < 0.05:
            engine.cancel(rng.choice(running))
        if engine.has_work():
            engine.step()
    assert set(widths) == {2, 3, PAGES}
    engine.abort()


def test_widths():
    at_1k, at_4k = 16, 64
    assert [table_columns(n, 64, 2048) for n in (0, 1, 16, 17, 64, 65, 2048)] == [
        *[at_1k] * 3,
        *[at_4k] * 2,
        *[2048] * 2,
    ]
    assert [table_columns(n, 64, 20) for n in (16, 17, 20)] == [16, 20, 20]
    assert table_columns(3, 64, 10) == 10
    assert table_columns(1, 3000, 1) == 1
