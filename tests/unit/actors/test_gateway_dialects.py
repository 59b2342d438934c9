"""Three dialects state one conversation: the same prompt, the same branch, and answers that the packages of OpenAI and
Anthropic read with their own types."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.base import Generation, Sampling
from actors.gateway.anthropic import MESSAGES, read_messages
from actors.gateway.chat import CHAT, read_chat
from actors.gateway.dialect import Dialect, ProgramAnswer
from actors.gateway.reply import ChatReply, Choice
from actors.gateway.requests import ParameterRules
from actors.gateway.responses import RESPONSES, read_response
from actors.servers.refusal import Refusal
from pipeline.schema import FinishReason, Order, TrajectoryStatus
from tests.support.agent_programs import Caller, Serve, assert_exact, echoing, run_order, user
from tests.support.stub_engine import StubEngine

pytestmark = pytest.mark.timeout(400)
RUN, RULES = Sampling(max_tokens=64, temperature=1.0), ParameterRules()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
THINKS = "<think>\nI add.\n</think>\n\nLet me see. "

CHAT_REQUEST: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        user("2 + 3?"),
        {"role": "assistant", "content": "I add.", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        user("And?"),
    ],
    "tools": [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}],
    "max_tokens": 9,
}  # fmt: skip
MESSAGES_REQUEST: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        user("2 + 3?"),
        {"role": "assistant", "content": [
            {"type": "text", "text": "I add."}, {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 2}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "5"}]},
            {"type": "text", "text": "And?"}]},
    ],
    "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
    "max_tokens": 9,
}  # fmt: skip
RESPONSES_REQUEST: dict[str, Any] = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "2 + 3?"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "I add.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{ "a": 2 }'},
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
        {"role": "user", "content": "And?"},
    ],
    "tools": [{"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}],
    "max_output_tokens": 9,
}  # fmt: skip
REQUESTS = [(CHAT, CHAT_REQUEST), (MESSAGES, MESSAGES_REQUEST), (RESPONSES, RESPONSES_REQUEST)]


def read(dialect: Dialect, body: Any, rules: ParameterRules = RULES) -> Any:
    return dialect.read(orjson.dumps(body), RUN, rules, lambda number: None)


def test_the_dialects_state_the_same_conversation() -> None:
    first, *others = [read(dialect, body) for dialect, body in REQUESTS]
    for call in others:
        assert (call.messages, call.keys, call.tools, call.tokens_max) == (
            first.messages, first.keys, first.tools, first.tokens_max
        )  # fmt: skip
        assert call.ignored == ()


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in [(value, key), *places(item)]]


@given(seed=st.integers(0, 2**32))
def test_a_request_with_anything_anywhere_is_read_or_refused_and_says_which_part(seed: int) -> None:
    rng = random.Random(seed)
    dialect, body = copy.deepcopy(rng.choice(REQUESTS))
    for _ in range(rng.randrange(1, 3)):
        container, key = rng.choice(places(body))
        container[key] = rng.choice([None, 1, True, "x", "", [], {}, [[]], [{}], {"type": []}, {"type": "x"}, [None]])
    try:
        assert read(dialect, body).messages
    except Refusal as refusal:
        assert refusal.status == 400 and refusal.message
        assert dialect.error(refusal)["error"]["type"] == "invalid_request_error"


RELIED = [
    (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    (MESSAGES, {"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    (MESSAGES, {"messages": [user("x"), {"role": "assistant", "content": "The answer is ("}]}, "messages"),
    (RESPONSES, {"tool_choice": "required"}, "tool_choice"),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"conversation": "conv_1"}, "conversation"),
]


@pytest.mark.parametrize(("dialect", "more", "name"), RELIED)
def test_what_a_program_may_rely_on_is_refused_or_named(dialect: Dialect, more: dict[str, Any], name: str) -> None:
    body = {**(MESSAGES_REQUEST if dialect is MESSAGES else RESPONSES_REQUEST), **more}
    with pytest.raises(Refusal) as caught:
        read(dialect, body)
    assert caught.value.param == name
    assert read(dialect, body, ParameterRules(unsupported="ignore")).ignored == (name,)


@pytest.mark.parametrize(
    ("dialect", "more"),
    [
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        (MESSAGES, {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]}),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        (MESSAGES, {"max_tokens": None}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        (RESPONSES, {"input": [{"type": "computer_call_output", "call_id": "x"}]}),
        (RESPONSES, {"tools": [{"type": "web_search"}]}),
        (RESPONSES, {"previous_response_id": "resp_1"}),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    ],
)
def test_what_a_policy_of_text_cannot_read_is_refused_whatever_the_rules(dialect: Dialect, more: Any) -> None:
    body = {**(MESSAGES_REQUEST if dialect is MESSAGES else RESPONSES_REQUEST), **more}
    with pytest.raises(Refusal):
        read(dialect, body, ParameterRules(unsupported="ignore"))


def test_a_continued_response_has_every_message_where_its_instructions_are_empty() -> None:
    call = read(RESPONSES, {"input": "say hello", "instructions": [{"type": "input_text", "text": ""}]})
    choice = Choice(
        ChatReply("hello", (), "stop"),
        Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), (), FinishReason.STOP),
    )
    answer = ProgramAnswer("1" * 24, 0, "m", call, (choice,), 1, None)  # type: ignore[arg-type]
    body = {"input": "again", "previous_response_id": f"resp_{answer.number}"}
    further = RESPONSES.read(orjson.dumps(body), RUN, RULES, {answer.number: answer}.get)
    assert [message.content for message in further.messages] == ["say hello", "hello", "again"]


def test_fields_without_effect_are_named() -> None:
    body = copy.deepcopy(MESSAGES_REQUEST) | {"thinking": {"type": "enabled", "budget_tokens": 1024}, "speed": "fast"}
    body["messages"][2]["content"][0]["is_error"] = True
    assert read(MESSAGES, body).ignored == ("speed", "messages.is_error", "thinking.budget_tokens")
    body = copy.deepcopy(RESPONSES_REQUEST) | {
        "reasoning": {"effort": "low"},
        "include": ["reasoning.encrypted_content"],
    }
    body["tools"][0]["strict"] = True
    assert read(RESPONSES, body).ignored == ("include", "reasoning.effort", "tools.strict")


def test_a_thought_that_a_program_states_apart_is_in_the_prompt() -> None:
    said = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"},
                                             {"type": "text", "text": " Yes."}]}  # fmt: skip
    call = read_messages(
        orjson.dumps({"messages": [user("x"), said, user("y")], "max_tokens": 9}), RUN, ParameterRules()
    )
    items = [{"type": "reasoning", "id": "rs_x", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
             {"role": "assistant", "content": " Yes."}]  # fmt: skip
    other = read_response(orjson.dumps({"input": [user("x"), *items, user("y")]}), RUN, ParameterRules())
    whole = {"role": "assistant", "content": "<think>Hm.</think> Yes."}
    third = read_chat(orjson.dumps({"messages": [user("x"), whole, user("y")]}), RUN, ParameterRules())
    assert call.keys == other.keys == third.keys


@pytest.fixture
def calling(smollm2: Any) -> StubEngine:
    """Thinks and calls a tool; then answers."""
    call = smollm2(THINKS + CALL, add_special_tokens=False).input_ids
    final = smollm2("<think>\nGood.\n</think>\n\nIt is 5.", add_special_tokens=False).input_ids

    def script(ids: Any, sampling: Any) -> list[int]:
        return [*(final if "<tool_response>" in smollm2.decode(ids) else call), smollm2.eos_token_id]

    return StubEngine(script=script)


def limits(smollm2: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 128}
    return {"tokenizer": smollm2, "sampling": sampling, "max_turns": 4, "max_tokens": 8192, "max_length": 4096}


@pytest.mark.parametrize("thinking", [True, False])
async def test_anthropics_package_plays_with_tools_thoughts_and_streams_in_one_branch(
    serve: Serve, long_order: Order, smollm2: Any, calling: StubEngine, thinking: bool
) -> None:
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic to test its client against the gateway")
    asked: dict[str, Any] = {"model": "m", "max_tokens": 100, "tools": MESSAGES_REQUEST["tools"]}
    if thinking:
        asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    thoughts = [["thinking"], []][not thinking]

    async def run(task: Any, client: Caller) -> float:
        url = client.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=url, api_key="unused") as api:
            history: list[Any] = [user("2 + 3?")]
            counted = {name: value for name, value in asked.items() if name != "max_tokens"}
            tokens = await api.messages.count_tokens(messages=history, **counted)
            message = await api.messages.create(messages=history, **asked)
            anthropic.types.Message.model_validate(message.model_dump(), strict=True)
            assert message.usage.input_tokens == tokens.input_tokens
            assert [block.type for block in message.content] == [*thoughts, "text", "tool_use"]
            assert message.stop_reason == "tool_use" and message.content[-1].input == {"a": 2}
            result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "5"}
            history += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
            async with api.messages.stream(messages=history, **asked) as stream:
                whole = await stream.get_final_message()
            assert [block.type for block in whole.content] == [*thoughts, "text"] and whole.stop_reason == "end_turn"
            assert whole.content[-1].text.endswith("It is 5.")
            history += [{"role": "assistant", "content": whole.content}, user("Sure?")]
            async with api.messages.stream(messages=history, **asked) as stream:
                again = await stream.get_final_message()
            assert again.content[-1].type == "text"
            again = await api.messages.create(messages=history[:1], **asked | {"stop_sequences": ["see"]})
            assert (again.stop_reason, again.stop_sequence) == ("stop_sequence", "see")
            with pytest.raises(anthropic.BadRequestError, match="max_turns") as refused:
                await api.messages.create(messages=[user("more")], **asked)
            assert refused.value.body["error"]["type"] == "invalid_request_error"
            with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
                await api.messages.create(messages=[user("x")], **asked | {"max_tokens": 0})
        return 1.0

    trajectory = await run_order(serve(calling, run, **limits(smollm2)), long_order)
    assert [t.branch for t in trajectory.turns] == [0, 0, 0, 1], trajectory.failure
    assert_exact(trajectory, calling)


@pytest.mark.parametrize("by", ["items", "previous", "references"])
async def test_openais_responses_play_with_tools_thoughts_and_streams_in_one_branch(
    serve: Serve, long_order: Order, smollm2: Any, calling: StubEngine, by: str
) -> None:
    openai = pytest.importorskip("openai", reason="pip install openai to test its client against the gateway")
    asked: dict[str, Any] = {"model": "m", "instructions": "Be brief.", "tools": RESPONSES_REQUEST["tools"]}

    async def run(task: Any, client: Caller) -> float:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="unused") as api:
            items: list[Any] = [user("2 + 3?")]

            def after(response: Any, *new: Any) -> dict[str, Any]:
                if by == "previous":
                    return {"previous_response_id": response.id, "input": list(new)}
                said = [item.model_dump(exclude_none=True) for item in response.output]
                if by == "references":
                    said = [{"type": "item_reference", "id": item["id"]} for item in said]
                items.extend([*said, *new])
                return {"input": items}

            whole = await api.responses.create(input=items, include=["message.output_text.logprobs"], **asked)
            openai.types.responses.Response.model_validate(whole.model_dump(), strict=True)
            assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
            assert whole.output[0].content[0].text == "\nI add.\n" and whole.output_text.strip() == "Let me see."
            assert whole.output[1].content[0].logprobs[0].logprob < 0 and whole.status == "completed"
            assert orjson.loads(whole.output[2].arguments) and whole.usage.output_tokens > 9
            told = {"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "5"}
            async with api.responses.stream(**after(whole, told), **asked) as stream:
                kinds = [event.type async for event in stream]
                second = await stream.get_final_response()
            assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
            assert {"response.reasoning_text.delta", "response.output_text.done"} <= set(kinds)
            assert second.output_text.strip() == "It is 5."
            async with api.responses.stream(**after(second, user("Sure?")), **asked) as stream:
                kinds = [event.type async for event in stream]
            cut = await api.responses.create(input="2 + 3?", max_output_tokens=2, store=False, **asked)
            assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
            with pytest.raises(openai.BadRequestError, match="stored"):
                await api.responses.create(input="x", previous_response_id=cut.id, **asked)
            with pytest.raises(openai.BadRequestError, match="max_turns"):
                await api.responses.create(input="x", **asked)
        return 1.0

    trajectory = await run_order(serve(calling, run, **limits(smollm2)), long_order)
    assert [t.branch for t in trajectory.turns] == [0, 0, 0, 1], trajectory.failure
    assert_exact(trajectory, calling)


async def test_dialects_may_take_turns_in_one_conversation(serve: Serve, long_order: Order, words: Any) -> None:
    async def run(task: Any, client: Caller) -> float:
        history = [user("say hello")]
        for path, name in (("/chat/completions", "messages"), ("/messages", "messages"), ("/responses", "input")) * 2:
            status, _, _ = await client.post(path, {name: history, "max_tokens": 9, "max_output_tokens": 9})
            assert status == 200
            history += [{"role": "assistant", "content": "4 5"}, user("again")]
        return 1.0

    engine = echoing(words)
    trajectory = await run_order(serve(engine, run), long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE and len(trajectory.turns) == 6, trajectory.failure
    assert {turn.branch for turn in trajectory.turns} == {0}
    assert_exact(trajectory, engine)


async def test_errors_have_the_form_of_their_dialect(serve: Serve, long_order: Order, words: Any) -> None:
    async def run(task: Any, client: Caller) -> float:
        root = client.base_url.split("/sessions/")[0]
        for path in ("/chat/completions", "/responses"):
            assert "code" in (await client.post(path, b"{"))[1]["error"]
            assert (await client.post(f"{root}/v1{path}", {}))[1]["error"]["code"] == "session_not_found"
        for path in ("/messages", "/messages/count_tokens"):
            assert (await client.post(path, b"{"))[1]["type"] == "error"
            answer = (await client.post(f"{root}/v1{path}", {}))[1]
            assert (answer["type"], answer["error"]["type"]) == ("error", "not_found_error")
        long = {"messages": [user("say " * 400)], "max_tokens": 9}
        status, answer, _ = await client.post("/messages", long)
        assert status == 400 and answer["error"]["message"].startswith("prompt is too long: ")
        key = {"x-api-key": client.base_url.split("/")[-2]}
        status, _, _ = await client.post(
            f"{root}/v1/messages", {"messages": [user("say")], "max_tokens": 9}, headers=key
        )
        assert status == 200
        return 1.0

    trajectory = await run_order(serve(echoing(words), run, max_length=256), long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
