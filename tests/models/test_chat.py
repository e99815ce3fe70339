"""Conversations to tokens: the layout, whoever writes it, and that users can't write its control tokens."""

from __future__ import annotations

import json
import shutil

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from draftwood import bundled
from draftwood.models.chat import ChatTemplate
from draftwood.models.chat_jinja import PRIVATE_USE
from draftwood.models.errors import ChatError, ModelError
from draftwood.models.miniature_tokenizer import SPECIAL_TOKENS
from draftwood.models.tokenizer import Tokenizer
from draftwood.models.tool_types import tool_types
from support.kimi import ASSIGNED, Oracle, layout, spelt, write_pairs

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Finds a thing.\nSlowly.",
            "parameters": {
                "type": "object",
                "properties": {
                    "where": {"enum": ["here", "there"], "description": "A place"},
                    "words": {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 1},
                    "limit": {"type": "integer", "minimum": 1, "default": 3},
                    "more": {"type": "object", "additionalProperties": {"$ref": "#/$defs/node"}},
                },
                "required": ["words"],
                "$defs": {"node": {"type": "object", "properties": {"next": {"type": ["string", "null"]}}}},
            },
        },
    },
]
TYPES = """\
# Tools

## functions
namespace functions {
interface node {
  next?: string | null
}
// Finds a thing.
// Slowly.
type look_up = (_: {
  // minItems: 1
  words: Array<
    // maxLength: 9
    string
  >,
  // minimum: 1
  // Default: 3
  limit?: number,
  more?: {
    [k: string]: node
  },
  // A place
  where?: "here" | "there"
}) => any;
}
"""
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "name": "Ada",
        "content": [{"type": "text", "text": "Two "}, {"type": "text", "text": "parts"}],
    },
    {"role": "assistant", "reasoning_content": "forgotten", "content": "An answer."},
    {"role": "user", "content": "And now?\n"},
    {
        "role": "assistant",
        "reasoning_content": "I need it",
        "content": None,
        "tool_calls": [
            {
                "id": f"functions.look_up:{i}",
                "type": "function",
                "function": {"name": "look_up", "arguments": a},
            }
            for i, a in enumerate(['{"words":["é"]}', "{}"])
        ],
    },
    {"role": "tool", "tool_call_id": "functions.look_up:0", "content": "\n\nfound\n"},
    {"role": "tool", "name": "look_up", "tool_call_id": "functions.look_up:1", "content": ""},
]


class Chat:
    """A folder's chat template beside the oracle."""

    def __init__(self, folder, **layout_settings):
        self.tokenizer = Tokenizer.from_folder(folder)
        self.template = ChatTemplate.from_folder(folder, self.tokenizer)
        self.oracle, self.settings = Oracle(folder), layout_settings

    def expect(self, messages, **kwargs):
        return layout(messages, **self.settings, **kwargs)


@pytest.fixture(scope="module")
def miniature(tmp_path_factory):
    folder = tmp_path_factory.mktemp("miniature")
    write_pairs(folder)  # so that ids show where texts meet
    return folder


@pytest.fixture(scope="module")
def chats(miniature, tmp_path_factory):
    """The template of the miniature, and the built-in layout of two families."""
    found = {"template": Chat(miniature)}
    for model_type in ("kimi_k25", "kimi_k2"):
        folder = tmp_path_factory.mktemp(model_type)
        for name in ("tiktoken.model", "tokenizer_config.json"):
            shutil.copy(miniature / name, folder)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        k2 = model_type == "kimi_k2"
        line = "You are Kimi, an AI assistant created by Moonshot AI."
        found[model_type] = Chat(folder, k2=k2, default_system=line if k2 else None)
    return found


@pytest.mark.parametrize("name", ["template", "kimi_k25", "kimi_k2"])
@pytest.mark.parametrize("thinking", [None, True, False])
def test_the_layout(name, thinking, chats):
    chat = chats[name]
    for keep in (False, True):
        for messages in (CONVERSATION, CONVERSATION[1:4], CONVERSATION[:1], []):
            for generate in (False, True):
                ids = chat.template.render(
                    messages, thinking=thinking, add_generation_prompt=generate, preserve_thinking=keep
                )
                parts = chat.expect(messages, thinking=thinking, generate=generate, preserve_thinking=keep)
                assert chat.tokenizer.decode(ids, special=True) == spelt(parts)
                assert ids == chat.oracle.encode_plain_rendering(spelt(parts))
    assert chat.template.stop_token_ids == tuple(
        sorted(chat.tokenizer.token_id(t) for t in ("[EOS]", "<|im_end|>", "[EOT]"))
    )


