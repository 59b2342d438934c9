"""A reply is shown while it is sampled: always a beginning of it. The events of every dialect, joined, say what the
whole answer says."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from actors.engine.base import Generation, Sampling
from actors.gateway.anthropic import MESSAGES
from actors.gateway.chat import CHAT
from actors.gateway.chat_recorder import ChatRecorder
from actors.gateway.dialect import Dialect, ProgramAnswer
from actors.gateway.preview import known_before
from actors.gateway.reply import Choice
from actors.gateway.requests import ParameterRules
from actors.gateway.responses import RESPONSES
from actors.rendering.partial_text import PartialText
from actors.rendering.renderer import Renderer
from actors.rollout.recorder import Recorder
from actors.tools.parsing.base import Thinking, ToolCall
from actors.tools.parsing.registry import FORMATS, Parser
from pipeline.schema import FinishReason, VersionSpan
from pipeline.views.vocabulary import is_byte
from tests.unit.actors.test_gateway import TOKENIZERS

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("add", "look_up")]
CALLS = [ToolCall("add", {"a": 2}), ToolCall("look_up", {"b": "x <y> {z}"})]
WORDS = [
    "I add. ", "\n", " ", "é🦜", "<", "[", "{", "to=", "a < b", "<think>", "</think>", "<thi", "<tool", "Hm.",
    '{"name": ', '{"x": 1}', "[1, 2]", "STOP", "ST", "\ufffd",
]  # fmt: skip


def pieces(rng: random.Random, form: str) -> list[str]:
    """Fragments of a reply, calls of a form among them, some of them broken off."""
    written = FORMATS[form].render(rng.sample(CALLS, rng.randrange(1, 3)))
    return [*WORDS, written, written[: rng.randrange(1, len(written))]]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(seed=st.integers(0, 2**32))
def test_the_text_so_far_is_a_beginning_of_the_text_of_all_tokens(kind: str, seed: int) -> None:
    """Of random bytes too, most of which are no characters."""
    rng = random.Random(seed)
    tokenizer = TOKENIZERS[kind]()
    ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(6))]
    ids += tokenizer.encode("".join(rng.choice(WORDS) for _ in range(rng.randrange(6)))).ids
    ids += tokenizer.encode("x").ids[-1:]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    partial = PartialText(tokenizer.decode, lambda i: is_byte(fast.convert_ids_to_tokens(i)))
    whole, at = tokenizer.decode(ids), 0
    while at < len(ids):
        end = rng.randint(at + 1, len(ids))
        partial.add(ids[at:end])
        at = end
        assert whole.startswith(partial.text)
    assert partial.text == whole


@pytest.mark.parametrize("form", FORMATS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_the_content_so_far_is_a_beginning_of_the_content_whatever_follows(form: str, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices(pieces(rng, form), k=rng.randrange(1, 7)))
    thinking = Thinking(begun=rng.choice(["", "</think>"]))
    parser = Parser((FORMATS[form].parse,), thinking, (FORMATS[form],))
    parsed = parser(text, TOOLS)
    content = parsed.content if any(isinstance(call, ToolCall) for call in parsed.calls) else text
    known, before, at = parser.partial(), 0, 0
    while at < len(text):
        at = rng.randint(at + 1, len(text))
        n_known = known(text[:at])
        assert before <= n_known and content.startswith(text[:n_known])
        before = n_known


def test_plain_text_is_shown_at_once_and_only_a_possible_call_is_held_back() -> None:
    parser = Parser((FORMATS["hermes"].parse,), forms=(FORMATS["hermes"],))
    for text, shown in [
        ("I add", "I add"), ("a < b", "a < b"), ("so <tool", "so"), ("so <toolbox", "so <toolbox"),
        ("<think>x <tool_call> y", "<think>x <tool_call> y"), ("<think>x</think> <tool_call>", "<think>x</think>"),
    ]:  # fmt: skip
        assert text[: parser.partial()(text)] == shown
    assert Parser((FORMATS["hermes"].parse,)).partial()("I add") == 0  # nobody knows where a call of another begins


@given(text=st.text("ab", max_size=12), stop=st.text("ab", min_size=1, max_size=4))
def test_what_is_shown_before_a_stop_text_is_never_cut(text: str, stop: str) -> None:
    whole = text.find(stop)
    for at in range(len(text) + 1):
        n_known = known_before(stop, text[:at])
        assert n_known <= (len(text) if whole < 0 else whole)
        assert n_known > at - len(stop) or text.find(stop, 0, at) >= 0  # no more than a stop text is held back


def events(data: Sequence[bytes]) -> Iterator[Any]:
    for event in data:
        _, _, text = event.decode().rpartition("data: ")
        if text.strip() != "[DONE]":
            yield orjson.loads(text)


def joined_chat(data: Sequence[bytes]) -> dict[str, Any]:
    assert data[-1] == b"data: [DONE]\n\n"
    choices: dict[int, dict[str, Any]] = {}
    for chunk in events(data):
        whole = {name: chunk[name] for name in ("id", "created", "model")} | {"usage": chunk["usage"]}
        for part in chunk["choices"]:
            found = choices.setdefault(part["index"], {"content": "", "tool_calls": [], "logprobs": []})
            found["content"] += part["delta"].get("content", "")
            found["tool_calls"] += part["delta"].get("tool_calls", [])
            found["logprobs"] += (part["logprobs"] or {"content": []})["content"]
            found["finish_reason"] = part["finish_reason"]
    return whole | {"choices": [choices[index] for index in sorted(choices)]}


def whole_chat(body: dict[str, Any]) -> dict[str, Any]:
    def choice(found: dict[str, Any]) -> dict[str, Any]:
        calls = [{"index": i, **call} for i, call in enumerate(found["message"].get("tool_calls", []))]
        scores = (found["logprobs"] or {"content": []})["content"]
        said = {"content": found["message"]["content"] or "", "tool_calls": calls, "logprobs": scores}
        return said | {"finish_reason": found["finish_reason"]}

    del body["object"]
    return body | {"choices": [choice(found) for found in body["choices"]]}


def joined_messages(data: Sequence[bytes]) -> dict[str, Any]:
    first, *rest = events(data)
    whole: dict[str, Any] = first["message"]
    open_block: Any = None
    for event in rest:
        match event["type"]:
            case "content_block_start":
                assert open_block is None and event["index"] == len(whole["content"])
                open_block = event["content_block"]
                whole["content"].append(open_block)
                written = ""
            case "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    written += delta["partial_json"]
                    open_block["input"] = orjson.loads(written)
                else:
                    name = delta["type"].removesuffix("_delta")
                    open_block[name] += delta[name]
            case "content_block_stop":
                open_block = None
            case "message_delta":
                whole |= event["delta"] | {"usage": event["usage"]}
    assert open_block is None and event["type"] == "message_stop"
    return whole


def joined_response(data: Sequence[bytes]) -> dict[str, Any]:
    found = list(events(data))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    whole: dict[str, Any] = found[0]["response"]
    said: dict[str, list[Any]] = {}
    for event in found:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(said)
                said[event["item"]["id"]] = ["", []]
            case "output_item.done":
                whole["output"].append(event["item"])
                part = event["item"].get("content", [{}])[0]
                text = part.get("text", event["item"].get("arguments"))
                assert said[event["item"]["id"]] == [text, part.get("logprobs", [])]
            case kind if kind.endswith(".delta"):
                said[event["item_id"]][0] += event["delta"]
                said[event["item_id"]][1] += event.get("logprobs", [])
    last = found[-1]["response"]
    assert found[-1]["type"] == f"response.{last['status']}"
    return whole | {name: last[name] for name in ("status", "incomplete_details", "usage")}


JOINED = {CHAT: joined_chat, MESSAGES: joined_messages, RESPONSES: joined_response}


def request(dialect: Dialect, rng: random.Random) -> Any:
    body: dict[str, Any] = {"stream": True}
    if rng.random() < 0.7:
        body["tools"] = [tool["function"] for tool in TOOLS] if dialect is not CHAT else TOOLS
    messages = [{"role": "user", "content": "2 + 3?"}]
    if dialect is CHAT:
        body |= {"messages": messages, "n": rng.randrange(1, 3), "stream_options": {"include_usage": True}}
        body |= {"logprobs": rng.random() < 0.5, "stop": rng.choice([[], ["STOP"], ["S", "STOP"]])}
    elif dialect is MESSAGES:
        body |= {"messages": messages, "max_tokens": 99, "stop_sequences": rng.choice([[], ["STOP"]])}
        body["thinking"] = {"type": rng.choice(["enabled", "disabled"])}
        body["tools"] = [{"name": tool["name"], "input_schema": SCHEMA} for tool in body.get("tools", [])]
    else:
        body |= {"input": messages, "include": rng.choice([[], ["message.output_text.logprobs"]])}
        body["tools"] = [{"type": "function", **tool} for tool in body.get("tools", [])]
    return dialect.read(orjson.dumps(body), Sampling(max_tokens=64), ParameterRules(), lambda number: None)


@pytest.fixture(scope="module")
def opening(smollm2: Any) -> Renderer:
    """A template that opens the thought of each reply."""
    import copy

    other = copy.deepcopy(smollm2)
    other.chat_template = other.chat_template.replace(
        "assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}"
    )
    renderer = Renderer(other)
    return renderer


@pytest.fixture(scope="module")
def plain(smollm2: Any) -> Renderer:
    return Renderer(smollm2)


@pytest.mark.parametrize("dialect", JOINED, ids=lambda dialect: dialect.name)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_the_events_joined_are_the_whole_answer(
    plain: Renderer, opening: Renderer, dialect: Dialect, seed: int
) -> None:
    rng = random.Random(seed)
    renderer = rng.choice([plain, opening])
    begun = "</think>" if renderer is opening else ""
    recording = ChatRecorder(
        Recorder(renderer), Parser((FORMATS["hermes"].parse,), Thinking(begun=begun), (FORMATS["hermes"],))
    )
    call = request(dialect, rng)
    pendings = [recording.begin(recording.prompt(call)) for _ in range(call.n)]
    previews = [recording.preview(pending) for pending in pendings]
    answer = ProgramAnswer("0" * 24, 1, "m", call, (), len(pendings[0].prompt_ids), renderer)
    writer, written, generations = dialect.events(answer), list[bytes](), list[Any]()
    shown: list[Choice] = []
    for pending, preview in zip(pendings, previews, strict=True):
        text = "".join(rng.choices(pieces(rng, "hermes"), k=rng.randrange(6)))
        ids = [*renderer.tokenizer.encode(text, add_special_tokens=False), renderer.end_ids[0]]
        n, at = len(ids), 0
        logprobs = np.linspace(-2.0, -0.1, n, dtype=np.float32)
        reason = rng.choice([FinishReason.STOP, FinishReason.LENGTH])
        whole = Generation(np.asarray(ids, np.int32), logprobs, (VersionSpan(0, n, 0),), reason)
        generations.append((pending, whole))
        while at < n and rng.random() < 0.9:
            end = rng.randint(at + 1, n)
            preview.add(whole.token_ids[at:end], logprobs[at:end])
            at = end
            shown = [one.choice(writer.apart) for one in previews]
            written += writer.more(shown)
    readings = [recording.read(pending, whole, call.stop) for pending, whole in generations]
    finished = zip(generations, readings, strict=True)
    choices = [Choice(recording.finish(pending, whole, 1.0, read), whole) for (pending, whole), read in finished]
    for before, choice in zip(shown, choices, strict=False):
        assert choice.reply.content.startswith(before.reply.content)
    answer = ProgramAnswer("0" * 24, 1, "m", call, tuple(choices), len(pendings[0].prompt_ids), renderer)
    written += writer.end(answer)
    body = orjson.loads(orjson.dumps(dialect.body(answer)))
    assert JOINED[dialect](written) == (whole_chat(body) if dialect is CHAT else body)
