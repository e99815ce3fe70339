"""Attention beside FlashMLA: what both are given is the same, and the table says what was found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import verify_attn_peers as script
from draftwood.bench.catalog import load_file, read_peer
from draftwood.kernels.case import make_case
from draftwood.kernels.run_case import torch_inputs
from draftwood.kernels.verify_attn import cases

FOLDER = Path(__file__).parents[2] / "benchmarks"
PEER = FOLDER / "peers" / "flashmla.py"


def case(**axes):
    return make_case("verify_attn", cases.DEFAULTS, **{"B": 2, "T": 5, "H": 2, "tree": "chain", **axes})


def test_the_peer_gets_the_prefix_and_then_the_tree_in_pages():
    c = case(prefix=130)
    inputs = torch_inputs(c, cases.make(c), "cpu")
    pool, table, lengths = load_file(PEER)._paged(inputs)
    assert lengths.tolist() == [135, 135]
    for b in range(2):
        keys = pool[table[b].long()].view(-1, 576)[:135]
        prefix = inputs["pages"][inputs["page_table"][b, :3].long()].view(-1, 576)[:130]
        torch.testing.assert_close(keys, torch.cat((prefix, inputs["tree_kv"][b])), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("axes", "message"), [({"tree": "random"}, "causal"), ({"dtype": "float32"}, "bfloat16")]
)
def test_the_peer_refuses_what_it_cannot_do(axes, message):
    c = case(prefix=10, **axes)
    assert read_peer(PEER).mask is None
    with pytest.raises(NotImplementedError, match=message):
        load_file(PEER).build(c, torch_inputs(c, cases.make(c), "cpu"))


def test_sixty_shapes():
    jobs = script.jobs_of(("hopper", "triton", "peer:flash_mla"), list(script.GROUPS))
    assert len({job.case for job in jobs}) == 60
    assert [len([j for j in jobs if j.cache == cache]) for cache in ("warm", "cold")] == [180, 88]


def test_a_line_has_ratio_interval_and_trouble():
    shape = (1, 32, 8, 16384)
    axes = dict(zip(("B", "T", "H", "prefix"), shape, strict=True))
    us = {
        ("warm", "hopper"): 20.0,
        ("warm", "triton"): 50.0,
        ("warm", "peer:flash_mla"): 30.0,
        ("cold", "hopper"): 25.0,
    }
    rows = [
        {"case": axes, "cache": cache, "impl": impl, "median_us": t, "status": "ok", "ceiling_share": 0.5}
        for (cache, impl), t in us.items()
    ]
    rows[1]["status"] = "noisy"
    versus = [{"case": axes, "cache": "warm", "impl": "hopper", "ratio": 2 / 3, "low": 0.5, "high": 0.8}]
    suite = SimpleNamespace(rows=rows, versus=versus)
    lines = list(script.lines_of("one rank of eight", suite, "peer:flash_mla"))
    assert lines[1] == (
        *("1 x 32 x 8, 16384", "20.0", "30.0", "1.50 [1.25, 2.00]", "25.0", "", ""),
        *("50.0", "2.50", "50%", "triton noisy"),
    )
    assert lines[-1][3] == "1.50, 1.50"
