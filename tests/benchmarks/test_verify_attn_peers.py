"""Attention beside FlashMLA and FlashAttention-3: what all are given is the same, and the table says what was found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import verify_attn_peers as script
from draftwood.bench.catalog import Catalog, load_file, read_peer
from draftwood.kernels.case import make_case
from draftwood.kernels.run_case import torch_inputs
from draftwood.kernels.verify_attn import cases

FOLDER = Path(__file__).parents[2] / "benchmarks"
PEERS = [FOLDER / "peers" / f"{name}.py" for name in script.PEERS]


RIVALS = "peer:flash_mla", "peer:flash_attention_3"


def case(**axes):
    return make_case("verify_attn", cases.DEFAULTS, **{"B": 2, "T": 5, "H": 2, "tree": "chain", **axes})


def test_a_peer_gets_the_prefix_and_then_the_tree_in_pages():
    c = case(prefix=130)
    inputs = torch_inputs(c, cases.make(c), "cpu")
    pool, table, lengths = load_file(PEERS[0]).paged(inputs)
    assert lengths.tolist() == [135, 135]
    for b in range(2):
        keys = pool[table[b].long()].view(-1, 576)[:135]
        prefix = inputs["pages"][inputs["page_table"][b, :3].long()].view(-1, 576)[:130]
        torch.testing.assert_close(keys, torch.cat((prefix, inputs["tree_kv"][b])), rtol=0, atol=0)


@pytest.mark.parametrize("peer", PEERS, ids=lambda p: p.stem)
@pytest.mark.parametrize(
    ("axes", "message"), [({"tree": "random"}, "causal"), ({"dtype": "float32"}, "bfloat16"), ({}, "library")]
)
def test_a_peer_refuses_what_it_cannot_do(peer, axes, message, monkeypatch):
    c = case(prefix=10, **{"dtype": "bfloat16", **axes})
    monkeypatch.delenv(script.PEERS[peer.stem], raising=False)
    assert read_peer(peer).mask is None
    with pytest.raises(NotImplementedError, match=message):
        load_file(peer).build(c, torch_inputs(c, cases.make(c), "cpu"))


class Library:
    """Stands in for the library of FlashAttention-3: notes arguments, and answers as many splits as it is told."""

    def __init__(self, splits):
        self.splits, self.given = splits, {}

    def fa3_metadata_ints(self, B):
        return 4 * B + 1

    def fa3_splits(self, *shape):
        self.given["splits"] = shape
        return self.splits

    def fa3_plan(self, *arguments):
        self.given["plan"] = arguments
        return 0

    def fa3_decode(self, *arguments):
        self.given["decode"] = arguments
        return 1 if self.splits > 9 else 0


@pytest.mark.parametrize("splits", [0, 3, 10])
def test_flash_attention_3_is_planned_once_and_its_failure_is_told(splits, monkeypatch):
    peer, fa3 = load_file(PEERS[1]), Library(splits)
    monkeypatch.setattr(peer, "_library", lambda: fa3)
    monkeypatch.setattr(peer, "multiprocessors", lambda tensor: 132)
    monkeypatch.setattr(peer, "stream", lambda: 0)
    c = case(prefix=130)
    inputs = torch_inputs(c, cases.make(c), "cpu")
    if splits == 0:
        with pytest.raises(NotImplementedError, match="no kernel"):
            peer.build(c, inputs)
        return
    call = peer.build(c, inputs)
    shape = 2, 5, 2, 3, 132  # 135 keys are three pages
    assert fa3.given["splits"] == fa3.given["plan"][2:7] == shape
    if splits > 9:
        with pytest.raises(RuntimeError, match="stderr"):
            call()
        return
    o, lse = call()
    assert (*o.shape, *lse.shape) == (2, 5, 2, 512, 2, 5, 2)
    assert fa3.given["decode"][0] == inputs["q"].data_ptr()
    assert fa3.given["decode"][9:] == (*shape, 2 * 3, inputs["scale"], 0)


@pytest.mark.parametrize("option", ["--flashmla", "--flash-attention-3"])
def test_a_missing_library_is_named(option, tmp_path, monkeypatch, capsys):
    missing = str(tmp_path / "missing.so")
    monkeypatch.setattr("sys.argv", ["verify_attn_peers.py", option, missing])
    with pytest.raises(SystemExit):
        script.main()
    assert f"{option}: no file `{missing}`" in capsys.readouterr().err


def test_sixty_shapes():
    jobs = script.jobs_of(("hopper", "triton", *RIVALS), list(script.GROUPS))
    assert len({job.case for job in jobs}) == 60
    assert [len([j for j in jobs if j.cache == cache]) for cache in ("warm", "cold")] == [240, 132]
    assert tuple(Catalog.of_files(PEERS).peers) == RIVALS


def test_a_line_has_ratio_interval_and_trouble():
    shape = (1, 32, 8, 16384)
    axes = dict(zip(("B", "T", "H", "prefix"), shape, strict=True))
    us = {
        ("warm", "hopper"): 20.0,
        ("warm", "triton"): 50.0,
        ("warm", "peer:flash_mla"): 30.0,
        ("warm", "peer:flash_attention_3"): 40.0,
        ("cold", "hopper"): 25.0,
    }
    rows = [
        {"case": axes, "cache": cache, "impl": impl, "median_us": t, "status": "ok", "ceiling_share": 0.5}
        for (cache, impl), t in us.items()
    ]
    rows[1]["status"] = "noisy"
    versus = [{"case": axes, "cache": "warm", "impl": RIVALS[0], "ratio": 1.5, "low": 1.25, "high": 2.0}]
    suite = SimpleNamespace(rows=rows, versus=versus)
    lines = list(script.lines_of("one rank of eight", suite, RIVALS))
    assert lines[1] == (
        *("1 x 32 x 8, 16384", "20.0", "30.0", "1.50 [1.25, 2.00]", "40.0", ""),
        *("25.0", "", "", "", "", "50.0", "2.50", "50%", "triton noisy"),
    )
    assert lines[-1][3] == "1.50, 1.50"
    assert len(lines[-1]) == len(lines[1])
