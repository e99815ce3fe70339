"""Replies read back from their tokens, whole and piece by piece."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from draftwood import bundled
from draftwood.models.chat import ChatTemplate
from draftwood.models.chat_reply import ChatReply, ReplyParser, ToolCall
from draftwood.models.miniature_tokenizer import SPECIAL_TOKENS, write_tokenizer
from draftwood.models.tokenizer import Tokenizer

MARKS = {
    "<think>": "T", "</think>": "t", "<|tool_calls_section_begin|>": "S", "<|tool_calls_section_end|>": "s",
    "<|tool_call_begin|>": "C", "<|tool_call_argument_begin|>": "A", "<|tool_call_end|>": "c", "<|im_end|>": "E",
}  # fmt: skip
NAMES = {letter: name for name, letter in MARKS.items()}


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("miniature")
    write_tokenizer(folder, 1024, seed=0)
    return ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder))


def tokens(chat, *parts):
    """Token ids of texts, and of control tokens given by ("SAc",): a tuple of one string of letters."""
    ids = []
    for part in parts:
        if isinstance(part, str):
            ids += chat.tokenizer.encode(part)
        else:
            ids += [chat.tokenizer.token_id(NAMES[letter]) for letter in part[0]]
    return ids


def assembled(deltas):
    """The reply that a client builds from the deltas alone."""
    reply = ChatReply()
    for delta in deltas:
        if delta.kind == "reasoning":
            reply.reasoning_content += delta.text
        elif delta.kind == "content":
            reply.content += delta.text
        elif delta.kind == "tool_call":
            assert delta.index == len(reply.tool_calls)
            reply.tool_calls.append(ToolCall(delta.id, delta.name))
        else:
            reply.tool_calls[delta.index].arguments += delta.text
    return reply


@pytest.mark.parametrize("thinking", [True, False])
def test_a_reply_comes_back_as_it_was_rendered(thinking, chat):
    question = [{"role": "user", "content": "?"}]
    answer = {
        "role": "assistant",
        "content": "Let me see: <think> isn't a token 🎉",
        "tool_calls": [
            {
                "id": f"functions.a.b:{i}",
                "type": "function",
                "function": {"name": "a.b", "arguments": f'{{"n": {i}}}'},
            }
            for i in range(2)
        ],
    }
    if thinking:
        answer["reasoning_content"] = "Hmm, </think>?"
    prompt = chat.render(question, thinking=thinking)
    whole = chat.render([*question, answer], thinking=thinking, add_generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    reply = chat.parse(prompt, whole[len(prompt) :])
    assert reply.as_message() == answer
    assert reply.errors == []
    assert [call.error for call in reply.tool_calls] == [None, None]


TEXT = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=3),
        st.sampled_from(sorted(NAMES.values())),
    ),
    max_size=4,
).map("".join)
CALLS = st.lists(
    st.tuples(st.from_regex(r"[a-z_.]{1,8}", fullmatch=True), st.just('{"é": "🎉<|im_end|>"}')), max_size=3
)


@settings(max_examples=80, deadline=None)
@given(
    opened=st.booleans(),
    reasoning=TEXT,
    content=TEXT,
    calls=CALLS,
    lengths=st.lists(st.integers(0, 4), max_size=40),
)
def test_any_reply_in_any_pieces(opened, reasoning, content, calls, lengths, chat):
    parts = [] if opened else [("T",)]
    parts += [reasoning, ("t",), content, ("S",)] if calls else [reasoning, ("t",), content]
    for i, (name, arguments) in enumerate(calls):
        parts += ["\n", ("C",), f"functions.{name}:{i}", ("A",), arguments, ("c",)]
    ids = tokens(chat, *parts, ("sE" if calls else "E",))
    parser, deltas = chat.parser(tokens(chat, ("T",) if opened else ("Tt",))), []
    for length in [*lengths, len(ids)]:
        deltas += parser.push(ids[:length])
        ids = ids[length:]
    deltas += parser.finish()
    expected = ChatReply(
        reasoning, content, [ToolCall(f"functions.{n}:{i}", n, a) for i, (n, a) in enumerate(calls)]
    )
    assert parser.reply == expected
    assert assembled(deltas) == expected
    assert all("\ufffd" not in delta.text for delta in deltas) or "\ufffd" in reasoning + content


@settings(max_examples=150, deadline=None)
@given(marks=st.lists(st.sampled_from(sorted(NAMES)), max_size=14), opened=st.booleans())
def test_no_text_is_lost_however_malformed(marks, opened, chat):
    """A word after every mark; each must come out once."""
    parser, deltas, words = chat.parser(tokens(chat, ("T",)) if opened else []), [], []
    for i, mark in enumerate(["", *marks]):
        words.append(f"w{i:02}")
        deltas += parser.push(tokens(chat, (mark,), words[-1]))
    deltas += parser.finish()
    reply = parser.reply
    calls = [text for call in reply.tool_calls for text in (call.id, call.arguments)]
    found = "".join([reply.reasoning_content, reply.content, *calls])
    assert sorted(found[i : i + 3] for i in range(0, len(found), 3)) == words
    plain = assembled(deltas)
    assert (plain.reasoning_content, plain.content) == (reply.reasoning_content, reply.content)
    assert [(c.id, c.name, c.arguments) for c in plain.tool_calls] == [
        (c.id, c.name, c.arguments) for c in reply.tool_calls
    ]
    assert len(reply.errors) >= sum(call.error is not None for call in reply.tool_calls)
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("parts", "reply"),
    [
        (  # called while still thinking, no section, the id without its prefix or number
            [("T",), "so", ("C",), " look_up ", ("A",), "{}", ("cE",)],
            ChatReply("so", "", [ToolCall("look_up", "look_up", "{}")]),
        ),
        (  # thinks again after it has called
            ["a", ("SC",), "f:0", ("A",), "{}", ("cs",), "b", ("T",), "c"],
            ChatReply("c", "ab", [ToolCall("f:0", "f", "{}")]),
        ),
        (
            [("SC",), "functions.f:0", ("A",), "{'x': 1}", ("cs",)],
            ChatReply(tool_calls=[ToolCall("functions.f:0", "f", "{'x': 1}", "its arguments are not JSON: ")]),
        ),
        (
            [("SC",), "functions.f:0", ("A",), "[1]", ("cs",)],
            ChatReply(tool_calls=[ToolCall("functions.f:0", "f", "[1]", "its arguments are not a JSON object")]),
        ),
        (
            [("SC",), "functions.f:0", ("A",), '{"a"'],
            ChatReply(tool_calls=[ToolCall("functions.f:0", "f", '{"a"', "its end is missing")]),
        ),
        ([("SC",), "functions.f:0"], ChatReply(content="functions.f:0", errors=["'functions.f:0' has no arguments"])),
        (
            [("SC",), " ", ("A",), "{}", ("cs",), "x"],
            ChatReply(content=" {}x", errors=["has no name"]),
        ),
        (["a", ("A",), "b"], ChatReply(content="ab", errors=["has not begun"])),
        (
            [("C",), "f", ("A",), "[" * 9999, ("c",)],
            ChatReply(tool_calls=[ToolCall("f", "f", "[" * 9999, "its arguments are not JSON: ")]),
        ),
        ([("S",), "\n oh \n", ("s",)], ChatReply(content="\n oh \n")),
    ],
)  # fmt: skip
def test_calls_that_are_odd(parts, reply, chat):
    got = chat.parse([], tokens(chat, *parts))
    errors = reply.errors or [call.error for call in reply.tool_calls if call.error]
    assert len(got.errors) == len(errors)
    assert all(e in g for e, g in zip(errors, got.errors, strict=True))
    assert (got.reasoning_content, got.content) == (reply.reasoning_content, reply.content)
    for got_call, call in zip(got.tool_calls, reply.tool_calls, strict=True):
        assert (got_call.id, got_call.name, got_call.arguments) == (call.id, call.name, call.arguments)
        assert got_call.error == call.error or call.error in got_call.error


def test_broken_characters_at_a_boundary(chat):
    """A character cut off by a control token ends where it is."""
    half = chat.tokenizer.encode("é")[:1]
    assert half == [0xC3]
    parser = chat.parser(tokens(chat, ("T",)))
    assert parser.push(half) == []
    assert [d.text for d in parser.push(tokens(chat, ("t",), "a"))] == ["\ufffd", "a"]
    assert parser.push(half) == []
    assert [d.text for d in parser.finish()] == ["\ufffd"]
    assert parser.reply == ChatReply("\ufffd", "a\ufffd")


def test_where_a_reply_begins(chat):
    assert {offset for offset, name in SPECIAL_TOKENS.items() if name in MARKS} == {2, *range(11, 16), 22, 23}
    for prompt, inside in (("T", True), ("Tt", False), ("TE", False), ("TtET", True), ("", False)):
        reply = chat.parse(tokens(chat, (prompt,)), tokens(chat, "x"))
        assert reply == (ChatReply("x") if inside else ChatReply(content="x"))
    tokenizer = Tokenizer.from_folder(bundled.pair()[0])  # has none of the tokens: all is content
    parser = ReplyParser(tokenizer, [], [tokenizer.token_id("<|end|>")])
    parser.push([*tokenizer.encode("<think>x"), tokenizer.token_id("<|end|>")])
    assert parser.reply == ChatReply(content="<think>x")


def test_a_user_who_writes_think_does_not_open_the_reply(tmp_path):
    """In a `tokenizer.json` it may be a token of text; and DeepSeek's turns of users have no end."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_tokens(sorted(pre_tokenizers.ByteLevel.alphabet()))
    library.add_special_tokens(["<user>", "<assistant>"])
    library.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{% for m in messages %}<user>{{ m.content }}{% endfor %}<assistant>{{ '<think>\n' if thinking }}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_folder(tmp_path)
    chat = ChatTemplate.from_folder(tmp_path, tokenizer)
    asked = [{"role": "user", "content": "what is <think>"}]
    assert tokenizer.token_id("<think>") in chat.render(asked)
    for thinking in (False, True):
        prompt = chat.render(asked, thinking=thinking)
        reply = chat.parse(prompt, tokenizer.encode("a</think>b"))
        assert (reply.reasoning_content, reply.content) == (("a", "b") if thinking else ("", "ab"))
