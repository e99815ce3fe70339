"""Replies, and what becomes of the conversation when they end, fail or are cut off."""

from __future__ import annotations

import json

import pytest

from draftwood.chat.conversation import ChatError
from draftwood.chat.session import NO_LIMIT, Session, sampling
from draftwood.engine.sampling_params import SamplingParams
from draftwood.models.errors import ModelError
from support.scripted_chat import CharacterLayout, ScriptedModel


def session(*replies, seed=7, **model):
    params = SamplingParams(seed=seed, temperature=0.5, max_new_tokens=NO_LIMIT)
    return Session(ScriptedModel(*replies, **model), CharacterLayout(), params)


def going_on():
    return False


def say(s, text, stop=going_on):
    return "".join(piece.text for piece in s.send(text, stop))


def contents(s):
    return [m.content for m in s.conversation.messages]


def test_a_reply_joins_the_conversation_and_the_next_prompt():
    s = session(["<hm", ">yes", "\0"], ["no\0"])
    s.thinking = True
    assert say(s, "well?") == "hmyes"
    message = s.latest.message
    assert (message.content, message.reasoning_content, message.interrupted) == ("yes", "hm", False)
    say(s, "sure?")
    assert s.model.prompts == ["U:well?|+", "U:well?|A:yes|U:sure?|+"]
    assert contents(s) == ["well?", "yes", "sure?", "no"]
    params = s.model.params[0]
    assert params.stop_token_ids == (0,)
    assert params.max_new_tokens == 200 - len("U:well?|+")
    assert s.model.running == 0


def test_a_stopped_reply_is_kept_and_marked_and_its_stream_closed():
    s = session(["ab", "cd", "ef"])
    rounds = iter([False, True])
    assert say(s, "go", lambda: next(rounds)) == "abcd"
    assert s.model.running == 0
    assert s.latest.message.interrupted
    assert contents(s) == ["go", "abcd"]


def test_a_reply_stopped_before_it_said_anything_changes_nothing():
    s = session(["<", "x"])
    say(s, "go", lambda: True)
    assert s.latest is None
    assert contents(s) == []
    assert s.model.running == 0


def test_a_reader_that_leaves_changes_nothing_and_closes_the_stream():
    s = session(["ab", "cd"])
    pieces = s.send("go", going_on)
    next(pieces)
    pieces.close()
    assert contents(s) == []
    assert s.model.running == 0


def test_a_failing_model_is_an_error_and_changes_nothing():
    s = session(["ab"], error="logits were not finite")
    with pytest.raises(ChatError, match="not finite"):
        say(s, "go")
    assert contents(s) == []


def test_seeds():
    s = session(*[["x\0"]] * 6, seed=7)
    say(s, "a")
    say(s, "b")
    for _ in range(2):
        list(s.regenerate(going_on))
    s.configure("seed", "50")
    list(s.regenerate(going_on))
    say(s, "c")
    assert [p.seed for p in s.model.params] == [7, 7, 8, 9, 50, 50]
    assert s.model.prompts[1:5] == ["U:a|A:x|U:b|"] * 4
    assert contents(s) == ["a", "x", "b", "x", "c", "x"]


def test_a_conversation_that_does_not_fit_says_what_to_do():
    s = session(["x" * 30 + "\0"], ["y\0"], ["z\0"], max_context=60)
    say(s, "a" * 10)
    say(s, "b")
    with pytest.raises(ChatError, match=r"`/trim`.*`/clear`"):
        say(s, "c" * 10)
    assert len(contents(s)) == 4
    assert s.trim() == 1
    assert contents(s) == ["b", "y"]
    assert s.trim() == 0  # the newest turn stays
    say(s, "c" * 10)
    with pytest.raises(ChatError, match="shorten it"):
        say(session(max_context=20), "c" * 20)


def test_a_reply_may_fill_the_context_or_its_own_limit():
    s = session(["x" * 100], ["x" * 100], max_context=20)
    say(s, "go")
    assert s.latest.fills_context
    assert "context 20/20" in s.latest.stats
    s.conversation.clear()
    s.configure("max_new_tokens", "5")
    say(s, "go")
    assert not s.latest.fills_context
    assert "5 tokens, cut there" in s.latest.stats


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", "hot"), ("seed", "-1"), ("max_new_tokens", "0")]
)
def test_a_setting_out_of_range_names_itself_and_changes_nothing(field, value):
    s = session()
    before = s.params
    with pytest.raises(ChatError, match=f"{field}: .*got {value}"):
        s.configure(field, value)
    assert s.params == before


@pytest.mark.parametrize(
    ("suggested", "chosen", "temperature", "top_p"),
    [
        (None, {}, 1.0, 1.0),
        ({"eos_token_id": 3}, {}, 1.0, 1.0),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": None}, {}, 0.6, 0.9),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": None}, 0.0, 0.9),
        ({"do_sample": False, "temperature": 0.6}, {}, 0.0, 1.0),
    ],
)
def test_the_model_suggests_and_the_person_decides(tmp_path, suggested, chosen, temperature, top_p):
    if suggested is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(suggested))
    params = sampling(tmp_path, **chosen)
    assert (params.temperature, params.top_p) == (temperature, top_p)


def test_a_suggestion_out_of_range_is_named_unless_it_does_not_count(tmp_path):
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": "hot"}))
    assert sampling(tmp_path, temperature=0.5).temperature == 0.5
    with pytest.raises(ModelError, match=r"generation_config\.json: key `temperature`: .*got 'hot'"):
        sampling(tmp_path, temperature=None)
