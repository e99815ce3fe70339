"""Text to ids and back, whole and in pieces."""

from __future__ import annotations

import json
import shutil

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from draftwood import bundled
from draftwood.models.errors import ModelError
from draftwood.models.tokenizer import StreamDecoder, Tokenizer

BUNDLED = Tokenizer.from_folder(bundled.pair()[0])


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80))
def test_any_text_round_trips(text):
    ids = BUNDLED.encode(text)
    assert BUNDLED.decode(ids) == text
    assert all(2 <= i < BUNDLED.vocab_size for i in ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, BUNDLED.vocab_size + 50), max_size=4), max_size=20))
def test_pieces_join_to_the_whole(pieces):
    """Any ids at all, invalid UTF-8 and ids past the vocabulary among them."""
    stream = StreamDecoder(BUNDLED)
    text = "".join(stream.push(piece) for piece in pieces) + stream.flush()
    assert text == BUNDLED.decode(i for piece in pieces for i in piece)


def test_same_text_as_the_library():
    library = tokenizers.Tokenizer.from_file(str(bundled.pair()[0] / "tokenizer.json"))
    for ids in (
        [500, 1200, 37],
        BUNDLED.encode("naïve 🎉 def f():\n\treturn 'x'"),
        list(range(2, BUNDLED.vocab_size)),
    ):
        assert BUNDLED.decode(ids) == library.decode(ids)


def test_a_character_comes_whole():
    ids = BUNDLED.encode("🎉")
    assert len(ids) == 4  # one token per byte
    stream = StreamDecoder(BUNDLED)
    assert [stream.push([i]) for i in ids] == ["", "", "", "🎉"]
    assert stream.flush() == ""
    assert stream.push(ids[:2]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(ids) == "🎉"  # anew after a flush


def test_special_tokens():
    end = BUNDLED.token_id("<|end|>")
    assert (end, BUNDLED.token_id("<|mask|>")) == (0, 1)
    ids = BUNDLED.encode("a<|end|>b")
    assert end not in ids
    assert BUNDLED.decode(ids) == "a<|end|>b"
    assert BUNDLED.decode([*BUNDLED.encode("a"), end]) == "a"
    assert BUNDLED.decode([*BUNDLED.encode("a"), end], special=True) == "a<|end|>"
    stream = StreamDecoder(BUNDLED, special=True)
    assert stream.push([end]) == "<|end|>"
    with pytest.raises(KeyError, match="nothing"):
        BUNDLED.token_id("nothing")


def test_added_tokens_that_are_not_special_are_text(tmp_path):
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    library.add_tokens([*sorted(pre_tokenizers.ByteLevel.alphabet()), AddedToken("<think>é", special=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode([tokenizer.token_id("<think>é")]) == "<think>é"


def test_bos_only_when_asked(tmp_path):
    shutil.copy(bundled.pair()[0] / "tokenizer.json", tmp_path)
    for bos in ("<|end|>", {"content": "<|end|>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos}))
        tokenizer = Tokenizer.from_folder(tmp_path)
        assert tokenizer.encode("a", bos=True) == [0, *tokenizer.encode("a")]
    with pytest.raises(ValueError, match="no bos token"):
        BUNDLED.encode("a", bos=True)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: key `bos_token`: `<s>` is not in"):
        Tokenizer.from_folder(tmp_path)


def test_negative_ids_are_refused():
    with pytest.raises(ValueError, match="-1"):
        BUNDLED.decode([-1])


def test_folders_that_cannot_be_used(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"decoder": {"type": "Metaspace"}}))
    with pytest.raises(ModelError, match="decoder is Metaspace; only ByteLevel"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"decoder": ["ByteLevel"]}))
    with pytest.raises(ModelError, match=r"decoder is \['ByteLevel'\]; only ByteLevel"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"decoder": {"type": "ByteLevel"}}))
    with pytest.raises(ModelError, match="not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
