"""The loop of `transformers` decodes as the engine does: token for token, and round for round."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from draftwood import LLM
from support.tiny import write_drafter, write_target

PROMPT = [5, 7, 3, 9, 11, 8, 6]
SLOTS = 24
VOCABULARY = {"vocab_size": 12}  # so few that guesses are often right
TAPS = {"mask_token_id": 2, "target_layer_ids": [1, 0]}  # the last layer's and an inner one


@pytest.fixture(scope="module")
def generate():
    return import_module("ddtree_generate")  # not at the top: it imports much of transformers


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    drafter = write_drafter(folder / "d", VOCABULARY, num_hidden_layers=2, dflash_config=TAPS)
    return write_target(folder / "t", 3, **VOCABULARY), drafter


@pytest.mark.parametrize("slots", [2, SLOTS])
def test_same_tokens_and_rounds(generate, pair, slots):
    llm = LLM(*pair, device="cpu", dtype="float32", budget=slots, max_batch=1, max_context=96)
    loop = generate.Loop(*pair, torch.float32, "cpu", slots)
    longest = 0
    for first in range(4):
        prompt = [first, *PROMPT]
        got = loop(prompt, 40)
        # the loop has its first token from the prompt's pass, the engine from its first tree
        want = generate.ours(llm, [*prompt, got.tokens[0]], 39)
        assert got.tokens[1:] == want.tokens
        assert got.brought == want.brought
        assert sum(got.brought) == 39
        assert generate.ours(llm, prompt, 40).tokens == got.tokens
        longest = max(longest, *got.brought)
    assert longest > 2 if slots == SLOTS else longest == 2


def test_drafters_with_a_window_are_refused(generate, tmp_path):
    folder = write_drafter(tmp_path, layer_types=["sliding_attention"], sliding_window=8)
    with pytest.raises(ValueError, match="sliding"):
        generate.DFlash.from_folder(folder, torch.float32, "cpu")


def run(generate, monkeypatch, pair, out, *more):
    folders = ("--model", str(pair[0]), "--drafter", str(pair[1]))
    sizes = ("--prompts", "3", "--length", "8", "--new", "16", "--budget", str(SLOTS))
    options = ("--device", "cpu", "--dtype", "float32", "--out", str(out))
    monkeypatch.setattr(sys, "argv", ["ddtree_generate.py", *folders, *sizes, *options, *more])
    return generate.main()


def test_prints_and_stores_both_sides(generate, pair, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    run(generate, monkeypatch, pair, out, "--plain-scores")
    assert "3 prompts, 100% of the outputs equal" in " ".join(capsys.readouterr().out.split())
    stored = json.loads(out.read_text())
    assert stored["versions"].keys() >= {"torch", "transformers"}
    assert {"device", "commit", "settings"} <= stored.keys()
    assert len(stored["pairs"]) == 3
    found = stored["summary"]
    for name in ("ours", "loop"):
        for figure in ("tokens_per_s", "tokens_per_s_with_prefill", "ms_per_round"):
            value = found[name][figure]
            assert 0 < value["low"] <= value["median"] <= value["high"]
        one = stored["pairs"][0][name]
        rate = sum(one["brought"][1:]) / (one["ended"][-1] - one["ended"][0])
        rates = found[name]["tokens_per_s"]
        assert rates["low"] <= rate <= rates["high"]
    assert found["ratio_rate"]["low"] <= found["ratio_rate"]["median"] <= found["ratio_rate"]["high"]


@pytest.mark.parametrize(("seconds", "measured"), [(5, 0), (8, 1), (10, 2), (99, 3)])
def test_measures_what_fits_after_warming_up(generate, monkeypatch, seconds, measured):
    class Clock:
        """Loading took 1 s; a call takes 2 s to warm up, and 1 s after that."""

        def __init__(self, seconds):
            self.seconds, self.calls = seconds, 0
            clocks.append(self)

        def used(self):
            return 1 + 2 * min(self.calls, 2) + max(self.calls - 2, 0)

        def left(self):
            return self.seconds - self.used()

    def call(*_):
        clocks[-1].calls += 1

    clocks = []
    monkeypatch.setattr(generate, "Countdown", Clock)
    monkeypatch.setattr(generate, "ours", call)
    loop = type("Loop", (), {"block_size": 6, "__call__": call})()
    pairs = generate.contest(SimpleNamespace(device="cpu"), loop, [[1]] * 4, 16, seconds)
    assert len(pairs) == measured


def test_ends_when_time_is_up(generate, pair, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="--seconds"):
        run(generate, monkeypatch, pair, tmp_path / "out.json", "--seconds", "0.1")
    assert not (tmp_path / "out.json").exists()
