"""Writes a small tokenizer in the layout of Kimi K2.6: the same files, the same special tokens, fewer base tokens.

For models of a few megabytes that exercise all that a real folder does. Its base tokens come from generated text.
"""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from draftwood.models.byte_level import token_bytes
from draftwood.models.kimi import SPECIAL_SLOTS
from draftwood.models.tokenizer import CONFIG_FILE, KIMI_FILE

TEMPLATE_FILE = "chat_template.jinja"
MIN_VOCAB_SIZE = 256 + SPECIAL_SLOTS

SPECIAL_TOKENS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
"""Offset from the end of the base vocabulary -> name, as in Kimi K2.6."""

_TEXT_TOO = range(11, 16), range(22, 24)
"""Offsets that are not `special` in tokenizer_config.json: a decoder shows their names."""

TEMPLATE = """\
{#- The layout of Kimi K2.6. Variables: messages, tools, tools_ts_str, thinking, preserve_thinking, add_generation_prompt. -#}
{%- macro text_of(content) -%}
  {%- if content is string -%}
    {{ content }}
  {%- elif content is not none and content is defined -%}
    {%- for part in content -%}
      {%- if part.type != 'text' -%}
        {{ raise_exception('content parts of type ' ~ part.type ~ ' are not supported, only text') }}
      {%- endif -%}
      {{ part.text }}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}

{%- macro calls_of(message) -%}
  {%- if message.tool_calls -%}
    {{ '<|tool_calls_section_begin|>' }}
    {%- for call in message.tool_calls -%}
      {%- set arguments = call.function.arguments -%}
      {{ '<|tool_call_begin|>' ~ call.id ~ '<|tool_call_argument_begin|>' }}
      {{- arguments if arguments is string else arguments | tojson }}
      {{- '<|tool_call_end|>' }}
    {%- endfor -%}
    {{ '<|tool_calls_section_end|>' }}
  {%- endif -%}
{%- endmacro -%}

{%- set role_tokens = {'user': '<|im_user|>', 'assistant': '<|im_assistant|>'} -%}
{%- set last = namespace(answer=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' and not message.tool_calls -%}
    {%- set last.answer = loop.index0 -%}
  {%- endif -%}
{%- endfor -%}

{%- if tools -%}
  {{ '<|im_system|>tool_declare<|im_middle|>' ~ (tools_ts_str or tools | tojson(separators=(',', ':'))) ~ '<|im_end|>' }}
{%- endif -%}

{%- for message in messages -%}
  {{ role_tokens.get(message.role, '<|im_system|>') ~ (message.name or message.role) ~ '<|im_middle|>' }}
  {%- if message.role == 'assistant' -%}
    {%- set kept = preserve_thinking or (loop.index0 > last.answer and thinking is not false) -%}
    {{ '<think>' ~ (message.reasoning_content or '' if kept else '') ~ '</think>' }}
  {%- elif message.role == 'tool' -%}
    {{ '## Return of ' ~ message.tool_call_id ~ '\\n' }}
  {%- endif -%}
  {{ text_of(message.content) ~ calls_of(message) ~ '<|im_end|>' }}
{%- endfor -%}

{%- if add_generation_prompt -%}
  {{ '<|im_assistant|>assistant<|im_middle|>' ~ ('<think></think>' if thinking is false else '<think>') }}
{%- endif -%}
"""


def write_tokenizer(folder: Path, vocab_size: int, seed: int) -> None:
    """Write `tiktoken.model`, `tokenizer_config.json` and `chat_template.jinja` into an existing folder.

    `vocab_size` counts all ids, the 256 special ones included. The same arguments give the same files.
    Raises `ValueError` below 512: 256 single bytes and 256 special slots are always there.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size: expected at least {MIN_VOCAB_SIZE}, got {vocab_size}")
    n_base = vocab_size - SPECIAL_SLOTS
    lines = (f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(_base_tokens(n_base, seed)))
    (folder / KIMI_FILE).write_text("".join(lines), encoding="ascii")
    added = {
        str(n_base + offset): {"content": name, "special": not any(offset in r for r in _TEXT_TOO)}
        for offset, name in SPECIAL_TOKENS.items()
    }
    named = {f"{key}_token": f"[{key.upper()}]" for key in ("bos", "eos", "unk", "pad")}
    config = {"added_tokens_decoder": added, **named, "tokenizer_class": "TikTokenTokenizer"}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / TEMPLATE_FILE).write_text(TEMPLATE, encoding="utf-8")


def _base_tokens(n: int, seed: int) -> list[bytes]:
    """The 256 bytes, then merges learned from generated text, in the order learned."""
    tokens = [bytes([byte]) for byte in range(256)]
    if n > len(tokens):
        library = tokenizers.Tokenizer(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=n, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        library.train_from_iterator(_text(n, seed), trainer)
        ids = library.get_vocab()
        learned = (token_bytes(text) for text in sorted(ids, key=ids.__getitem__))
        tokens += [token for token in learned if len(token) > 1]
    if len(tokens) != n:
        raise ValueError(f"vocab_size: the generated text gave {len(tokens)} base tokens, not {n}")
    return tokens


def _text(n: int, seed: int) -> list[str]:
    """Lines of words over a few alphabets, with code, numbers and Han text among them; enough for `n` tokens."""
    rng = random.Random(seed)
    onsets, vowels, ends = [*"bcdfglmnprstvw", "st", "tr"], [*"aeiou", "ea"], ["", "n", "s"]
    han = [chr(c) for c in rng.sample(range(0x4E00, 0x9FA5), 64)]

    def word() -> str:
        kind = rng.random()
        if kind < 0.1:
            return "".join(rng.choices(han, k=rng.randint(1, 3)))
        if kind < 0.2:
            return rng.choice(
                ["def", "return", "self.", "()", "==", "the", "Don't", str(rng.randrange(1000))]
            )
        text = "".join(
            rng.choice(onsets) + rng.choice(vowels) + rng.choice(ends) for _ in range(rng.randint(1, 3))
        )
        return text.capitalize() if kind < 0.3 else text

    return [" ".join(word() for _ in range(10)) + "\n" for _ in range(40 + n // 6)]
