"""Where a request ends: stop tokens, stop strings, max_new_tokens, the context; exact to the token in every mode."""

from __future__ import annotations

import pytest

from draftwood import LLM, SamplingParams
from support.scripted import ScriptedDrafting
from support.tiny import TARGET, write_target

DEPTH = 5
PROMPT = [5, 9, 11]


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    return LLM(
        write_target(tmp_path_factory.mktemp("target"), 7), dtype="float64", mode="plain", max_context=64
    )


@pytest.fixture(scope="module")
def text(llm) -> list[int]:
    """What plain decoding says, past every end token."""
    return llm.generate([PROMPT], SamplingParams(max_new_tokens=30, ignore_eos=True))[0].token_ids


def run(llm, text, mode, **params):
    """Decode with a perfect drafter, so that rounds emit up to DEPTH + 1 tokens."""
    llm.drafting = ScriptedDrafting({1: PROMPT + text}, TARGET["vocab_size"], "perfect", DEPTH)
    params = SamplingParams(seed=1, **params)
    return llm.generate([PROMPT], params, mode=mode, budget=12)[0]


MODES = pytest.mark.parametrize("mode", ["plain", "chain", "tree"])


@MODES
def test_max_new_tokens_is_exact(llm, text, mode):
    for n in range(1, 2 * (DEPTH + 1) + 1):
        out = run(llm, text, mode, max_new_tokens=n, ignore_eos=True)
        assert out.token_ids == text[:n]
        assert out.finish_reason == "length"
        assert sum(r.emitted for r in out.rounds) == n


@MODES
def test_every_token_in_turn_as_stop_token(llm, text, mode):
    for stop in dict.fromkeys(text):
        at = text.index(stop)
        out = run(llm, text, mode, max_new_tokens=30, ignore_eos=True, stop_token_ids=(99 % 40, stop))
        if 99 % 40 in text[:at]:
            continue
        assert out.token_ids == text[: at + 1]
        assert (out.finish_reason, out.stop_reason) == ("stop", stop)
        assert llm.tokenizer.decode([stop]) not in out.text.split()


@MODES
def test_stop_wins_over_length_on_the_same_token(llm, text, mode):
    at = next(i for i in range(3, len(text)) if text[i] not in text[:i])
    out = run(llm, text, mode, max_new_tokens=at + 1, ignore_eos=True, stop_token_ids=(text[at],))
    assert (out.token_ids, out.finish_reason) == (text[: at + 1], "stop")
    out = run(llm, text, mode, max_new_tokens=at, ignore_eos=True, stop_token_ids=(text[at],))
    assert (out.token_ids, out.finish_reason) == (text[:at], "length")


@MODES
def test_end_tokens_of_the_model_stop_unless_ignored(llm, text, mode, monkeypatch):
    config = llm.target.config.model_copy(update={"eos_token_ids": (text[4], text[2])})
    monkeypatch.setattr(llm.target, "config", config)
    first = min(text.index(text[4]), text.index(text[2]))
    out = run(llm, text, mode, max_new_tokens=30)
    assert (out.token_ids, out.finish_reason) == (text[: first + 1], "stop")
    assert run(llm, text, mode, max_new_tokens=30, ignore_eos=True).token_ids == text


@MODES
def test_stop_string_cuts_text_and_tokens(llm, text, mode):
    words = [llm.tokenizer.decode([t]) for t in text]
    at = next(i for i in range(2, len(text)) if text[i] not in text[:i])
    out = run(llm, text, mode, max_new_tokens=30, ignore_eos=True, stop=words[at])
    hit = next(i for i in range(len(text)) if words[at] in llm.tokenizer.decode(text[: i + 1]))
    assert out.token_ids == text[: hit + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", words[at])
    assert words[at] not in out.text
    assert llm.tokenizer.decode(text[: hit + 1]).startswith(out.text)


@MODES
def test_context_limit(llm, text, mode):
    prompt = (PROMPT * 30)[: llm.max_context - 4]
    plain = llm.generate([prompt], SamplingParams(max_new_tokens=30, ignore_eos=True), mode="plain")[0]
    llm.drafting = ScriptedDrafting({1: prompt + plain.token_ids}, TARGET["vocab_size"], "perfect", DEPTH)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, seed=1)
    out = llm.generate([prompt], params, mode=mode, budget=12)[0]
    assert len(out.token_ids) == 4
    assert out.token_ids == plain.token_ids
    assert out.finish_reason == "length"


def test_prompt_without_room_for_output_is_refused(llm):
    with pytest.raises(ValueError, match="prompt 1 has 64 tokens; the context holds 64"):
        llm.generate([[3], [3] * 64], mode="plain")
    assert llm.generate([[3] * 63], mode="plain")[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "prompt 0 is empty"), ([[40]], "token id 40 is outside the vocabulary"), ([[-1]], "token id -1")],
)
def test_bad_prompts_are_named(llm, prompt, message):
    with pytest.raises(ValueError, match=message):
        llm.generate([prompt] if prompt == [] else prompt, mode="plain")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2.0),
        ("max_new_tokens", 0),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("stop", [""]),
        ("logprobs", 21),
        ("temprature", 1.0),
    ],
)
def test_bad_parameters_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_token_ids_of_parameters_are_checked(llm):
    with pytest.raises(ValueError, match="logit_bias: token id 40"):
        llm.generate([[3]], SamplingParams(logit_bias={40: 1.0}), mode="plain")
    with pytest.raises(ValueError, match="logit_bias: the value for token 3"):
        llm.generate([[3]], SamplingParams(logit_bias={3: float("nan")}), mode="plain")
    with pytest.raises(ValueError, match="stop_token_ids: token id 77"):
        llm.generate([[3]], SamplingParams(stop_token_ids=(77,)), mode="plain")


def test_a_tree_needs_a_drafter(tmp_path):
    llm = LLM(write_target(tmp_path, 1))
    with pytest.raises(ValueError, match="needs a drafter"):
        llm.generate([[3]])
