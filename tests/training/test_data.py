"""Unusable data is named by file and line, and skipped or refused as asked."""

import pytest

from draftwood.training.data import DataError, read_prompts


def read(files, on_bad="refuse"):
    return read_prompts(
        files, lambda text: [ord(c) % 50 for c in text], vocab_size=50, max_tokens=8, on_bad=on_bad
    )


@pytest.fixture
def bad(tmp_path):
    text = tmp_path / "a.txt"
    text.write_bytes(b"fine\n\nfar too long a prompt\n\xff\xfe\nalso ok\n")
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    lines = tmp_path / "b.jsonl"
    lines.write_text(
        '{"prompt": "abc"}\n{"prompt": ""}\n{"text": "abc"}\n{nope\n{"prompt_token_ids": [1, 50]}\n'
        '{"prompt_token_ids": [1, 49]}\n{"prompt_token_ids": [1.5]}\n'
    )
    return text, empty, lines, tmp_path / "absent.txt"


EXPECTED = [
    "a.txt:3: the prompt has 21 tokens; at most 8 leave room",
    "a.txt:4: not UTF-8: byte 0xff at column 1",
    "empty.txt: the file is empty",
    "b.jsonl:2: the prompt is empty",
    "b.jsonl:3: expected an object with `prompt` or `prompt_token_ids`",
    "b.jsonl:4: not JSON: Expecting property name enclosed in double quotes at column 2",
    "b.jsonl:5: token id 50 is outside the vocabulary 0..49",
    "b.jsonl:7: `prompt` must be text, `prompt_token_ids` a list of integers",
    "absent.txt: cannot be read: No such file or directory",
]


def test_skip_reports_each_and_keeps_the_rest(bad, tmp_path):
    prompts, problems = read(bad, "skip")
    assert [p.removeprefix(f"{tmp_path}/") for p in problems] == EXPECTED
    assert [len(p) for p in prompts] == [4, 7, 3, 2]


def test_refuse_names_them_all(bad):
    with pytest.raises(DataError, match="9 unusable") as e:
        read(bad)
    for line in EXPECTED:
        assert line in str(e.value)


def test_nothing_usable_is_an_error_even_when_skipping(bad):
    with pytest.raises(DataError, match="no usable prompt"):
        read([bad[1]], "skip")
