"""Tool conversations over real tokenizers and published chat templates: what is appended is what the template writes.

SmolLM2's tokenizer carries every template here; the marks of the other families are added to a copy as special tokens,
as those models have them. The templates are those that TRL ships, and one written after Mistral's published form.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.rendering.renderer import Conversation, Renderer
from actors.rendering.tool_messages import Form, with_system_text
from actors.tools.parsing.base import ToolCall
from actors.tools.parsing.registry import FORMATS, format_of_template
from pipeline.schema import Message
from tests.support.chat_templates import MISTRAL

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two integers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    },
)
MARKS = {
    "llama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"],
    "mistral": ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>", "<s>"],
    "qwen": ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
}
ENDS = {"llama": ("<|begin_of_text|>", "<|eot_id|>"), "mistral": ("<s>", "</s>")}


def published(name: str) -> str:
    trl = pytest.importorskip("trl", reason="pip install trl: it carries the chat templates of many models")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


@functools.cache
def dressed(tokenizer: Any, name: str) -> Any:
    """SmolLM2's tokenizer with another family's marks and template."""
    other = copy.deepcopy(tokenizer)
    family = "qwen" if name.startswith("qwen") else "llama" if name.startswith("llama") else name
    if family == "smollm2":
        return other
    other.add_special_tokens({"additional_special_tokens": MARKS[family]})
    if family in ENDS:
        other.bos_token, other.eos_token = ENDS[family]
    other.chat_template = MISTRAL if name == "mistral" else published(name)
    return other


def answers(*texts: str) -> list[Message]:
    return [Message("tool", t, {"name": "add", "tool_call_id": f"00001{i:04d}"}) for i, t in enumerate(texts)]


def said_of(calls: list[ToolCall], content: str = "") -> Message:
    stated = [
        {"id": f"00001{i:04d}", "type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
        for i, c in enumerate(calls)
    ]
    return Message("assistant", content, {"tool_calls": stated})


def go_on(
    renderer: Renderer, before: Conversation, text: str, new: list[Message], calls: list[ToolCall], append: bool
) -> tuple[Conversation, tuple[int, ...]]:
    ids = renderer.completion_ids(text)
    after = renderer.extend(before, ids, renderer.completed(ids), new, parsed_reply=said_of(calls), append=append)
    assert after.prompt_ids[-len(after.added_ids) :] == after.added_ids
    if after.branch == before.branch:
        assert after.prompt_ids == (*before.prompt_ids, *ids, *after.added_ids)
    else:
        assert after.branch == before.branch + 1 and after.added_ids == after.prompt_ids
    return after, ids


CALLS = [ToolCall("add", {"a": 1, "b": 2}), ToolCall("add", {"a": 3, "b": 4}), ToolCall("add", {"a": 5, "b": 6})]
THREE = {
    "smollm2": "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response>\n"
    "<tool_response>\n11\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "qwen2_5": "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response>\n"
    "<tool_response>\n11\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response>\n"
    "<tool_response>\n11\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3_1": "".join(f'<|start_header_id|>ipython<|end_header_id|>\n\n"{n}"<|eot_id|>' for n in (3, 7, 11))
    + "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama3_2": "".join(f'<|start_header_id|>ipython<|end_header_id|>\n\n"{n}"<|eot_id|>' for n in (3, 7, 11))
    + "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "".join(
        f'[TOOL_RESULTS]{{"content": "{n}", "call_id": "00001{i:04d}"}}[/TOOL_RESULTS]'
        for i, n in enumerate((3, 7, 11))
    ),
}


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("name", [*THREE])
def test_three_answers_of_one_turn_stand_as_the_template_says(smollm2: Any, name: str, append: bool) -> None:
    tokenizer = dressed(smollm2, name)
    renderer = Renderer(tokenizer)
    form = FORMATS[format_of_template(renderer.template, renderer.tokenizer)]
    first = renderer.start([Message("user", "Add.")], TOOLS)
    assert '"add"' in first.text and first.tools == TOOLS
    second, ids = go_on(renderer, first, form.render(CALLS), answers("3", "7", "11"), CALLS, append)
    assert list(form.parse(renderer.completed(ids).text, TOOLS).calls) == CALLS
    assert second.branch == 0
    assert renderer.decode_ids(second.added_ids) == THREE[name]


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("name", [*THREE])
def test_a_whole_tool_dialogue_is_token_exact_in_every_branch(smollm2: Any, name: str, append: bool) -> None:
    renderer = Renderer(dressed(smollm2, name))
    form = FORMATS[format_of_template(renderer.template, renderer.tokenizer)]
    conversation = renderer.start([Message("user", "Add.")], TOOLS)
    for turn in range(3):
        call = [ToolCall("add", {"a": turn, "b": 1})]
        conversation, _ = go_on(renderer, conversation, form.render(call), answers(str(turn + 1)), call, append)
        if append:
            assert conversation.branch == 0
    conversation, _ = go_on(renderer, conversation, "It is 3.", [Message("user", "Sure?")], [], append)
    assert renderer.decode_ids(conversation.prompt_ids) == conversation.text
    assert conversation.branch == 0 or not append


def test_thinking_that_the_template_drops_forks_and_append_keeps_it(smollm2: Any) -> None:
    renderer = Renderer(dressed(smollm2, "qwen3"))
    text = "<think>\nhm\n</think>\n\n" + FORMATS["qwen"].render(CALLS[:1])
    for append in (False, True):
        conversation = renderer.start([Message("user", "Add.")], TOOLS)
        conversation, _ = go_on(renderer, conversation, text, answers("3"), CALLS[:1], append)
        assert conversation.branch == 0 and "hm" in conversation.text, "thinking of an open turn is kept"
        conversation, _ = go_on(
            renderer, conversation, "<think>\nso\n</think>\n\n3", [Message("user", "And 2 + 2?")], [], append
        )
        assert conversation.branch == int(not append)
        assert ("hm" in conversation.text and "so" in conversation.text) == append


def test_mistral_refuses_calls_as_text_and_gets_them_stated(smollm2: Any) -> None:
    """Two replies in a row without the user between them are refused, so the second prompt states the calls."""
    renderer = Renderer(dressed(smollm2, "mistral"))
    conversation = renderer.start([Message("user", "Add.")], TOOLS)
    for _ in range(2):
        text = FORMATS["mistral"].render(CALLS[:1])
        conversation, _ = go_on(renderer, conversation, text, answers("3"), CALLS[:1], False)
    assert conversation.branch == 1 and conversation.text.count("[TOOL_RESULTS]") == 2
    with_user = renderer.extend(
        conversation, renderer.completion_ids("3"), renderer.completed(renderer.completion_ids("3")),
        [Message("user", "Sure?")], append=True,
    )  # fmt: skip
    assert renderer.decode_ids(with_user.added_ids) == "[INST]Sure?[/INST]"


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=30)


@given(answer=TEXT, reply=TEXT, append=st.booleans(), name=st.sampled_from([*THREE]))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sampled_ids_survive_tool_turns_whatever_is_said(
    smollm2: Any, answer: str, reply: str, append: bool, name: str
) -> None:
    renderer = Renderer(dressed(smollm2, name))
    first = renderer.start([Message("user", "Add.")], TOOLS)
    after, ids = go_on(renderer, first, reply, answers(answer), [], append)
    if append:
        assert after.branch == 0 and after.prompt_ids[: len(first.prompt_ids) + len(ids)] == (*first.prompt_ids, *ids)


def test_a_template_without_tools_gets_a_system_text_and_answers_of_the_user() -> None:
    assert with_system_text([Message("system", "Be brief."), Message("user", "Add.")], TOOLS)[0].content.startswith(
        "Be brief.\n\n# Tools\n"
    )
    form = Form(calls="text", answers=False)
    shown = form.messages([Message("user", "Add."), *answers("1", "2"), Message("user", "Go on.")], lambda m: m)
    assert [m["role"] for m in shown] == ["user", "user"]
    assert shown[1]["content"] == "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>\nGo on."


def test_no_call_stands_before_the_answer_of_another(smollm2: Any) -> None:
    """Llama's template takes one call a message. A program may give the answers in the order in which they came, or
    not all of them."""
    renderer = Renderer(dressed(smollm2, "llama3_1"))
    called = said_of([ToolCall("add", {"a": 1}), ToolCall("add", {"a": 2})])
    between = "<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"
    one, two = answers("one", "two")
    for told in ([one, two], [two, one], [two]):
        text = renderer.start([Message("user", "Add."), called, *told, Message("user", "Go on.")]).text
        assert f'1}}}}{between}"two"' not in text and f'2}}}}{between}"one"' not in text
        assert f'2}}}}{between}"two"' in text
