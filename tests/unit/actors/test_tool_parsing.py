"""parse(render(calls)) == calls in every format, and nothing that a policy can say makes a parser raise."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st

from actors.tools.base import FunctionTool, ToolError, check_of, schema_of_tool
from actors.tools.parsing.argument_types import typed, untyped
from actors.tools.parsing.base import CallError, Parsed, Thinking, ToolCall
from actors.tools.parsing.formats import written
from actors.tools.parsing.registry import FORMATS, parser_of
from actors.tools.parsing.tag_formats import TAG_FORMATS

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True).filter(
    lambda n: n not in {"None", "True", "False"} and n.isidentifier() and not __import__("keyword").iskeyword(n)
)
MARKS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "</parameter>", "</function>", "[ARGS]"),
    *('<|"|>', "</arg_value>", "</param>", "<![CDATA[", "<｜DSML｜", "</｜DSML｜", "</atem:"),
    *("<think>", "<|tool_call>", "<|tool_call|>"),
)
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


@given(calls=CALLS)
@settings(max_examples=80)
def test_what_a_format_writes_it_reads(calls: list[ToolCall]) -> None:
    apart = list({c.name: c for c in calls}.values())
    for name, form in FORMATS.items():
        said = apart if name in TAG_FORMATS else calls
        parsed = form.parse(form.render(said), schemas(said))
        assert (name, list(parsed.calls), parsed.content) == (name, said, "")


@given(calls=CALLS)
def test_newer_mistral_form_is_read(calls: list[ToolCall]) -> None:
    assert list(FORMATS["mistral"].parse(written("[TOOL_CALLS]NAME[ARGS]ARGUMENTS")(calls)).calls) == calls


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


@given(text=JUNK)
@settings(max_examples=2000)
def test_junk_is_text_or_an_error_that_can_be_told(text: str) -> None:
    for name, form in FORMATS.items():
        note(name)
        parsed = form.parse(text, [])
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


DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
DEEPSEEK_NEXT = "<｜tool▁call▁end｜><｜tool▁call▁begin｜>"
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
SOLAR = "<|tool_calls|><|tool_call:begin|>7<|tool_call:name|>f<|tool_call:args|>{}<|tool_call:end|>"
COHERE = '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n]<|END_ACTION|>'
GLM = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>"
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
    '<invoke name="g">\n</invoke>\n</minimax:tool_call>'
)
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="true">1</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
HARMONY = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
F_JSON, G_JSON = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {}}'
GEMMA = '<|tool_call>call:f{a:[<|"|>,}]<|"|>,null,None],b:{c:-2.5}}<tool_call|>'
LFM2 = """<|tool_call_start|>[f(a='it's "so"\n', b='x'), g(c=2)]<|tool_call_end|>"""
FG = [("f", F1), ("g", {})]


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("deepseek", DEEPSEEK.format('function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```'), FG[:1]),
        ("deepseek", DEEPSEEK.format('f<｜tool▁sep｜>{"a": 1}' + DEEPSEEK_NEXT + "g<｜tool▁sep｜>{}"), FG),
        ("deepseek", DEEPSEEK.format("f<｜tool▁sep｜>{"), [None]),
        ("kimi", KIMI.format(KIMI_CALL.format("f:0", '{"a": 1}') + KIMI_CALL.format("g:1", "{}")), FG),
        ("harmony", HARMONY + '<|constrain|>json<|message|>{"a": 1}', FG[:1]),
        ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', FG[:1]),
        ("harmony", "<|channel|>final<|message|>Write to=functions.f first.", []),
        ("cohere", COHERE, FG[:1]),
        ("granite", f"<|tool_call|>[{F_JSON}, {G_JSON}]<|/tool_call|>", FG),
        ("apriel", f"<tool_calls>\n{F_JSON}\n{G_JSON}\n</tool_calls>", FG),
        ("nemotron", f"<TOOLCALL>[{F_JSON}]</TOOLCALL>", FG[:1]),
        ("apertus", '<|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|>', FG),
        ("gigachat", f"<|function_call|>{F_JSON}", FG[:1]),
        ("functionary", '<function=f>{"a": 1}</function><function=g>{}</function>', FG),
        ("solar", SOLAR.format('{"a": 1}'), FG[:1]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]000000001[ARGS]"{\\"a\\": 1}"[TOOL_CALLS]g[ARGS]{}', FG),
        ("glm", GLM, FG),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", FG[:1]),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1", [None]),
        ("seed", "<seed:tool_call><function=f>\n<parameter=a>1</parameter>\n</function></seed:tool_call>", FG[:1]),
        ("minimax", MINIMAX, FG),
        ("minicpm", '<function name="f"><param name="a">1</param></function>\n<function name="g"></function>', FG),
        ("dsml", DSML, [("f", {"a": 1, "b": "1"})]),
        ("gemma", "<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:g{}<tool_call|>", FG),
        ("gemma", GEMMA, [("f", {"a": [",}]", None, None], "b": {"c": -2.5}})]),
        ("gemma", '<|tool_call>call:f{{"a": 1}}<tool_call|>', FG[:1]),
        ("gemma", "<|tool_call>call:f{a:<tool_call|>", [None]),
        ("pythonic", "So. <|tool_call_start|>[f(a=1), g()]<|tool_call_end|>", FG),
        ("pythonic", LFM2, [("f", {"a": 'it\'s "so"\n', "b": "x"}), ("g", {"c": 2})]),
    ],
)
def test_forms_of_more_families(name: str, text: str, calls: list[Any]) -> None:
    found = FORMATS[name].parse(text, []).calls
    assert [None if isinstance(c, CallError) else (c.name, dict(c.arguments)) for c in found] == calls


