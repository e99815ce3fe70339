"""The soak on the CPU with a tiny pair in fp64, where every output must equal its solo run."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path

import pytest

from draftwood import LLM
from support.tiny import TARGET, write_drafter, write_target

FILE = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def soak():
    spec = util.spec_from_file_location("soak", FILE)
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_every_output_equals_its_solo_run(soak, tmp_path):
    folders = write_target(tmp_path / "t", 7), write_drafter(tmp_path / "d")
    common = {"dtype": "float64", "page_size": 2, "max_context": 48, "depth": 3, "prefill_chunk": 7}
    llm = LLM(*folders, **common, n_pages=24, max_batch=5, prefill_budget=10, budget=6)
    alone = LLM(*folders, **common, max_batch=1, prefix_cache=False)
    run = soak.Soak(llm, alone, vocab=TARGET["vocab_size"], longest=16, seed=3)
    levels = []
    while run.tally.rounds < 600:
        run.step()
        if run.tally.steps % 100 == 0:
            levels.append(soak.memory("cpu"))
    run.drain()
    tally = run.tally
    assert run.differences == []
    assert tally.checked > 200
    assert tally.preempted > 15
    assert tally.cancelled > 15
    assert tally.reused_tokens > 500
    assert tally.refused > 0
    assert {"stop", "length", "cancelled"} == set(tally.reasons)
    assert max(levels[3:]) <= max(levels[:3]) + 20  # one tensor a round would be hundreds
