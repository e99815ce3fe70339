"""Messages, turns and the file they are kept in."""

from __future__ import annotations

import json

import pytest

from draftwood.chat.conversation import ChatError, Conversation, Message


def conversation(*texts, system=None):
    """User and assistant in turn."""
    c = Conversation(
        Message(role=("ua"[i % 2] == "u" and "user") or "assistant", content=t) for i, t in enumerate(texts)
    )
    c.set_system(system)
    return c


def contents(c):
    return [m.content for m in c.messages]


def test_the_system_message_is_first_and_only_one():
    c = conversation("a", "b")
    c.set_system("one")
    c.set_system("two")
    assert contents(c) == ["two", "a", "b"]
    c.clear()
    assert contents(c) == ["two"]
    c.set_system(None)
    assert contents(c) == []
    assert c.system is None


def test_turns_go_from_either_end():
    c = conversation("a", "b", "c", "d", "e", "f", system="s")
    assert c.undo() == "e"
    assert contents(c) == ["s", "a", "b", "c", "d"]
    c.drop_oldest()
    assert contents(c) == ["s", "c", "d"]
    c.drop_oldest()
    assert contents(c) == ["s"]
    for missing in (c.undo, c.drop_oldest, c.asked_again):
        with pytest.raises(ChatError, match="no turn yet"):
            missing()


def test_a_file_holds_all_of_a_conversation(tmp_path):
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    c = Conversation(
        [
            Message(role="system", content="s"),
            Message(role="user", content='Grüße\n"x"'),
            Message(
                role="assistant", content="", reasoning_content="r", tool_calls=(call,), interrupted=True
            ),
        ]
    )
    file = tmp_path / "c.json"
    c.save(file)
    assert Conversation.load(file).messages == c.messages
    assert json.loads(file.read_text())[1] == {"role": "user", "content": 'Grüße\n"x"'}
    assert list(tmp_path.iterdir()) == [file]
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_beside_it(tmp_path, monkeypatch):
    file = tmp_path / "c.json"
    conversation("a").save(file)
    before = file.read_text()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        conversation("b").save(file)
    assert file.read_text() == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Invalid JSON"),
        ('{"role": "user"}', "valid array"),
        ('[{"role": "user"}]', "message 0.content: Field required"),
        ('[{"role": "robot", "content": ""}]', "message 0.role"),
        ('[{"role": "user", "content": "", "colour": 1}]', "message 0.colour"),
        ('[{"role": "assistant", "content": ""}]', "begins with the user"),
        (
            '[{"role": "user", "content": ""}, {"role": "system", "content": ""}]',
            "message 1: a system message",
        ),
    ],
)
def test_a_file_that_is_no_conversation_is_refused(tmp_path, text, message):
    file = tmp_path / "c.json"
    file.write_text(text)
    with pytest.raises(ChatError, match=message) as e:
        Conversation.load(file)
    assert str(file) in str(e.value)