HERMES_CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "thinking", "n"),
    [
        (f"<think>{HERMES_CALL}</think>", Thinking(), 0),
        (f"<think>{HERMES_CALL}", Thinking(), 0),
        (f"<think>{HERMES_CALL}</think>{HERMES_CALL}", Thinking(), 1),
        (f"{HERMES_CALL}<think>{HERMES_CALL}</think>{HERMES_CALL}", Thinking(), 2),
        (HERMES_CALL.replace("1", '"<think>"') + HERMES_CALL, Thinking(), 2),
        (HERMES_CALL.replace("1", '"</think>"'), Thinking(), 1),
        (f"Hm. {HERMES_CALL}</think>{HERMES_CALL}", Thinking(begun="</think>"), 1),
        (HERMES_CALL, Thinking(begun="</think>"), 0),
        (f"[THINK]{HERMES_CALL}[/THINK]{HERMES_CALL}", Thinking((("[THINK]", "[/THINK]"),)), 1),
    ],
)
def test_a_call_in_a_thought_is_none(text: str, thinking: Thinking, n: int) -> None:
    assert len(FORMATS["hermes"].parse(text, [], thinking).calls) == n


@pytest.mark.parametrize(("name", "call"), [("llama", '{"name": "f", "parameters": {}}'), ("pythonic", "[f()]")])
def test_a_call_without_marks_may_follow_a_thought(name: str, call: str) -> None:
    parsed = FORMATS[name].parse(f"<think>{call}</think>\n{call}", [])
    assert parsed.calls == (ToolCall("f"),) and parsed.content == f"<think>{call}</think>"
    assert FORMATS[name].parse(f"<think>{call}</think>\nSo {call}", []).calls == ()


WORDS = ["90210", "03106", "true", "null", "None", "1.5", "[1]", "{}", '"q"', " 7"]
ANNOTATIONS: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=8) | st.sampled_from(WORDS),
    int: st.integers(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    type(None): st.none(),
    Literal["2024", "2025"]: st.sampled_from(["2024", "2025"]),
    Literal[1, "a", True]: st.sampled_from([1, "a"]),
    list[str]: st.lists(st.text(st.characters(codec="utf-8"), max_size=5), max_size=3),
    dict: st.dictionaries(st.text(max_size=3), st.none() | st.booleans() | st.integers(), max_size=3),
}


