"""Calls of a session become turns in branches, token for token what the engine saw."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.base import Generation, Sampling
from actors.gateway.chat import read_chat
from actors.gateway.chat_recorder import ChatRecorder
from actors.gateway.conversation import ProgramCall, key_of
from actors.gateway.generate import read_generate
from actors.gateway.reply import ChatReply
from actors.gateway.requests import ParameterRules
from actors.rendering.renderer import Renderer
from actors.rollout.recorder import PendingCall, Recorder
from actors.rollout.summaries import is_summary
from actors.servers.refusal import Refusal
from actors.tools.parsing.base import ToolCall, stated_call
from actors.tools.parsing.registry import FORMATS, Parser
from pipeline.schema import FinishReason, Message, Task, Trajectory, TrajectoryStatus, VersionSpan
from pipeline.schema.codec import decode_trajectory, encode_trajectory
from pipeline.scorer.conversation import conversation, reply
from tests.support.tokens import flattened

RUN = Sampling(max_tokens=8, temperature=1.0)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def request(messages: list[dict[str, Any]], **more: Any) -> Any:
    return read_chat(orjson.dumps({"messages": messages, **more}), RUN, ParameterRules())


def generation(ids: list[int], reason: FinishReason = FinishReason.STOP) -> Generation:
    n = len(ids)
    return Generation(np.asarray(ids, np.int32), np.full(n, -0.5, np.float32), (VersionSpan(0, n, 0),), reason)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


class Talk:
    """A recording and what an engine would have seen."""

    def __init__(self, tokenizer: Any, append: bool = False, mask_summaries: bool = False) -> None:
        self.tokenizer = tokenizer
        self.recorder = Recorder(Renderer(tokenizer), append=append, mask_summaries=mask_summaries)
        self.recording = ChatRecorder(self.recorder, Parser((FORMATS["hermes"].parse,), forms=(FORMATS["hermes"],)))
        self.seen: list[tuple[int, tuple[int, ...], list[int]]] = []

    def begin(self, messages: list[dict[str, Any]], **more: Any) -> PendingCall:
        return self.recording.begin(self.recording.prompt(request(messages, **more)))

    def tokens(self, ids: tuple[int, ...]) -> PendingCall:
        return self.recording.begin(self.recording.prompt(ProgramCall(token_ids=ids)))

    def end(self, pending: PendingCall, ids: list[int]) -> dict[str, Any]:
        answer = self.finish(pending, ids)
        self.seen.append((pending.branch, pending.prompt_ids, ids))
        return said(answer.content)

    def finish(self, pending: PendingCall, ids: list[int], stop: tuple[str, ...] = ()) -> ChatReply:
        whole = generation(ids)
        return self.recording.finish(pending, whole, 1.0, self.recording.read(pending, whole, stop))

    def call(self, messages: list[dict[str, Any]], ids: list[int] | None = None) -> dict[str, Any]:
        return self.end(self.begin(messages), ids or [10, 11, self.tokenizer.eos_token_id])

    def trajectory(self) -> Trajectory:
        task = Task("game/1", "game", 1)
        return Trajectory("o", "g", task, self.recorder.turns(), TrajectoryStatus.COMPLETE)

    def check(self) -> None:
        """Each branch is what the engine saw last in it and sampled then, in the order of their first calls but for
        that of the graded reply, and nothing is trained twice."""
        trajectory = self.trajectory()
        branches = list(trajectory.branches())
        assert reply(trajectory) == self.recorder.graded_reply
        last: dict[int, list[int]] = {}
        for branch, prompt, ids in self.seen:
            last[branch] = [*prompt, *ids]
        found, saw = [b.token_ids.tolist() for b in branches], [last[k] for k in sorted(last)]
        assert found[:-1] in [[*saw[:at], *saw[at + 1 :]] for at, branch in enumerate(saw) if branch == found[-1]]
        assert sum(int(b.loss_mask.sum()) for b in branches) == sum(len(ids) for _, _, ids in self.seen)


@pytest.mark.parametrize("ends", ["main", "helper"])
@pytest.mark.parametrize("system", [None, "You plan."])
def test_the_graded_reply_is_the_newest_of_the_main_conversation(words: Any, ends: str, system: str | None) -> None:
    talk = Talk(words)
    opening = [{"role": "system", "content": system}] if system else []
    plan = talk.call([*opening, user("a b")], [10, talk.tokenizer.eos_token_id])
    helper = talk.call([{"role": "system", "content": "You help."}, user("c")], [11, talk.tokenizer.eos_token_id])
    answer = talk.call([*opening, user("a b"), plan, user(helper["content"])], [12, talk.tokenizer.eos_token_id])
    if ends == "helper":
        talk.call([{"role": "system", "content": "You check."}, user("d")], [13, talk.tokenizer.eos_token_id])
    talk.check()
    talk.recorder.judge_rollout(1.0, {})
    trajectory = talk.trajectory()
    assert reply(trajectory) == talk.recorder.graded_reply == answer["content"] != ""
    assert [m.content for m in conversation(trajectory)][-2:] == [helper["content"], answer["content"]]
    assert trajectory.turn_rewards == (*(0.0 for _ in trajectory.turns[:-1]), 1.0)


def test_a_compacted_history_stays_the_main_conversation(words: Any) -> None:
    talk = Talk(words)
    system = {"role": "system", "content": "a"}
    talk.call([system, user("b")])
    answer = talk.call([system, user("c d")], [13, talk.tokenizer.eos_token_id])
    assert reply(talk.trajectory()) == talk.recorder.graded_reply == answer["content"]


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("asks", ["in the conversation", "in another"])
def test_a_summary_is_trained_unless_it_is_masked_and_everything_else_always(words: Any, asks: str, mask: bool) -> None:
    talk = Talk(words, mask_summaries=mask)
    system, end = {"role": "system", "content": "a"}, talk.tokenizer.eos_token_id
    first = talk.call([system, user("b")], [10, end])
    history = [system, user("b"), first, user("c")]
    summary = talk.call(history if asks == "in the conversation" else [user("sum up b c")], [11, 12, end])
    second = talk.call([system, user(f"so far {summary['content']}")], [13, end])
    talk.call([system, user(f"so far {summary['content']}"), second, user("d")], [14, end])
    trajectory = talk.trajectory()
    untrained = [turn.completion_message.content for turn in trajectory.turns if not turn.trained]
    assert untrained == ([summary["content"]] if mask else [])
    sampled = [ids for _, _, ids in talk.seen]
    trained = [t for ids in sampled if not (mask and ids == [11, 12, end]) for t in ids]
    assert sorted(t for b in trajectory.branches() for t in b.token_ids[b.loss_mask].tolist()) == sorted(trained)
    assert trajectory.n_sampled == sum(map(len, sampled))


def test_what_only_looks_like_a_summary_is_trained(words: Any) -> None:
    """A history of which old messages were cut off, one whose answers were shortened, a helper's report, a plan for
    another conversation, and a reply that no prompt holds."""
    system, other = {"role": "system", "content": "a"}, {"role": "system", "content": "b"}

    def untrained(*calls: Any) -> list[str]:
        talk = Talk(words, mask_summaries=True)
        replies: list[dict[str, Any]] = []
        for number, messages in enumerate(calls):
            replies.append(talk.call(messages(replies), [10 + number, talk.tokenizer.eos_token_id]))
        return [turn.completion_message.content for turn in talk.trajectory().turns if not turn.trained]

    def long(replies: Any) -> Any:
        return [system, user("c"), replies[0], user("d")]

    def begin(_: Any) -> Any:
        return [system, user("c")]

    assert not untrained(begin, long, lambda r: [system, user("d"), r[1], user("e")])
    assert not untrained(begin, long, lambda r: [system, user("c"), r[0], user("[left out]"), r[1], user("e")])
    assert not untrained(
        lambda _: [other, user("c")],
        lambda r: [other, user("c"), {"role": "assistant", "content": "do"}, user(r[0]["content"])],
    )
    report = {"role": "tool", "content": "say hello"}
    assert not untrained(
        begin, lambda r: [other, user("c d")], lambda r: [system, user("d"), {**report, **r[1]} | report]
    )
    assert not untrained(begin, lambda r: [other, user(f"do {r[0]['content']}")])
    assert not untrained(begin, lambda _: [system, user("d")])


@pytest.mark.parametrize(
    ("reply", "text", "found"),
    [
        ("The key is 7.", "Summary: The key is 7. Go on.", True),
        ("<think>hm, so</think>\nThe key is 7.\nIt is red.", "so far:\nThe key is 7.\n\nIt is red.", True),
        ("<analysis>it was</analysis>\n<summary>The key is 7.</summary>", "The key is 7.", True),
        ("7", "number 17", False),
        ("7", "number 7", True),
        ("", "anything", False),
        ("The key is 7.\nThis line was cut off by the program.", "The key is 7.", False),
    ],
)
def test_a_summary_is_found_by_the_lines_that_the_next_prompt_holds(reply: str, text: str, found: bool) -> None:
    assert is_summary(reply, (Message("user", "sum up"),), (Message("system", "s"), Message("user", text))) is found
    assert not is_summary(reply, (Message("user", "sum up"),), (Message("tool", text),))


def test_a_conversation_that_goes_on_is_one_branch(words: Any) -> None:
    talk = Talk(words)
    history = [user("say hello")]
    for _ in range(3):
        history += [talk.call(history), user("try again")]
    talk.check()
    assert [t.branch for t in talk.recorder.turns()] == [0, 0, 0]
    text = words.apply_chat_template(history[:-1], tokenize=False)
    assert words(text, add_special_tokens=False).input_ids == flattened(talk.trajectory()).token_ids.tolist()


def test_sampled_tokens_are_never_tokenised_again(smollm2: Any) -> None:
    """ "hello" out of letters, as a policy may sample it: no tokenizer would cut the text so."""
    letters = [smollm2(c, add_special_tokens=False).input_ids[0] for c in "hello"]
    assert letters != smollm2("hello", add_special_tokens=False).input_ids
    talk = Talk(smollm2)
    first = talk.call([user("Say hello.")], [*letters, smollm2.eos_token_id])
    assert first["content"] == "hello"
    talk.call([user("Say hello."), first, user("Again.")], [*letters, smollm2.eos_token_id])
    talk.check()
    (branch,) = talk.trajectory().branches()
    assert branch.token_ids[branch.loss_mask].tolist() == [*letters, smollm2.eos_token_id] * 2


@pytest.mark.parametrize("echo", [{"refusal": None, "annotations": []}, {"tool_calls": None}, {"audio": None}])
def test_what_clients_add_to_a_reply_does_not_fork(words: Any, echo: dict[str, Any]) -> None:
    talk = Talk(words)
    first = talk.call([user("say hello")])
    parts = [{"type": "text", "text": first["content"]}]
    talk.call([user("say hello"), {**first, **echo, "content": parts}, user("again")])
    talk.check()
    assert [t.branch for t in talk.recorder.turns()] == [0, 0]


def test_a_rewritten_history_forks_and_both_branches_stay(words: Any) -> None:
    talk = Talk(words)
    first = talk.call([user("say hello")])
    talk.call([user("say hello"), first, user("again")])
    talk.call([user("say hello"), said("hello"), user("again")])
    talk.check()
    assert [t.branch for t in talk.recorder.turns()] == [0, 0, 1]


def test_other_tools_are_another_prompt_and_fork(words: Any) -> None:
    talk = Talk(words)
    first = talk.call([user("say hello")])
    pending = talk.begin([user("say hello"), first, user("again")], tools=[TOOL])
    talk.end(pending, [words.eos_token_id])
    talk.check()
    assert [t.branch for t in talk.recorder.turns()] == [0, 1]


def test_a_template_that_changes_what_was_said_forks_every_turn(words: Any) -> None:
    tokenizer = copy.deepcopy(words)
    tokenizer.chat_template = words.chat_template.replace(
        "{{ message['content'] }}", "{{ 'hello' if message['role'] == 'assistant' else message['content'] }}"
    )
    talk = Talk(tokenizer)
    history = [user("say hello")]
    for _ in range(3):
        history += [talk.call(history), user("try again")]
    talk.check()
    assert [t.branch for t in talk.recorder.turns()] == [0, 1, 2]


def test_calls_at_once_from_one_place_become_branches_in_order_of_arrival(words: Any) -> None:
    talk = Talk(words)
    first = talk.call([user("say hello")])
    history = [user("say hello"), first, user("again")]
    pending = [talk.begin(history) for _ in range(3)]
    replies = [talk.end(p, [12 + i, words.eos_token_id]) for i, p in reversed(list(enumerate(pending)))][::-1]
    talk.call([*history, replies[2], user("try")])
    talk.check()
    assert [t.branch for t in talk.recorder.turns()] == [0, 0, 1, 2, 2]


def test_a_call_that_failed_leaves_no_trace(words: Any) -> None:
    talk = Talk(words)
    talk.recording.fail(talk.begin([user("guess")]))
    first = talk.call([user("say hello")])
    talk.recording.fail(talk.begin([user("say hello"), first, user("again")]))
    talk.call([user("say hello"), first, user("again")])
    assert [t.branch for t in talk.recorder.turns()] == [0, 0]
    assert len(list(talk.trajectory().branches())) == 1


def test_token_calls_go_on_from_chat_calls_and_from_each_other(words: Any) -> None:
    talk = Talk(words)
    talk.call([user("say hello")])
    ids = (*talk.seen[-1][1], *talk.seen[-1][2], 4, 7)
    pending = talk.tokens(ids)
    assert pending.added_ids == (4, 7)
    talk.end(pending, [9])
    other = talk.tokens((5, 6))
    talk.end(other, [9])
    talk.check()
    assert [t.branch for t in talk.recorder.turns()] == [0, 0, 1]


@pytest.mark.parametrize(
    ("a", "again"), [(f"{10**30}", f"{10**30}"), ("2.0", "2"), ('[1e3, {"b": -0.0}, true]', '[1000, {"b": 0}, true]')]
)
def test_tool_calls_are_parsed_and_their_echo_goes_on(smollm2: Any, a: str, again: str) -> None:
    """Programs in JavaScript state 2.0 as 2."""
    talk = Talk(smollm2)
    text = f'I add. <tool_call>\n{{"name": "add", "arguments": {{"a": {a}}}}}\n</tool_call>'
    ids = [*smollm2(text, add_special_tokens=False).input_ids, smollm2.eos_token_id]
    pending = talk.begin([user("1 + 1?")], tools=[TOOL])
    answer = talk.finish(pending, ids)
    talk.seen.append((pending.branch, pending.prompt_ids, ids))
    (turn,) = talk.recorder.turns()
    assert answer.finish_reason == "tool_calls" and turn.completion_message.content == text
    (call,) = answer.tool_calls
    assert repr(call["function"]["arguments"]["a"]) == repr(json.loads(a)) and call["function"]["name"] == "add"
    echo = {
        "role": "assistant",
        "content": answer.content,
        "tool_calls": [{**call, "function": {"name": "add", "arguments": f'{{ "a": {again} }}'}}],
    }
    told = {"role": "tool", "tool_call_id": call["id"], "content": "2<|im_end|>"}
    pending = talk.begin([user("1 + 1?"), echo, told], tools=[TOOL])
    talk.end(pending, [smollm2.eos_token_id])
    talk.check()
    assert [t.branch for t in talk.recorder.turns()] == [0, 0]
    assert pending.added_ids.count(smollm2.eos_token_id) == 1
    assert "\n2<|im_end|>\n" in smollm2.decode(pending.added_ids)


@pytest.mark.parametrize("arguments", [f'{{"a": {10**30}}}', '{"a":' * 300 + "1" + "}" * 300])
def test_calls_that_no_json_writer_takes_are_stored_in_a_rewritten_history(smollm2: Any, arguments: str) -> None:
    talk = Talk(smollm2)
    text = f'I add. <tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    ids = [*smollm2(text, add_special_tokens=False).input_ids, smollm2.eos_token_id]
    pending = talk.begin([user("1 + 1?")], tools=[TOOL])
    answer = talk.finish(pending, ids)
    talk.seen.append((pending.branch, pending.prompt_ids, ids))
    (call,) = answer.tool_calls
    shorter = {"tool_calls": [{**call, "function": {"name": "add", "arguments": arguments}}]}
    told = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    talk.end(talk.begin([user("1 + 1?"), {"role": "assistant", **shorter}, told], tools=[TOOL]), [5, 6])
    talk.check()
    stored = decode_trajectory(encode_trajectory(talk.trajectory()))
    assert stored.n_sampled == len(ids) + 2
    (message,) = [m for turn in stored.turns for m in turn.context_messages if m.role == "assistant"]
    assert json.loads(message.extra["tool_calls"][0]["function"]["arguments"]) == json.loads(arguments)


def test_a_reply_without_a_readable_call_is_text(smollm2: Any) -> None:
    talk = Talk(smollm2)
    text = "<tool_call>\n{broken\n</tool_call>"
    ids = [*smollm2(text, add_special_tokens=False).input_ids, smollm2.eos_token_id]
    answer = talk.finish(talk.begin([user("x")], tools=[TOOL]), ids)
    assert answer.content == text and not answer.tool_calls and answer.finish_reason == "stop"
    assert talk.recorder.turns()[0].signals["unreadable_calls"] == 1.0


def test_a_call_has_a_key_to_any_depth_to_which_calls_are_read() -> None:
    def key(innermost: str) -> Any:
        nested = f'{{"a": {"[" * 600}{innermost}{"]" * 600}}}'
        (call,) = FORMATS["hermes"].parse(f'<tool_call>{{"name": "f", "arguments": {nested}}}</tool_call>').calls
        assert isinstance(call, ToolCall)
        return key_of("assistant", "", [stated_call("1", call.name, call.arguments)])

    assert key("1.0") == key("1") != key("1.5")


def test_a_stop_text_cuts_what_is_returned_and_nothing_that_was_sampled(smollm2: Any) -> None:
    talk = Talk(smollm2)
    ids = smollm2("one two STOP", add_special_tokens=False).input_ids
    pending = talk.begin([user("count")], stop="STOP")
    answer = talk.finish(pending, ids, ("STOP",))
    talk.seen.append((pending.branch, pending.prompt_ids, ids))
    assert answer.content == "one two " and talk.recorder.turns()[0].completion.token_ids.tolist() == ids
    talk.call([user("count"), said("one two "), user("go on")], [smollm2.eos_token_id])
    talk.check()
    assert [t.branch for t in talk.recorder.turns()] == [0, 0]


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), append=st.booleans())
def test_any_order_of_calls_gives_branches_that_are_what_the_engine_saw(words: Any, seed: int, append: bool) -> None:
    rng = random.Random(seed)
    talk = Talk(words, append)
    histories: list[list[dict[str, Any]]] = [[user("say hello")]]
    open_calls: list[tuple[PendingCall, list[dict[str, Any]]]] = []
    for _ in range(rng.randrange(1, 25)):
        action = rng.random()
        if action < 0.45 or not open_calls:
            history = [dict(m) for m in rng.choice(histories)]
            if action < 0.1:
                rng.choice(history)["content"] = rng.choice(["guess", "higher", "lower"])
            open_calls.append((talk.begin(history), history))
        elif action < 0.6:
            talk.recording.fail(open_calls.pop(rng.randrange(len(open_calls)))[0])
        else:
            pending, history = open_calls.pop(rng.randrange(len(open_calls)))
            ids = [rng.randrange(6, 38) for _ in range(rng.randrange(1, 4))]
            reply = talk.end(pending, [*ids, words.eos_token_id] if rng.random() < 0.7 else ids)
            histories.append([*history, reply, user(rng.choice(["try", "again", "?"]))])
    if talk.seen:
        talk.check()
        numbers = [t.branch for t in talk.recorder.turns()]
        assert sorted(set(numbers)) == list(range(len(set(numbers)))) and numbers == sorted(numbers)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
         "messages[0].tool_calls"),
        ({"messages": [user("x")], "n": 0}, "n"),
        ({"messages": [user("x")], "max_tokens": "many"}, "max_tokens"),
        ({"messages": [user("x")], "stop": [1]}, "stop"),
        ({"messages": [user("x")], "tools": [{"type": "custom"}]}, "tools"),
        ({"messages": [user("x")], "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [user("x")], "logit_bias": {"3": 1}}, "logit_bias"),
        ({"messages": [user("x")], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [user("x")], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"messages": [user("x")], "guided_json": {"type": "object"}}, "guided_json"),
        ({"messages": [user("x")], "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"messages": [user("x")], "min_tokens": 5}, "min_tokens"),
        ({"messages": [user("x" * 1_000_001)]}, "messages"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_the_name_of_the_parameter(body: dict[str, Any], param: str) -> None:
    with pytest.raises(Refusal) as caught:
        read_chat(orjson.dumps(body), RUN, ParameterRules())
    assert caught.value.status == 400 and caught.value.param == param
    assert caught.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"3", b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}"])
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(Refusal):
        read_chat(data, RUN, ParameterRules())
    with pytest.raises(Refusal):
        read_generate(data, RUN, ParameterRules())


def test_sampling_that_is_not_the_runs_is_ignored_by_name_or_refused() -> None:
    body = {"messages": [user("x")], "temperature": 0.0, "seed": 1, "top_p": 1.0, "presence_penalty": 0}
    assert read_chat(orjson.dumps(body), RUN, ParameterRules()).ignored == ("temperature", "seed")
    with pytest.raises(Refusal, match="temperature"):
        read_chat(orjson.dumps(body), RUN, ParameterRules(sampling="refuse"))
    more = {"messages": [user("x")], "reasoning_effort": "low", "a\r\nb": 1, "user": "me", "verbosity": None}
    assert read_chat(orjson.dumps(more), RUN, ParameterRules()).ignored == ("reasoning_effort",)
    same = {"messages": [user("x")], "temperature": 1, "top_p": 1}
    assert read_chat(orjson.dumps(same), RUN, ParameterRules("refuse", "refuse")).ignored == ()


def test_whatever_is_left_out_is_named() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
    body = {"messages": [user("x") | {"name": "Ann"}], "tools": [tool], "service_tier": "flex"}
    assert read_chat(orjson.dumps(body), RUN, ParameterRules()).ignored == (
        "service_tier",
        "messages.name",
        "tools.strict",
    )
    empty = dict.fromkeys(("refusal", "audio", "function_call", "name"), None) | {"annotations": []}
    assert read_chat(orjson.dumps({"messages": [said("a") | empty, user("x")]}), RUN, ParameterRules()).ignored == ()
    relied = {"messages": [user("x")], "response_format": {"type": "json_object"}, "min_tokens": 3}
    assert read_chat(orjson.dumps(relied), RUN, ParameterRules(unsupported="ignore")).ignored == (
        "response_format",
        "min_tokens",
    )


FIELDS = {"name": "Ann", "tool_call_id": "1", "tool_calls": [{"id": "1", "type": "function",
    "function": {"name": "f", "arguments": '{"a": "BECAUSE"}'}}]}  # fmt: skip


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "function_call", "refusal", "name",
    "tool_call_id", "tool_calls", "audio", "x_new"])  # fmt: skip
def test_every_field_of_a_message_is_in_the_prompt_or_named_or_refused(role: str, name: str) -> None:
    value = FIELDS.get(name, "BECAUSE")
    message = {"role": role, "content": "a", name: value}
    asked = orjson.dumps({"messages": [user("x"), message, user("y")]})
    try:
        found = read_chat(asked, RUN, ParameterRules())
    except Refusal as refusal:
        assert name == "function_call" and refusal.param == "messages.function_call"
        found = read_chat(asked, RUN, ParameterRules(unsupported="ignore"))
    kept = found.messages[1].extra.get(name)
    assert (kept is not None) != (found.ignored == (f"messages.{name}",))


def test_fewer_calls_are_returned_where_the_program_asks_for_that_and_the_branch_goes_on(smollm2: Any) -> None:
    """``parallel_tool_calls: false`` gives the first call, ``tool_choice: none`` text; both are recorded whole."""
    talk = Talk(smollm2)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    twice = [*smollm2(f"{call}\n{call}").input_ids, smollm2.eos_token_id]
    history: list[dict[str, Any]] = [user("2 + 3?")]
    for asked, n_calls in (({"parallel_tool_calls": False}, 1), ({"tool_choice": "none"}, 0), ({}, 2)):
        pending = talk.begin(history, tools=tools, **asked)
        answer = talk.finish(pending, twice)
        talk.seen.append((pending.branch, pending.prompt_ids, twice))
        assert pending.branch == 0 and len(answer.tool_calls) == n_calls
        assert (answer.content == f"{call}\n{call}") == (n_calls == 0)
        echo = [c | {"function": {"name": "add", "arguments": "{}"}} for c in answer.tool_calls]
        told = [{"role": "tool", "tool_call_id": c["id"], "content": "5"} for c in echo] or [user("And?")]
        history += [said(answer.content) | ({"tool_calls": echo} if echo else {}), *told]
    talk.check()
