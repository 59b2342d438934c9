"""parse(render(calls)) == calls in every format, and nothing that a policy can say makes a parser raise."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.tools.parsing.base import CallError, Parsed, ToolCall
from actors.tools.parsing.json_formats import parse_mistral, render_mistral_named
from actors.tools.parsing.registry import FORMATS, format_of_template, parser_of

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True).filter(
    lambda n: n not in {"None", "True", "False"} and n.isidentifier() and not __import__("keyword").iskeyword(n)
)
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "</parameter>", "</function>", "[ARGS]")
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=30).filter(
    lambda t: not any(mark in t for mark in MARKS)
)
LEAVES = (
    st.none() | st.booleans() | st.integers(-(10**25), 10**25) | st.floats(allow_nan=False, allow_infinity=False) | TEXT
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
CALLS = st.lists(st.builds(ToolCall, NAMES, st.dictionaries(NAMES, VALUES, max_size=4)), min_size=1, max_size=4)


def schemas(calls: Sequence[ToolCall]) -> list[Mapping[str, Any]]:
    """Say of each argument whether it is text: Qwen's tags do not."""
    return [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
        for name, properties in {
            c.name: {k: {"type": "string" if isinstance(v, str) else "object"} for k, v in c.arguments.items()}
            for c in calls
        }.items()
    ]


@pytest.mark.parametrize("name", [*FORMATS])
@given(calls=CALLS)
@settings(max_examples=40)
def test_what_a_format_writes_it_reads(name: str, calls: list[ToolCall]) -> None:
    if name == "qwen_xml":
        calls = list({c.name: c for c in calls}.values())
    form = FORMATS[name]
    parsed = form.parse(form.render(calls), schemas(calls))
    assert list(parsed.calls) == calls and parsed.content == ""


@given(calls=CALLS)
def test_newer_mistral_form_is_read(calls: list[ToolCall]) -> None:
    assert list(parse_mistral(render_mistral_named(calls)).calls) == calls


JUNK = st.text(max_size=80) | st.lists(
    st.sampled_from(
        [
            *MARKS, "<function=", "<parameter=", ">", "\n", "{", "}", "[", "]", "(", ")", '"', "'", ":", ",", ";", "=",
            '"name"', '"arguments"', '"parameters"', '{"name": "f", "arguments": {}}', "f(a=1)", "name", "1", "-",
            "null", "NaN", "\\ud800", '"\\ud800"', "1" * 5000, "[" * 3000, "(" * 300, "<|python_start|>", " ", "é",
        ]
    ),
    max_size=12,
).map("".join)  # fmt: skip


@pytest.mark.parametrize("name", [*FORMATS])
@given(text=JUNK)
@settings(max_examples=100)
def test_junk_is_text_or_an_error_that_can_be_told(name: str, text: str) -> None:
    parsed = FORMATS[name].parse(text, [])
    assert isinstance(parsed, Parsed)
    for call in parsed.calls:
        if isinstance(call, CallError):
            assert call.text.encode() and len(call.text) < 1000
        else:
            json.dumps(dict(call.arguments), allow_nan=False, ensure_ascii=False).encode()
            assert call.name


F1 = {"a": 1}
QWEN_XML = """<think>x</think><tool_call>
<function=f>
<parameter=a>
1
</parameter>
<parameter=b>
x y
</parameter>
</function>
</tool_call>"""


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", "no calls {}", "no calls {}", []),
        (
            "hermes",
            'So.\n<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            "So.",
            [("f", {"a": "</tool_call>"})],
        ),
        ("hermes", '<tool_call>{"name": "f"}', "", [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", F1)]),
        ("hermes", '<tool_call>{"name": "f", "argu', "", [None]),
        ("hermes", '<tool_call>{bad}</tool_call> <tool_call>{"name": "g"}</tool_call>', "", [None, ("g", {})]),
        ("qwen", QWEN_XML, "<think>x</think>", [("f", {"a": 1, "b": "x y"})]),
        ("qwen", "<tool_call><function=f><parameter=a>1</function></tool_call>", "", [None]),
        ("llama", '{"name": "f", "parameters": {"a": 1}}', "", [("f", F1)]),
        (
            "llama",
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            "",
            [("f", {}), ("g", {})],
        ),
        ("llama", '<|python_tag|>brave_search.call(query="x")', "", [("brave_search", {"query": "x"})]),
        ("llama", '{"answer": 3}', '{"answer": 3}', []),
        ("llama", '{"name": "f", "parameters": {', "", [None]),
        ("mistral", 'Hm. [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', "Hm.", [("f", F1)]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{', "", [("f", F1), None]),
        ("pythonic", "[f(a=[true, None], b=-2.5), g.h()]", "", [("f", {"a": [True, None], "b": -2.5}), ("g.h", {})]),
        ("pythonic", "[1, 2]", "[1, 2]", []),
        ("pythonic", "[f(a=open('x'))]", "", [None]),
        ("pythonic", "[f(1)]", "", [None]),
        ("pythonic", "[f(**{'a': 1}), g(a=1)]", "", [None, ("g", F1)]),
    ],
)
def test_forms_that_models_write(name: str, text: str, content: str, calls: list[Any]) -> None:
    parsed = FORMATS[name].parse(text, [])
    assert parsed.content == content
    found = [None if isinstance(c, CallError) else (c.name, dict(c.arguments)) for c in parsed.calls]
    assert found == calls


def test_positional_arguments_are_named_by_the_schema() -> None:
    tool = {"function": {"name": "f", "parameters": {"properties": {"a": {}, "b": {}}}}}
    assert FORMATS["pythonic"].parse("[f(1, b=2)]", [tool]).calls == (ToolCall("f", {"a": 1, "b": 2}),)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        *(("", "hermes"), ("<tool_call>", "qwen"), ("<function=x", "qwen_xml"), ("[TOOL_CALLS]", "mistral")),
        *(("<|python_tag|>", "llama"), ("<|start_header_id|> ipython", "llama"), ("<|python_start|>", "pythonic")),
    ],
)
def test_format_is_told_from_the_template(template: str, name: str) -> None:
    assert format_of_template(template) == name


@pytest.mark.slow
def test_transformers_own_response_templates_are_used_where_the_tokenizer_has_one(words: Any) -> None:
    trl = pytest.importorskip("trl.chat_template_utils", reason="pip install trl")
    import copy

    tokenizer = copy.deepcopy(words)
    tokenizer.chat_template = pytest.importorskip("trl").__path__ and trl.qwen3_chat_template
    tokenizer = trl.add_response_schema(tokenizer)
    parse = parser_of("transformers", tokenizer.chat_template, tokenizer)
    text = 'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert parse(text, []).calls == (ToolCall("f", {"a": 1}),)
    assert parse("plain", []) == Parsed("plain")
    for junk in ("<tool_call>{", "<tool_call>\n{}\n</tool_call>", "</think>", "<tool_call>[1]</tool_call>"):
        assert all(isinstance(c, CallError) for c in parse(junk, []).calls)
