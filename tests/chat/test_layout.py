"""A session through a real chat template and tokenizer: what is said, and what the model sees of it."""

from __future__ import annotations

import pytest

from draftwood.chat.layout import TemplateLayout
from draftwood.chat.session import NO_LIMIT, Session
from draftwood.engine.sampling_params import SamplingParams
from draftwood.models.chat import ChatTemplate
from draftwood.models.miniature_tokenizer import write_tokenizer
from draftwood.models.tokenizer import Tokenizer
from support.scripted_chat import ScriptedModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kimi")
    write_tokenizer(folder, 512, seed=0)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def layout(folder, tokenizer):
    return TemplateLayout(ChatTemplate.from_folder(folder, tokenizer))


def chat(layout, *replies):
    params = SamplingParams(max_new_tokens=NO_LIMIT)
    return Session(ScriptedModel(*replies, max_context=4000), layout, params)


def tokens(tokenizer, *parts):
    """Texts and names of control tokens, in turn."""
    ids = [tokenizer.encode(p) if i % 2 == 0 else [tokenizer.token_id(p)] for i, p in enumerate(parts)]
    return [t for part in ids for t in part]


def say(session, text, stop=lambda: False):
    return [(piece.kind, piece.text) for piece in session.send(text, stop)]


def prompt(session, tokenizer):
    return tokenizer.decode(map(ord, session.model.prompts[-1]), special=True)


def test_reasoning_is_told_apart_and_not_shown_to_the_model_again(tokenizer, layout):
    one = tokens(tokenizer, "h<m", "</think>", "yes", "<|im_end|>")
    two = tokens(tokenizer, "no", "<|im_end|>")
    session = chat(layout, [one[:2], one[2:]], [two])
    assert say(session, "</think> well?") == [("reasoning", "h<"), ("reasoning", "m"), ("content", "yes")]
    assert session.latest.message.reasoning_content == "h<m"
    session.thinking = False
    say(session, "sure?")
    seen = prompt(session, tokenizer)
    assert "h<m" not in seen
    assert "</think> well?" in seen  # as text
    assert seen.endswith(
        "yes<|im_end|><|im_user|>user<|im_middle|>sure?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>"
    )
    assert session.latest.message.content == "no"
    assert session.latest.message.reasoning_content is None


def test_an_interrupted_thought_and_a_tool_call_are_kept(tokenizer, layout):
    call = tokens(
        tokenizer, "", "</think>", "", "<|tool_calls_section_begin|>", "", "<|tool_call_begin|>", "functions.f:0",
        "<|tool_call_argument_begin|>", "{}", "<|tool_call_end|>", "", "<|tool_calls_section_end|>", "", "<|im_end|>",
    )  # fmt: skip
    session = chat(layout, [tokens(tokenizer, "hm"), [1]], [call])
    say(session, "one", lambda: True)
    assert session.latest.message.reasoning_content == "hm"
    assert session.latest.message.interrupted
    assert say(session, "two") == [("tool_call", "calls f "), ("tool_call", "{}")]
    assert session.latest.message.tool_calls[0]["function"] == {"name": "f", "arguments": "{}"}
    assert session.context() > 0  # all of it can be rendered again
