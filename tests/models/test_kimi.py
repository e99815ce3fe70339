"""Kimi's tokenizer against a plain one, and its files when they are wrong."""

from __future__ import annotations

import base64
import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftwood.models.errors import ModelError
from draftwood.models.kimi import KimiTokenizer
from draftwood.models.miniature_tokenizer import SPECIAL_TOKENS, write_tokenizer
from draftwood.models.tokenizer import StreamDecoder, Tokenizer
from support.kimi import ASSIGNED, Oracle, guard, write_pairs

VOCAB = 2048
BASE = VOCAB - 256

TEXTS = [
    "Hello, world! Don't we'LL THEY'RE it'S iT'ſ 'twas 'S",
    "ABC\u0301DEf A\u0308B\u0301c aB\u0301 ʰAʰB\u0301中 x\u0301\u0308Y",
    "HTTPServer getHTTPResponse fooBar FOO Bar_baz ÀÉîõ ǅabc ʰʰa",
    "北京大学和東京大学、한국어 ひらがなカタカナ々〇〡中a中1中",
    "𠮷野家 漢字kanji漢字 Ａｂｃ１２３",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 a👍b ☺️",
    "e\u0301 a\u0308\u0323 \u0301x \u0301 क्षि नमस्ते ก็ שָׁלוֹם مَرحَبًا",
    "1 12 123 1234 12345678 3.14159 1e-9 0xFF ½ Ⅷ ٣٤٥٦ ²³",
    "def f(x):\n\treturn {'a': [1, 2]}  # ok\r\n\r\n  if x:\n      pass\n\n\n",
    " a  b   c\t\td \n e\u00a0f\u3000g\u2003\u2003h\u2028i\x0bj\x0ck\x1cl\x85m ",
    "   \n\n   \n",
    "\r\n\r\n x",
    "!\n/!\r\n\n. !!! ...\n\n--- ==\r\n /* */ <|im_end|> [EOS] <think></think>",
    "a" * 1500 + " " * 1500 + "\n" * 300 + "中" * 700 + "!" * 900,
    "\x00\x01\ufeff\u200b\ufffd\U0010ffff\ue000",
    "",
    "ͅaΐΰ ﬁne ß İı",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kimi")
    write_tokenizer(folder, VOCAB, seed=0)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def oracle(folder):
    return Oracle(folder)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The same in a vocabulary that shows every split."""
    folder = tmp_path_factory.mktemp("pairs")
    write_pairs(folder)
    return Tokenizer.from_folder(folder), Oracle(folder)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:12]))
def test_texts_as_the_oracle_has_them(text, tokenizer, oracle, pairs):
    assert tokenizer.encode(text) == oracle.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert pairs[0].encode(text) == pairs[1].encode(text)


MIXED = st.lists(
    st.one_of(
        st.text(ASSIGNED, max_size=6),
        st.sampled_from(
            [" ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "'", "\u0301", "中", "a", "A", "1", "ʰ", "!"]
        ),
        st.sampled_from(sorted(SPECIAL_TOKENS.values())),
    ),
    max_size=12,
).map("".join)


@settings(max_examples=250, deadline=None)
@given(text=MIXED)
def test_any_text_as_the_oracle_has_it(text, tokenizer, oracle, pairs):
    assert pairs[0].encode(text) == pairs[1].encode(text)
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < BASE for i in ids)  # no special token, however spelt


@settings(max_examples=80, deadline=None)
@given(text=MIXED, lengths=st.lists(st.integers(0, 3), max_size=60), special=st.booleans())
@example(text="👩‍👩‍👧 é 中", lengths=[1] * 60, special=False)
def test_streamed_text_is_whole_characters(text, lengths, special, tokenizer):
    ids, stream, pieces = tokenizer.encode(text), StreamDecoder(tokenizer, special=special), []
    for length in [*lengths, len(ids)]:
        pieces.append(stream.push(ids[:length]))
        ids = ids[length:]
    assert "".join(pieces) == text
    assert stream.flush() == ""
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@settings(max_examples=80, deadline=None)
@given(pieces=st.lists(st.lists(st.integers(0, VOCAB + 50), max_size=4), max_size=20), special=st.booleans())
def test_streamed_ids_join_to_the_whole(pieces, special, tokenizer):
    """Any ids: broken UTF-8, special ones, reserved ones and ids past the vocabulary."""
    stream = StreamDecoder(tokenizer, special=special)
    text = "".join(stream.push(piece) for piece in pieces) + stream.flush()
    assert text == tokenizer.decode((i for piece in pieces for i in piece), special=special)


def test_long_text_is_cut_where_the_published_tokenizer_cuts_it(tokenizer):
    rng = random.Random(0)
    words = "".join(rng.choice(["the ", "return ", "中文", "a1b2 ", "\n\n"]) for _ in range(120_000))
    for text in (words, "ab" * 40_000 + " " * 60_000 + "中" * 25_001, " " * 25_001, "x" * 25_000 + " y"):
        pieces = guard(text)
        assert len(pieces) > 1 or len(text) < 25_003
        assert tokenizer.encode(text) == [i for piece in pieces for i in tokenizer.encode(piece)]
    whole = "ab " * 150_000
    assert (
        tokenizer.encode_parts([whole[:3], tokenizer.token_id("[EOS]"), whole[8:]])
        == [
            *tokenizer.encode(whole[:3]),
            tokenizer.token_id("[EOS]"),  # five characters long: the cut stays at 400 000
            *tokenizer.encode(whole[8:400_000]),
            *tokenizer.encode(whole[400_000:]),
        ]
    )


def test_special_tokens_and_padding(tokenizer, folder):
    assert isinstance(tokenizer, KimiTokenizer)
    assert tokenizer.vocab_size == VOCAB
    for offset, name in SPECIAL_TOKENS.items():
        assert tokenizer.token_id(name) == BASE + offset
        assert tokenizer.token_bytes(BASE + offset, special=True) == name.encode()
    assert tokenizer.token_id(f"<|reserved_token_{BASE + 5}|>") == BASE + 5
    assert tokenizer.token_id("a") == ord("a")
    with pytest.raises(KeyError, match="nothing"):
        tokenizer.token_id("nothing")
    assert [tokenizer.token_bytes(BASE + i) for i in (0, 2, 5, 255, 256, 999)] == [b""] * 6
    assert tokenizer.decode([tokenizer.token_id("<think>")]) == "<think>"  # not `special` in the file
    assert tokenizer.encode("a", bos=True) == [BASE, ord("a")]
    with pytest.raises(ValueError, match="-1"):
        tokenizer.token_bytes(-1)
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("\ud800")
    write_again = folder / "again"
    write_again.mkdir()
    write_tokenizer(write_again, VOCAB, seed=0)
    for name in ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja"):
        assert (write_again / name).read_bytes() == (folder / name).read_bytes()
    with pytest.raises(ValueError, match="at least 512, got 511"):
        write_tokenizer(write_again, 511, seed=0)


def _line(rank, token):
    return f"{base64.b64encode(token).decode()} {rank}"


@pytest.mark.parametrize(
    ("number", "line", "message"),
    [
        (3, "!!!! 2", r"line 3: '!!!!' is not base64"),
        (3, "AA== two", r"line 3: expected base64 and a rank, got 'AA== two'"),
        (3, "AA== -2", r"line 3: expected base64 and a rank"),
        (3, "AA==", r"line 3: expected base64 and a rank"),
        pytest.param(3, "AA== " + "9" * 5000, r"line 3: expected base64 and a rank", id="5000 digits"),
        (3, _line(1, b"zz"), r"line 3: rank 1 is also that of line 2"),
        (3, _line(2, b"\x01"), r"line 3: the same token as in line 2: b'\\x01'"),
        (
            258,
            _line(300, b"zz"),
            r"line 258: rank 300, but rank 257 is missing; the 259 tokens need ranks 0\.\.258",
        ),
        (3, _line(2, b"zz"), r"no token for the single byte 2"),
        (3, "中 2", r"expected lines of base64 and rank"),
    ],
)
def test_base_tokens_that_are_wrong(number, line, message, tmp_path):
    write_tokenizer(tmp_path, 512, seed=0)
    file = tmp_path / "tiktoken.model"
    lines = [*file.read_text().splitlines(), _line(256, b"th"), _line(257, b"he"), _line(258, b"in")]
    lines[number - 1] = line
    file.write_text("\n".join(lines))
    with pytest.raises(ModelError, match=r"tiktoken\.model: " + message):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (
            {"255": {"content": "x"}},
            r"added_tokens_decoder\.255`: is the id of a base token; tiktoken\.model holds 256",
        ),
        ({"512": {"content": "x"}}, r"added_tokens_decoder\.512`: not one of the special slots 256\.\.511"),
        ({"bos": {"content": "x"}}, r"added_tokens_decoder\.bos`: not one of the special slots"),
        ({"0300": {"content": "x"}}, r"added_tokens_decoder\.0300`: not one of the special slots"),
        ({"300": {"content": "[EOS]"}}, r"ids 257 and 300 are both '\[EOS\]'"),
        ({"300": {"content": "<|reserved_token_301|>"}}, r"ids 300 and 301 are both"),
        ({"300": "x"}, r"added_tokens_decoder\.300`: expected an object with the token's name"),
        ({"300": {"content": ""}}, r"added_tokens_decoder\.300`: expected an object with the token's name"),
        (None, r"key `added_tokens_decoder` must be an object"),
    ],
)
def test_special_tokens_that_are_wrong(added, message, tmp_path):
    write_tokenizer(tmp_path, 512, seed=0)
    file = tmp_path / "tokenizer_config.json"
    values = json.loads(file.read_text())
    values["added_tokens_decoder"] = None if added is None else values["added_tokens_decoder"] | added
    file.write_text(json.dumps(values))
    with pytest.raises(
        ModelError, match=r"tokenizer_config\.json: key .*" + message.replace("key `added", "`added")
    ):
        Tokenizer.from_folder(tmp_path)


def test_a_bos_token_that_there_is_not(tmp_path):
    write_tokenizer(tmp_path, 512, seed=0)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(file.read_text().replace('"bos_token": "[BOS]"', '"bos_token": "<s>"'))
    with pytest.raises(ModelError, match=r"key `bos_token`: `<s>` is not in tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)