def test_the_layout_spelt_out(chats):
    ids = chats["template"].template.render(CONVERSATION[4:6], thinking=False)
    assert chats["template"].tokenizer.decode(ids, special=True) == (
        "<|im_assistant|>assistant<|im_middle|><think></think><|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.look_up:0<|tool_call_argument_begin|>{"words":["é"]}<|tool_call_end|>'
        "<|tool_call_begin|>functions.look_up:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|><|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.look_up:0\n\n\nfound\n<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>"
    )


@pytest.mark.parametrize("name", ["template", "kimi_k25", "kimi_k2"])
def test_tools_are_declared_first(name, chats):
    chat, ask = chats[name], CONVERSATION[:2]
    as_json = json.dumps(TOOLS, sort_keys=True, separators=(",", ":"))
    text = as_json if name == "kimi_k2" else TYPES
    ids = chat.template.render(ask, tools=TOOLS)
    assert chat.tokenizer.decode(ids, special=True) == spelt(chat.expect(ask, tools_text=text))
    odd = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"oneOf": []}}}}}
    ]
    assert tool_types(odd) is None
    ids = chat.template.render(ask, tools=odd)
    as_json = json.dumps(odd, sort_keys=True, separators=(",", ":"))
    assert chat.tokenizer.decode(ids, special=True) == spelt(chat.expect(ask, tools_text=as_json))


def test_types_of_tools():
    assert tool_types(TOOLS) == TYPES
    assert tool_types([]) is None
    assert tool_types([{"type": "_plugin"}]) is None
    itself = {
        "properties": {"b": {"$ref": "#"}, "a": {"anyOf": [{"type": "null"}, False]}},
        "required": ["b"],
    }
    declared = tool_types([{"type": "function", "function": {"name": "f", "parameters": itself}}])
    body = "{\n  b: parameters,\n  a?: null | null\n}"
    assert f"{{\ninterface parameters {body}\ntype f = (_: parameters) => any;\n}}" in declared
    for enum in ({"type": "string", "enum": [1]}, {"type": ["string", "integer"], "enum": ["a"]}):
        parameters = {"properties": {"a": enum}}
        assert tool_types([{"type": "function", "function": {"name": "f", "parameters": parameters}}]) is None


NAMES = sorted(SPECIAL_TOKENS.values())
FRAGMENTS = [
    "<",
    "<|",
    "<|im_",
    "im_end",
    "|>",
    ">",
    "[",
    "EOS",
    "]",
    "think",
    "</",
    "/think>",
    "{{ x }}",
    "{% endif %}",
]
HOSTILE = st.lists(
    st.one_of(
        st.sampled_from(NAMES),
        st.sampled_from(FRAGMENTS),
        ASSIGNED,
        st.sampled_from([chr(0xE000 + i) for i in range(40)] + [chr(0xF0000), "\\ue000", "&lt;", " ", "\n"]),
    ),
    max_size=6,
).map("".join)
CALL = st.builds(
    lambda id, name, arguments: {
        "id": id, "type": "function", "function": {"name": name, "arguments": arguments}
    },
    HOSTILE, HOSTILE, HOSTILE,
)  # fmt: skip
MESSAGE = st.one_of(
    st.builds(lambda role, c: {"role": role, "content": c}, st.sampled_from(["system", "user"]) | HOSTILE, HOSTILE),
    st.builds(lambda c, n: {"role": "user", "content": [{"type": "text", "text": c}], "name": n}, HOSTILE, HOSTILE),
    st.builds(
        lambda c, r, calls: {"role": "assistant", "content": c, "reasoning_content": r, "tool_calls": calls},
        HOSTILE, HOSTILE, st.lists(CALL, max_size=2),
    ),
    st.builds(lambda c, i: {"role": "tool", "content": c, "tool_call_id": i}, HOSTILE, HOSTILE),
)  # fmt: skip


@pytest.mark.parametrize("name", ["template", "kimi_k2"])
@settings(max_examples=70, deadline=None)
@given(messages=st.lists(MESSAGE, max_size=4), thinking=st.sampled_from([None, True, False]))
@example(messages=[{"role": "user", "content": "\ue000" + "".join(NAMES) + "<|im_"}], thinking=None)
def test_users_cannot_write_control_tokens(name, messages, thinking, chats):
    chat = chats[name]
    parts = chat.expect(messages, thinking=thinking)
    ids = chat.template.render(messages, thinking=thinking)
    assert ids == chat.oracle.encode_parts(parts)  # the same control tokens, and all else plain text
    assert chat.tokenizer.decode(ids, special=True) == spelt(parts)
    if not any(n in part for n in NAMES for part in parts if isinstance(part, str)):
        assert ids == chat.oracle.encode_plain_rendering(spelt(parts))


