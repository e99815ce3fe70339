"""Kimi's tokenizer and chat layout once more, plainly: what the package's own are checked against.

The pre-tokeniser is written out rule by rule on single characters, BPE is the loop of its definition, the layout is a list of
texts and names of special tokens.
"""

from __future__ import annotations

import base64
import json
import random
import re
import unicodedata
from itertools import pairwise
from pathlib import Path

import regex
from hypothesis import strategies as st

from draftwood.models.miniature_tokenizer import write_tokenizer

WHITE_SPACE = {*map(chr, [*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B)])} | set(
    "\u2028\u2029\u202f\u205f\u3000"
)
HAN = regex.compile(r"\p{Han}", regex.V1)
# What this Python's Unicode tables know: newer characters have a class only in the newer tables of the package's library.
ASSIGNED = st.characters(exclude_categories=("Cn", "Cs"))
CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


class Oracle:
    """Reads a folder's files by itself. `control`: name -> id."""

    def __init__(self, folder: Path) -> None:
        lines = [line.split() for line in (folder / "tiktoken.model").read_text().splitlines()]
        self.ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
        self.control = {entry["content"]: int(key) for key, entry in added.items()}

    def encode(self, text):
        return [
            i for guarded in guard(text) for piece in pre_tokens(guarded) for i in self.bpe(piece.encode())
        ]

    def encode_parts(self, parts):
        """Texts and ("special", name) pairs; neighbouring texts are one."""
        ids, text = [], ""
        for part in [*parts, ("special", None)]:
            if isinstance(part, str):
                text += part
            else:
                ids += self.encode(text) + ([] if part[1] is None else [self.control[part[1]]])
                text = ""
        return ids

    def encode_plain_rendering(self, text):
        """A rendered template as the published tokenizer reads it: special tokens wherever they are spelt."""
        names = "|".join(map(re.escape, self.control))
        parts = re.split(f"({names})", text)
        return self.encode_parts(("special", p) if p in self.control else p for p in parts)

    def bpe(self, word):
        parts = [word[i : i + 1] for i in range(len(word))]
        while True:
            pairs = [(self.ranks.get(a + b, 1 << 30), i) for i, (a, b) in enumerate(pairwise(parts))]
            rank, i = min(pairs, default=(1 << 30, 0))
            if rank == 1 << 30:
                return [self.ranks[p] for p in parts]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]


def write_pairs(folder, seed=0):
    """A tokenizer whose tokens are pairs of bytes in random order, so that ids show where text was split."""
    write_tokenizer(folder, 512, seed)
    rng, text = random.Random(seed), [*range(0x20, 0x7F), 0x09, 0x0A, 0x0D]
    pairs = {(a, b) for a in [*text, *range(0x80, 0xC0)] for b in text} | {
        (rng.randrange(256), rng.randrange(256)) for _ in range(8000)
    }
    base = [bytes([b]) for b in range(256)] + [bytes(pair) for pair in rng.sample(sorted(pairs), len(pairs))]
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(base))
    (folder / "tiktoken.model").write_text("".join(lines))
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    added = config["added_tokens_decoder"].items()
    config["added_tokens_decoder"] = {str(int(i) + len(base) - 256): token for i, token in added}
    file.write_text(json.dumps(config))
    return len(base)


def guard(text, max_chars=400_000, max_run=25_000):
    """Long text in pieces."""
    pieces = []
    for start in range(0, len(text), max_chars):
        piece, run, space = "", 0, None
        for c in text[start : start + max_chars]:
            run = run + 1 if c.isspace() == space else 1
            space = c.isspace()
            if run > max_run:
                pieces.append(piece)
                piece, run = "", 1
            piece += c
        pieces.append(piece)
    return pieces


def pre_tokens(text):
    at = 0
    while at < len(text):
        end = next(e for rule in RULES if (e := rule(text, at)) > at)
        yield text[at:end]
        at = end


def _run(text, at, test, limit=1 << 30):
    end = at
    while end < len(text) and end - at < limit and test(text[end]):
        end += 1
    return end


def _letter(c):
    return unicodedata.category(c)[0] == "L"


def _number(c):
    return unicodedata.category(c)[0] == "N"


