"""``parser: auto`` over published chat templates: it reads each call as the template wrote it, or it refuses.

SmolLM2's tokenizer carries every template that TRL ships, and the marks in its text as special tokens."""

from __future__ import annotations

import copy
import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from actors.process.preflight import check_prompts
from actors.rollout.agent_loop import Opening
from actors.tools.parsing.base import Thinking, ToolCall
from actors.tools.parsing.probe import TemplateProbe
from actors.tools.parsing.registry import FORMATS, format_of_template, parser_of
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError, Findings
from pipeline.schema import Message
from tests.support.chat_templates import published, tokenizer_of

TEMPLATES = published()
REFUSED = {"lfm2", "lfm2_training", "granite3"}
"""They list the tools and leave the calls out."""
WITHOUT_CALLS = (
    *("cohere", "deepseek_r1", "gemma", "gemma3", "idefics3", "llama2", "llama3", "llava", "mistral_v1", "phi3"),
    *("qwen2_5_vl", "smollm2", "smolvlm", "template_"),
)
READ = {
    "deepseekv3": "deepseek", "diffusion_gemma": "gemma", "gemma4": "gemma", "glm4moe": "glm", "gptoss": "harmony",
    "lfm2_2_5": "pythonic", "mistral": "mistral", "mistral_v11": "mistral", "mistral_v13": "mistral",
    "mistral_v15": "mistral", "lfm2_v2": "pythonic", "llama3_1": "llama", "llama3_2": "llama", "muse_glimmer": "muse",
    "nemotron_3": "qwen_xml", "qwen2_5": "hermes", "qwen3": "hermes", "qwen3_5": "qwen_xml", "qwen3_6": "qwen_xml",
    "qwen3_8": "qwen_xml",
}  # fmt: skip
"""Families by the longest beginning of their templates' names."""


def expected(name: str) -> str:
    families = [*READ, *WITHOUT_CALLS]
    family = max((family for family in families if name.startswith(family)), key=len)
    return READ.get(family, "hermes")


@pytest.mark.parametrize(("loop", "parser", "problems"), [
    ("tool_agent", "auto", 1), ("program", "auto", 0), ("tool_agent", "granite", 0), ("tool_agent", "harmless", 1),
])  # fmt: skip
def test_config_check_refuses_a_template_whose_calls_no_parser_reads(
    tmp_path: Path, loop: str, parser: str, problems: int
) -> None:
    tokenizer = copy.deepcopy(tokenizer_of("granite3"))
    tokenizer.add_tokens(["<|tool_call|>"])
    tokenizer.save_pretrained(tmp_path)
    options = {"parser": parser} | ({"command": ["true"]} if loop == "program" else {})
    section = {"name": "arithmetic", "loop": {"name": loop, "options": options}, "max_tokens": 8192}
    config = RunConfig.model_validate(
        {"model": {"source": str(tmp_path), "max_length": 8192}, "environments": {"game": section}}
    )
    found = Findings()
    check_prompts(config, {"game": Opening((Message("user", "x"),), tuple(schemas([("look", {})])))}, tmp_path, found)
    said = [line for line in (found.problems or found.notes) if "game.loop.options.parser: " in line]
    assert len(found.problems) == problems
    assert len(said) == int(parser != "granite")
    if parser == "auto":
        assert "its marks are those of granite" in said[0] and str(tmp_path) in said[0]


@pytest.mark.parametrize("name", [*TEMPLATES])
def test_auto_is_the_family_s_own_form_or_refuses(name: str) -> None:
    tokenizer = tokenizer_of(name)
    if name in REFUSED:
        with pytest.raises(
            ConfigurationError,
            match=r"(?s)loop: auto found no parser: the chat template of here lists the tools and writes no",
        ):
            parser_of("auto", TEMPLATES[name], tokenizer, "loop", "here")
    else:
        assert format_of_template(TEMPLATES[name], tokenizer) == expected(name)


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00<"), max_size=12)
KEYS = st.from_regex("[a-z]{1,4}", fullmatch=True)
NUMBERS = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=4,
)
NAMES = st.from_regex("[a-z]{2,6}_[a-z]{2,6}", fullmatch=True)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=2, unique_by=lambda call: call[0]
)


def schemas(calls: list[Any]) -> list[dict[str, Any]]:
    """Say of each argument whether it is text: tags do not."""
    tools = []
    for name, arguments in calls:
        texts = {key: {"type": "string", "description": "A."} for key, v in arguments.items() if isinstance(v, str)}
        function = {"name": name, "description": "A.", "parameters": {"type": "object", "properties": texts}}
        tools.append({"type": "function", "function": function})
    return tools


UNQUOTED = ("lfm2_2_5", "lfm2_2_5_v2")
"""They write text between quotes as it is, so that quotes in a list or a backslash cannot be told from theirs."""
OWN_FORMS = [name for name in TEMPLATES if name not in REFUSED and expected(name) != "hermes"]


@functools.cache
def thinking_of(name: str) -> Thinking:
    return TemplateProbe(tokenizer_of(name)).thinking


@pytest.mark.parametrize("name", [name for name in OWN_FORMS if not name.endswith("_training")])
@given(calls=CALLS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much])
def test_auto_reads_every_call_as_the_template_wrote_it(name: str, calls: list[Any]) -> None:
    if name in UNQUOTED:
        assume(not re.search(r"\\\\|'", json.dumps(calls)))
    tokenizer = tokenizer_of(name)
    tools = schemas(calls)
    user = {"role": "user", "content": "Look it up."}
    asked = tokenizer.apply_chat_template([user], tools=tools, tokenize=False)
    prompt = tokenizer.apply_chat_template([user], tools=tools, tokenize=False, add_generation_prompt=True)
    for as_text in (False, True):
        stated = [
            {
                "id": f"{index:09d}",
                "type": "function",
                "function": {"name": tool, "arguments": json.dumps(arguments) if as_text else arguments},
            }
            for index, (tool, arguments) in enumerate(calls)
        ]
        try:
            reply = {"role": "assistant", "content": "", "tool_calls": stated}
            whole = tokenizer.apply_chat_template([user, reply], tools=tools, tokenize=False)
        except Exception:
            continue  # it refuses a second call, or arguments as text or as a dictionary
        said, thinking = whole.removeprefix(prompt), thinking_of(name)
        if said == whole:
            said, thinking = whole.removeprefix(asked), replace(thinking, begun="")
        parsed = FORMATS[expected(name)].parse(said, tools, thinking)
        written = [(tool, arguments) for tool, arguments in calls if tool in said]
        found = [(call.name, dict(call.arguments)) for call in parsed.calls if isinstance(call, ToolCall)]
        assert len(parsed.calls) == len(found)
        assert sorted_text(found) == sorted_text(written)


def sorted_text(calls: list[Any]) -> str:
    return json.dumps(calls, sort_keys=True)