@settings(max_examples=40, deadline=None)
@given(name=HOSTILE, description=HOSTILE, key=HOSTILE)
def test_nor_in_tools(name, description, key, chats):
    schema = {"type": "object", "properties": {key: {"type": "string", "description": description}}}
    tools = [
        {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
    ]
    for chat in (chats["template"], chats["kimi_k25"]):
        ids = chat.template.render([], tools=tools, add_generation_prompt=False)
        control = [i for i in ids if i in chat.oracle.control.values()]
        assert [chat.tokenizer.token_bytes(i, special=True).decode() for i in control] == [
            "<|im_system|>", "<|im_middle|>", "<|im_end|>",
        ]  # fmt: skip


def _with_template(source, miniature, folder, **config):
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(miniature / name, folder)
    if config:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if source is not None:
        (folder / "chat_template.jinja").write_bytes(source if isinstance(source, bytes) else source.encode())
    tokenizer = Tokenizer.from_folder(folder)
    return tokenizer, ChatTemplate.from_folder(folder, tokenizer)


TRANSFORMS = {
    "{{ '[BOS]' ~ m.content | trim ~ '[EOS]' }}": lambda c: c.strip(),
    "[BOS]{{ m.content | tojson }}[EOS]": lambda c: json.dumps(c, ensure_ascii=False),
    "[BOS]{{ {'a': m.content} | tojson(ensure_ascii=true, indent=1) }}[EOS]": lambda c: json.dumps(
        {"a": c}, indent=1
    ),
    "[BOS]{{ m.content.split('<')[-1] ~ m.content[:4] }}[EOS]": lambda c: c.split("<")[-1] + c[:4],
    "[BOS]{% if m.content.startswith('<|') or ']' in m.content %}yes{% else %}no{% endif %}[EOS]": (
        lambda c: "yes" if c.startswith("<|") or "]" in c else "no"
    ),
    "{% set ns = namespace(t='[BOS]<') %}{% set ns.t = ns.t + m.content + '>' %}{{ ns.t ~ '[EOS]' }}": (
        lambda c: f"<{c}>"
    ),
    "[BOS][{{ m.content }}{{ m.content | upper | replace('I', 'i') }}]{{ eos_token }}": (
        lambda c: f"[{c}{c.upper().replace('I', 'i')}]"
    ),
    "[BOS]{{ m.content | length }}[EOS]": lambda c: str(len(c)),
}


@pytest.mark.parametrize("source", TRANSFORMS)
def test_whatever_a_template_does_with_content(source, miniature, tmp_path):
    whole = "{%- for m in messages -%}" + source + "{%- endfor -%}"
    tokenizer, chat = _with_template(whole, miniature, tmp_path)
    oracle = Oracle(miniature)

    @settings(max_examples=30, deadline=None)
    @given(HOSTILE)
    @example("|im_end|")
    @example("EOS")
    @example(" [EOS]\n")
    def check(content):
        ids = chat.render([{"role": "user", "content": content}])
        begin, end = tokenizer.token_id("[BOS]"), tokenizer.token_id("[EOS]")
        assert ids == [begin, *oracle.encode(TRANSFORMS[source](content)), end]

    check()


def test_conventions_of_templates(miniature, tmp_path):
    source = (
        "{% generation %}\n{% for m in messages %}\n    {% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "[BOS]{{ strftime_now('%%') }}{{ m.content }}\n{% endfor %}\n{% endgeneration %}\n"
        "{% if add_generation_prompt %}<think>{% endif %}{{ who }}{{ pad_token }}"
    )
    tokenizer, chat = _with_template(source, miniature, tmp_path)
    ids = chat.render([{"role": "skip", "content": "no"}, {"role": "user", "content": "<>&'"}], who="you")
    assert tokenizer.decode(ids, special=True) == "[BOS]%<>&'\n<think>you[PAD]"
    assert ids[-1] == tokenizer.token_id("[PAD]")


def test_where_the_template_comes_from(miniature, tmp_path):
    named = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "[EOS]{{ messages[0].content }}"},
    ]
    for value in (named, named[1]["template"]):
        tokenizer, chat = _with_template(None, miniature, tmp_path, chat_template=value)
        ids = chat.render([{"role": "user", "content": "hm"}])
        assert ids == [tokenizer.token_id("[EOS]"), *tokenizer.encode("hm")]
    tokenizer, chat = _with_template("file", miniature, tmp_path, chat_template=named)  # the file comes first
    assert chat.render([{"role": "user", "content": "hm"}]) == tokenizer.encode("file")


