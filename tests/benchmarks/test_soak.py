"""The soak on the CPU with a tiny pair in fp64, where every output must equal its solo run."""

from __future__ import annotations

import pytest

import soak
from draftwood import LLM
from support.tiny import TARGET, write_drafter, write_target


@pytest.mark.parametrize(("rounds", "settings"), [(600, {}), (300, {"graphs": True})], ids=str)
def test_every_output_equals_its_solo_run(tmp_path, rounds, settings):
    folders = write_target(tmp_path / "t", 7), write_drafter(tmp_path / "d")
    common = {"dtype": "float64", "page_size": 2, "max_context": 48, "prefill_chunk": 7, "depth": 3}
    crowded = {"n_pages": 24, "max_batch": 5, "prefill_budget": 10, "budget": 6}
    llm = LLM(*folders, **common, **crowded | settings)
    alone = LLM(*folders, **common, max_batch=1, prefix_cache=False)
    run = soak.Soak(llm, alone, vocab=TARGET["vocab_size"], longest=16, seed=3, at_limit=0.03)
    levels = []
    while run.tally.rounds < rounds:
        run.step()
        if run.tally.steps % 100 == 0:
            levels.append(soak.memory("cpu"))
    run.drain()
    tally = run.tally
    assert run.differences == []
    assert tally.checked > rounds / 4
    assert tally.preempted > 5
    assert tally.cancelled > 5
    assert tally.reused_tokens > rounds / 2
    assert tally.at_limit + tally.refused > 0
    assert {"stop", "length", "cancelled"} == set(tally.reasons)
    assert max(levels) <= min(levels) + 150  # one tensor a round would be more
