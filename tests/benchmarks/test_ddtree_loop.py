"""The loop that the kernels are timed against builds the same trees and walks the same paths."""

from __future__ import annotations

import json
import sys

import pytest

import ddtree_loop as loop


@pytest.mark.parametrize("D", [1, 7, 15])
def test_same_tree_and_path(D):
    for seed in range(10):
        contest = loop.Contest(D, 500, "cpu", seed=seed)
        contest.check()
        assert contest.loop_tree.visible.sum(1).tolist() == (contest.loop_tree.depths + 1).tolist()
    assert len(contest.loop_accept()[0]) > 1


def test_a_difference_is_seen():
    contest = loop.Contest(3, 500, "cpu")
    contest.loop_tree.parents[2] += 1
    with pytest.raises(AssertionError, match="parents"):
        contest.check()


def test_prints_and_stores_ratios(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "VISITS", 2)
    monkeypatch.setattr(loop, "DEPTHS", (2,))
    out = tmp_path / "out.json"
    monkeypatch.setattr(
        sys, "argv", ["ddtree_loop.py", "--device", "cpu", "--vocabulary", "300", "--out", str(out)]
    )
    loop.main()
    assert capsys.readouterr().out.count("times [") == 3
    rows = json.loads(out.read_text())["rows"]
    assert [r["what"] for r in rows] == ["logits to tree", "bfloat16 logits to tree", "choices to path"]
    assert all(r["loop"]["low"] <= r["loop"]["median"] <= r["loop"]["high"] for r in rows)