@st.composite
def annotated(draw: st.DrawFn) -> tuple[Any, Any]:
    """An annotation, and a value of it that no other type of it would write the same way."""
    parts = draw(st.lists(st.sampled_from([*ANNOTATIONS]), min_size=1, max_size=3, unique=True))
    part = draw(st.sampled_from(parts))
    value = draw(ANNOTATIONS[part])
    hint = functools.reduce(operator.or_, parts[1:], parts[0])
    if isinstance(value, str):
        other = untyped(value)
        check = check_of(schema_of_tool(FunctionTool(_with(hint)), "x"), "x")
        assume(isinstance(other, str) or value != value.strip() or check({"value": other}) is not None)
    return hint, value


def _with(hint: Any) -> Any:
    def lookup(value: Any) -> None: ...

    lookup.__annotations__["value"] = hint
    return lookup


@pytest.mark.parametrize(
    ("hint", "given", "taken"),
    [(int, 2.0, 2), (int | None, 2.0, 2), (list[int], [1, 2.0], [1, 2]), (float, 2.0, 2.0), (int | float, 2.0, 2.0)],
)
async def test_a_function_gets_what_its_annotations_say(hint: Any, given: Any, taken: Any) -> None:
    found: list[Any] = []

    def lookup(value: Any) -> None:
        found.append(value)

    lookup.__annotations__["value"] = hint
    tool = FunctionTool(lookup)
    assert check_of(schema_of_tool(tool, "x"), "x")({"value": given}) is None
    await tool.execute("e", {"value": given})
    assert repr(found) == repr([taken])
    with pytest.raises(ToolError, match="lookup has no argument 'other'; it has value"):
        await tool.execute("e", {"value": given, "other": 1})


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("write", [as_json, str], ids=["json", "python"])
@given(case=annotated())
@settings(max_examples=30)
def test_an_argument_in_tags_has_the_type_of_its_annotation(write: Any, case: tuple[Any, Any]) -> None:
    hint, value = case
    schema = schema_of_tool(FunctionTool(_with(hint)), "x")
    text = value if isinstance(value, str) else write(value)
    assume(not any(mark in text for mark in (*MARKS, "<")) and text == text.strip("\n"))
    for name in [name for name in TAG_FORMATS if not name.startswith("dsml")]:
        (call,) = FORMATS[name].parse(FORMATS[name].render([ToolCall("lookup", {"value": text})]), [schema]).calls
        assert isinstance(call, ToolCall)
        assert (name, repr(call.arguments["value"])) == (name, repr(value))
        assert check_of(schema, "x")(call.arguments) is None


DEFINED = {
    "type": "object",
    "$defs": {"zip": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "list": {"items": {"$ref": "#/$defs/zip"}}},
    "properties": {
        "ref": {"$ref": "#/$defs/zip"},
        "deep": {"oneOf": [{"$ref": "#/$defs/zip"}, {"type": "boolean"}]},
        "both": {"allOf": [{"$ref": "#/$defs/zip"}, {"minLength": 2}]},
        "kinds": {"type": ["string", "null"]},
        "nullable": {"type": "string", "nullable": True},
        "number": {"type": "integer", "nullable": True},
        "const": {"const": "7"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/zip"}},
        "wrong": {"$ref": "#/$defs/none"},
    },
    "additionalProperties": {"type": "string"},
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        *(("ref", "90210", "90210"), ("ref", "null", None), ("deep", "90210", "90210"), ("deep", "True", True)),
        *(("both", "90210", "90210"), ("kinds", "90210", "90210"), ("kinds", "None", None), ("const", "7", "7")),
        *(("nullable", "90210", "90210"), ("nullable", "null", None), ("number", "7", 7), ("number", "null", None)),
        *(("list", '["1", null]', ["1", None]), ("list", "['1', None]", ["1", None]), ("other", "7", "7")),
        *(("wrong", "7", 7), ("number", "seven", "seven")),
    ],
)
def test_an_argument_in_tags_follows_the_schema(key: str, text: str, value: Any) -> None:
    assert repr(typed(text, DEFINED, key)) == repr(value)
    schema = {"type": "function", "function": {"name": "f", "parameters": DEFINED}}
    assert (check_of(schema, "x")({key: value}) is None) == (key != "wrong" and value != "seven")


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
