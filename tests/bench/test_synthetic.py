"""Targets from a config alone, and drafters whose acceptance is imposed."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from draftwood import SamplingParams
from draftwood.bench.generate import prompts
from draftwood.bench.generate.synthetic import SyntheticLLM, ranks
from support.kimi_configs import INT4
from support.tiny import TARGET, write_drafter


@pytest.mark.parametrize(
    ("temperature", "experts", "graphs"), [(0.0, "plain", False), (1.0, "int4", False), (1.0, "plain", True)]
)
def test_the_imposed_acceptance_is_what_comes_and_trees_gain(tmp_path, temperature, experts, graphs):
    """Two layers of a config of forty, with the cost of a drafter."""
    sizes = {"vocab_size": 200, "hidden_size": 96}
    config = TARGET | sizes | {"num_hidden_layers": 40, "moe_intermediate_size": 32}
    config |= {"quantization_config": INT4} if experts == "int4" else {}
    (tmp_path / "deep.json").write_text(json.dumps(config))
    drafter = write_drafter(tmp_path / "drafter", sizes) / "config.json"
    if graphs:  # as published: taps by default, spread over all forty
        published = json.loads(drafter.read_text())
        del published.get("dflash_config", published)["target_layer_ids"]
        drafter.write_text(json.dumps(published | {"num_target_layers": 40}))
    settings = {"device": "cpu", "dtype": "float32", "max_batch": 8, "max_context": 200, "graphs": graphs}
    llm = SyntheticLLM(tmp_path / "deep.json", drafter, 2, **settings)
    assert len(llm.target.layers) == 2
    assert (llm.target.config.quantization is not None) == (experts == "int4")
    llm.imposed.impose((0.7,))
    start = prompts.Uniform(200, 0).take(0, 8, 6)
    params = [
        SamplingParams(max_new_tokens=120, seed=i, ignore_eos=True, temperature=temperature) for i in range(8)
    ]
    plain = llm.generate(start, params, mode="plain")
    for prompt, output in zip(start, plain, strict=True):
        assert output.token_ids == [(prompt[-1] + 1 + i) % 200 for i in range(120)]
    per_round = {}
    for mode in ({"mode": "chain"}, {"mode": "tree", "budget": 16}):
        outputs = llm.generate(start, params, **mode)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        whole = [r for o in outputs for r in o.rounds[:-1]]
        per_round[mode["mode"]] = np.mean([r.emitted for r in whole])
        assert np.mean([r.expected for r in whole]) == pytest.approx(per_round[mode["mode"]], rel=0.15)
        assert all(("replay" in r.seconds) == graphs for r in whole)
    expected = sum(0.7**d for d in range(llm.imposed.max_depth + 1))
    assert per_round["chain"] == pytest.approx(expected, rel=0.15)
    assert per_round["tree"] > 1.15 * per_round["chain"]


def test_ranks_keep_their_order_at_any_rate():
    for rate in (0.1, 0.2, 0.5, 0.8, 0.99, 1.0):
        chances = ranks(rate, 32)
        assert sum(chances) == pytest.approx(1)
        assert chances[0] == rate
        assert all(a > b or b == 0 for a, b in itertools.pairwise(chances))