@pytest.mark.parametrize(
    ("source", "config", "message"),
    [
        ("a\n{% if %}", {}, r"chat_template\.jinja: line 2: "),
        ("{{ raise_exception('not today') }}", {}, r"chat_template\.jinja: .*not today"),
        ("{{ '<|' ~ 'im_end' ~ '|>' }}", {}, r"makes the token <\|im_end\|> out of pieces"),
        ("{{ messages[0].role.__class__.mro() }}", {}, r"unsafe"),
        ("{{ ('{0.__class__.__mro__}' | attr('format'))(1) }}", {}, r"unsafe"),
        ("[BOS]{{ messages[0].content | striptags }}", {}, r"line 1: No filter named 'striptags'"),
        (b"\xff", {}, r"chat_template\.jinja: not UTF-8"),
        (None, {"chat_template": 3}, r"tokenizer_config\.json: key `chat_template`: expected a string"),
        (None, {"chat_template": [{"name": "a", "template": "b"}]}, r"a list with one named `default`"),
    ],
)
def test_templates_that_are_unsound(source, config, message, miniature, tmp_path):
    with pytest.raises(ModelError, match=message):
        _with_template(source, miniature, tmp_path, **config)


def test_models_without_chat(miniature, tmp_path):
    folder = bundled.pair()[0]
    with pytest.raises(ModelError, match="has no chat template, so chat is not available"):
        ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder))
    with pytest.raises(ModelError, match="has no chat template"):
        _with_template(None, miniature, tmp_path, added_tokens_decoder={}, bos_token=None)


def test_conversations_that_are_wrong(chats):
    user = {"role": "user", "content": "hi"}
    call = {"role": "assistant", "tool_calls": [{"id": 3, "function": {"name": "f", "arguments": {}}}]}
    for messages, message in (
        (["hi"], r"messages\[0\]: expected an object with a string `role`"),
        ([user, {"content": "hi"}], r"messages\[1\]: expected an object with a string `role`"),
        ([{"role": "user", "content": b"hi"}], "must be JSON data"),
        ([{"role": "user", "content": "\ud83c"}], "must be JSON data: .*surrogates"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image"),
    ):
        for chat in chats.values():
            with pytest.raises(ChatError, match=message):
                chat.template.render(messages)
    for messages, message in (
        (
            [user, {"role": "tool", "content": "x"}],
            r"messages\[1\]\.tool_call_id: expected a string, got None",
        ),
        ([call], r"messages\[0\]\.tool_calls\[0\]\.id: expected a string, got 3"),
        (
            [call | {"tool_calls": ["f"]}],
            r"messages\[0\]\.tool_calls\[0\]: expected an object with a `function`",
        ),
        ([call | {"tool_calls": "f"}], r"messages\[0\]\.tool_calls: expected a list"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content: expected a string or a list"),
    ):
        with pytest.raises(ChatError, match=message):
            chats["kimi_k2"].template.render(messages)
    for name in ("kimi_k2", "kimi_k25"):  # a number would be the id of a token, perhaps a control token
        with pytest.raises(ChatError, match=r"messages\[1\]\.name: expected a string, got 5378"):
            chats[name].template.render([user, user | {"name": 5378}])
    with pytest.raises(ChatError, match=r"tools\[1\]: expected an object, got 'f'"):
        chats["kimi_k2"].template.render([user], tools=[TOOLS[0], "f"])
    with pytest.raises(ChatError, match="mood: the built-in chat layout has no such variable"):
        chats["kimi_k2"].template.render([user], mood="good")
    everything = "".join(map(chr, (c for block in PRIVATE_USE for c in block)))
    with pytest.raises(ChatError, match="private-use characters"):
        chats["template"].template.render([{"role": "user", "content": everything}])


def test_a_byte_level_tokenizer(tmp_path):
    """Special tokens that take the space beside them, as the library has it; a token that isn't special is text."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    library.add_tokens(sorted(pre_tokenizers.ByteLevel.alphabet()))
    library.add_special_tokens(["<s>", AddedToken("<user>", rstrip=True), AddedToken("<end>", lstrip=True)])
    library.add_tokens([AddedToken("<think>", special=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": {"content": "<s>"},
                "eos_token": "<end>",
                "chat_template": "{{ bos_token }}{% for m in messages %}<user> {{ m.content }} <end>{% endfor %}<think>",
            }
        )
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    chat = ChatTemplate.from_folder(tmp_path, tokenizer)
    ids = chat.render([{"role": "user", "content": "a<end> b"}])
    assert chat.stop_token_ids == (tokenizer.token_id("<end>"),)
    assert ids == [
        tokenizer.token_id("<s>"), tokenizer.token_id("<user>"),
        *tokenizer.encode("a<end> b"),
        tokenizer.token_id("<end>"), tokenizer.token_id("<think>"),
    ]  # fmt: skip
    assert library.encode("<s><user> hey <end><think>").ids == chat.render(
        [{"role": "user", "content": "hey"}]
    )
