"""The study of divergences sees every difference, places it, and weighs it by the precise model."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import divergence as study
from draftwood import LLM
from support.tiny import write_drafter, write_target

COMMON = {"dtype": "float32", "page_size": 4, "max_context": 24}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    return write_target(root / "t", 7), write_drafter(root / "d")


def test_a_planted_difference_is_placed_and_weighed(folders):
    llm = LLM(*folders, **COMMON)
    prompts = [[3, 5, 7, 9], [2, 4, 6, 8]]
    a = study.continued(llm, prompts, ("plain", 2), 4, 8)
    b = [a[0], [*a[1][:5], (a[1][5] + 1) % 20, *a[1][6:]]]
    precise = study.Reader(LLM(*folders, **COMMON))
    (found,) = study.explained(prompts, a, b, precise)
    assert (found["prompt"], found["at"]) == (1, 5)
    lp, leads = precise(prompts[1] + a[1][:5])
    assert lp.shape[0] == leads.shape[1] == 9
    assert int(lp[-1].argmax()) == a[1][5]
    assert found["gap"] == pytest.approx(float(lp[-1, a[1][5]] - lp[-1, b[1][5]]))
    assert found["router"] == float(leads.min())
    assert torch.isfinite(leads).all()
    assert (leads >= 0).all()


def test_one_model_is_off_by_nothing_from_itself(folders):
    reader = study.Reader(LLM(*folders, **COMMON))
    assert study.rounding(reader, reader, [[3, 5, 7], [1, 2, 3]]) == (0.0, 0.0)


def test_the_command_on_a_deterministic_engine(folders, tmp_path, monkeypatch):
    out = tmp_path / "d.json"
    target, drafter = map(str, folders)
    options = [
        "--model",
        target,
        "--drafter",
        drafter,
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--deterministic",
    ]
    sizes = ["--prompts", "3", "--length", "6", "--new", "6", "--batches", "1", "2", "--budget", "4"]
    monkeypatch.setattr(sys, "argv", ["divergence.py", *options, *sizes, "--out", str(out)])
    assert study.main() == 0
    stored = json.loads(out.read_text())
    assert [pair["differ"] for pair in stored["pairs"]] == [[0.0, 0.0, 0.0]] * 4
    assert stored["settings"]["prompts"] == "3"