def _han(c):
    return HAN.fullmatch(c) is not None


def _upper(c):
    return not _han(c) and (
        unicodedata.category(c) in ("Lu", "Lt", "Lm", "Lo") or unicodedata.category(c)[0] == "M"
    )


def _lower(c):
    return not _han(c) and (
        unicodedata.category(c) in ("Ll", "Lm", "Lo") or unicodedata.category(c)[0] == "M"
    )


def _newline(c):
    return c in "\r\n"


def _han_run(text, at):
    return _run(text, at, _han)


def _word(text, at, least_upper, least_lower):
    """An optional leading character, upper-case letters, lower-case letters: the longest first, then backtracking."""
    lead = 0 if _newline(text[at]) or _letter(text[at]) or _number(text[at]) else 1
    for start in (at + lead, at):
        for middle in range(_run(text, start, _upper), start + least_upper - 1, -1):
            end = _run(text, middle, _lower)
            if end - middle >= least_lower:
                return _contraction(text, end)
    return at


def _contraction(text, at):
    for c in CONTRACTIONS:
        if text[at : at + len(c)].replace("ſ", "s").lower() == c:
            return at + len(c)
    return at


def _digits(text, at):
    return _run(text, at, _number, limit=3)


def _symbols(text, at):
    start = at + (text[at] == " ")
    end = _run(text, start, lambda c: not (c in WHITE_SPACE or _letter(c) or _number(c)))
    return _run(text, end, _newline) if end > start else at


def _space_run(text, at):
    return _run(text, at, WHITE_SPACE.__contains__)


def _newlines(text, at):
    end = _space_run(text, at)
    while end > at and not _newline(text[end - 1]):
        end -= 1
    return end


def _space_before_word(text, at):
    end = _space_run(text, at)
    return end if end == len(text) else end - 1


RULES = (
    _han_run,
    lambda text, at: _word(text, at, 0, 1),
    lambda text, at: _word(text, at, 1, 0),
    _digits,
    _symbols,
    _newlines,
    _space_before_word,
    _space_run,
)


def layout(
    messages,
    *,
    tools_text=None,
    thinking=None,
    preserve_thinking=False,
    generate=True,
    k2=False,
    default_system=None,
):
    """A conversation as texts and ("special", name) pairs. `k2`: of K2-Thinking, which opens no reasoning."""

    def special(name):
        return ("special", name)

    def turn(role, name, *body):
        token = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}.get(role, "<|im_system|>")
        return [special(token), name, special("<|im_middle|>"), *body, special("<|im_end|>")]

    parts = []
    if tools_text is not None:
        parts += turn("system", "tool_declare", tools_text)
    if default_system is not None and (not messages or messages[0]["role"] != "system"):
        parts += turn("system", "system", default_system)
    finals = [i for i, m in enumerate(messages) if m["role"] == "assistant" and not m.get("tool_calls")]
    for i, m in enumerate(messages):
        body = []
        if m["role"] == "assistant":
            kept = preserve_thinking or (i > (finals or [-1])[-1] and thinking is not False)
            body += [
                special("<think>"),
                (m.get("reasoning_content") or "") if kept else "",
                special("</think>"),
            ]
        if m["role"] == "tool":
            body += ["## Return of ", m["tool_call_id"], "\n"]
        content = m.get("content")
        body += [content] if isinstance(content, str) else [p["text"] for p in content or []]
        if m.get("tool_calls"):
            body += [special("<|tool_calls_section_begin|>")]
            for call in m["tool_calls"]:
                body += [special("<|tool_call_begin|>"), call["id"], special("<|tool_call_argument_begin|>")]
                body += [call["function"]["arguments"], special("<|tool_call_end|>")]
            body += [special("<|tool_calls_section_end|>")]
        parts += turn(m["role"], m.get("name") or m["role"], *body)
    if generate:
        parts += [special("<|im_assistant|>"), "assistant", special("<|im_middle|>")]
        if thinking is not None or not k2:
            parts += [special("<think>")] + ([special("</think>")] if thinking is False else [])
    return parts


def spelt(parts):
    """The parts as one string, special tokens spelt out."""
    return "".join(part if isinstance(part, str) else part[1] for part in parts)
