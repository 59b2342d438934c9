"""Programs that know nothing of Afterplay run episodes: their calls are trajectories, and what they do wrong is
theirs."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import select
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import orjson
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from actors.environments.host import EnvironmentHost
from actors.gateway import server
from actors.gateway.program_loop import ProgramLoop
from actors.gateway.requests import Report, last_line, report_in
from actors.gateway.session import Session
from actors.rendering.renderer import Renderer
from actors.rollout.rollout import Rollout
from actors.rollout.services import build_loop
from pipeline.config.load import load, loads
from pipeline.errors import ConfigurationError, EngineUnavailable, PlugInError
from pipeline.schema import Order, TrajectoryStatus
from pipeline.views.vocabulary import bytes_of_tokens
from tests.support.agent_programs import SECONDS, Caller, Serve, assert_exact, caller, echoing, run_order, user
from tests.support.stub_engine import StubEngine
from tests.support.tokens import flattened

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.timeout(400)


async def test_calls_become_turns_and_the_returned_reward_is_the_score(
    serve: Serve, long_order: Order, words: Any
) -> None:
    engine = echoing(words)

    async def run(task: Mapping[str, Any], client: Caller) -> Any:
        assert task["task_id"] == "game/1" and task["messages"][0]["role"] == "user"
        history = [user("say hello")]
        for _ in range(3):
            answer = await client.chat(history)
            history += [answer["choices"][0]["message"], user("try again")]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 3 and answer["object"] == "chat.completion"
        short = await client.chat([user("guess")], max_tokens=1)
        assert short["usage"]["completion_tokens"] == 1 and short["choices"][0]["finish_reason"] == "length"
        return {"reward": 0.75, "signals": {"solved": 1}}

    trajectory = await run_order(serve(engine, run), long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE and trajectory.rewards == {"environment": 0.75}
    assert trajectory.reward is None and trajectory.turn_rewards == (0.0, 0.0, 0.0, 0.75)
    assert trajectory.turns[-1].signals["solved"] == 1.0
    assert [t.branch for t in trajectory.turns] == [0, 1, 1, 1]  # that of the graded reply last
    assert_exact(trajectory, engine)
    assert {session for session, _ in engine.requests} == {long_order.order_id}


async def test_streamed_replies_carry_the_same_as_whole_ones(serve: Serve, long_order: Order, words: Any) -> None:
    async def run(task: Any, client: Caller) -> float:
        body = {"messages": [user("say hello")], "stream": True, "stream_options": {"include_usage": True}}
        async with client._session.post(f"{client.base_url}/chat/completions", json=body) as response:
            assert response.content_type == "text/event-stream"
            lines = [line for line in (await response.text()).split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        chunks = [orjson.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
        assert deltas[0]["role"] == "assistant"
        assert [delta.get("content") for delta in deltas] == ["", "4", " 5", None]
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["usage"]["completion_tokens"] == 3
        whole = await client.chat([user("say hello"), {"role": "assistant", "content": "4 5"}, user("again")])
        assert whole["choices"][0]["message"]["content"] == "4 5"
        return 1.0

    trajectory = await run_order(serve(echoing(words), run), long_order)
    assert [t.branch for t in trajectory.turns] == [0, 0], trajectory.failure


async def test_choices_and_calls_at_once_are_branches(serve: Serve, long_order: Order, words: Any) -> None:
    engine = echoing(words)
    engine.latency_seconds = 0.01

    async def run(task: Any, client: Caller) -> float:
        answer = await client.chat([user("say hello")], n=3, logprobs=True)
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
        content = answer["choices"][1]["logprobs"]["content"]
        assert len(content) == 3 and content[0]["logprob"] < 0
        async with anyio.create_task_group() as group:
            for text in ("guess", "higher"):
                group.start_soon(client.chat, [user(text)])
        return 1.0

    trajectory = await run_order(serve(engine, run), long_order)
    assert [t.branch for t in trajectory.turns] == [0, 1, 2, 3, 4], trajectory.failure
    assert_exact(trajectory, engine)


@pytest.mark.parametrize("stream", [False, True])
async def test_of_replies_that_come_together_all_are_turns_or_none(
    serve: Serve, long_order: Order, words: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    engine, reading, read = echoing(words), [], Renderer.completed

    def last_is_unreadable(self: Renderer, ids: list[int]) -> Any:
        reading.append(ids)
        if len(reading) == 3:
            raise ValueError("no text")
        return read(self, ids)

    monkeypatch.setattr(Renderer, "completed", last_is_unreadable)

    async def run(task: Any, client: Caller) -> float:
        body = {"messages": [user("say hello")], "n": 3, "stream": stream}
        async with client._session.post(f"{client.base_url}/chat/completions", json=body) as response:
            said = await response.text()
            assert response.status == (200 if stream else 500)
        assert said.count("unreadable_reply") == 1 and "the reply cannot be read: ValueError: no text" in said
        await client.chat([user("say hello")])
        return 1.0

    trajectory = await run_order(serve(engine, run), long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert len(trajectory.turns) == 1 and len(engine.requests) == 4


async def test_token_calls_are_recorded_as_they_are(serve: Serve, long_order: Order, words: Any) -> None:
    engine = echoing(words)

    async def run(task: Any, client: Caller) -> float:
        url = client.base_url.removesuffix("/v1") + "/inference/v1/generate"
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "logprobs": 0, "temperature": 0.2}}
        status, answer, headers = await client.post(url, body)
        assert status == 200 and headers["X-Afterplay-Ignored"] == "temperature"
        choice = answer["choices"][0]
        assert choice["token_ids"] == [10, 11, words.eos_token_id] and len(choice["logprobs"]["content"]) == 3
        assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
        status, _, _ = await client.post(url, {"token_ids": [5, 6, 7, *choice["token_ids"], 8]})
        assert status == 200
        return 1.0

    trajectory = await run_order(serve(engine, run), long_order)
    assert [t.branch for t in trajectory.turns] == [0, 0], trajectory.failure
    assert trajectory.turns[1].context.token_ids.tolist() == [8]
    assert_exact(trajectory, engine)


async def test_a_session_is_found_by_path_header_or_key_and_by_nothing_else(
    serve: Serve, long_order: Order, words: Any
) -> None:
    async def run(task: Any, client: Caller) -> float:
        root, _, number = client.base_url.removesuffix("/v1").rpartition("/sessions/")
        body = {"messages": [user("say")]}
        url = f"{root}/v1/chat/completions"
        assert (await client.post(url, body, headers={"Authorization": f"Bearer {number}"}))[0] == 200
        assert (await client.post(url, body, headers={"X-Session-ID": number}))[0] == 200
        own = {"X-Session-ID": "a client's own", "Authorization": f"Bearer {number}"}
        assert (await client.post(url, body, headers=own))[0] == 200
        assert (await client.post("/chat/completions", body, headers={"X-Session-ID": "another"}))[0] == 200
        for headers in ({}, {"Authorization": "Bearer nobody"}, {"X-Session-ID": "../finish"}):
            status, answer, _ = await client.post(url, body, headers=headers)
            assert status == 404 and answer["error"]["code"] == "session_not_found"
        status, answer, _ = await client.post(f"{client.base_url}/embeddings", {})
        assert status == 404 and "error" in answer
        return 1.0

    trajectory = await run_order(serve(echoing(words), run), long_order)
    assert len(trajectory.turns) == 4, trajectory.failure


@pytest.mark.parametrize(("told", "score"), [(None, 0.0), ({"error": "too short"}, 0.0), ({"reward": 0.5}, 0.5)])
async def test_a_limit_is_an_error_the_program_sees_and_the_episode_is_truncated(
    serve: Serve, long_order: Order, words: Any, told: Any, score: float
) -> None:
    async def run(task: Any, client: Caller) -> Any:
        await client.chat([user("say")])
        await client.chat([user("say")])
        for expected in (400, 404, 404):
            status, answer, _ = await client.post("/chat/completions", {"messages": [user("say")]})
            assert status == expected and answer["error"]["code"] == "episode_limit"
            assert "max_turns" in answer["error"]["message"]
        if told is None:
            raise RuntimeError("cannot go on")
        return told

    trajectory = await run_order(serve(echoing(words), run, max_turns=2), long_order)
    assert trajectory.status is TrajectoryStatus.TRUNCATED and trajectory.rewards == {"environment": score}
    assert len(trajectory.turns) == 2


async def test_after_a_context_that_is_too_long_a_shorter_one_goes_on_and_is_complete(
    serve: Serve, long_order: Order, words: Any
) -> None:
    async def run(task: Any, client: Caller) -> float:
        status, answer, _ = await client.post("/chat/completions", {"messages": [user("say " * 40)]})
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        await client.chat([user("say")])
        return 1.0

    trajectory = await run_order(serve(echoing(words), run, max_length=32), long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE and len(trajectory.turns) == 1, trajectory.failure


async def test_calls_after_the_report_and_wrong_reports_are_refused(
    serve: Serve, long_order: Order, words: Any
) -> None:
    async def run(task: Any, client: Caller) -> None:
        await client.chat([user("say")])
        finish = client.base_url.removesuffix("/v1") + "/finish"
        for wrong in ({"reward": "much"}, {"signals": [1]}, {"done": 1}, {"answer": 3}, b"{", [1]):
            status, answer, _ = await client.post(finish, wrong)
            assert status == 400 and "expected" in answer["error"]["message"]
        assert (await client.post(finish, {"reward": 0.5, "done": False}))[0] == 200
        assert (await client.post(finish, {"reward": 1.0}))[0] == 400
        status, answer, _ = await client.post("/chat/completions", {"messages": [user("say")]})
        assert status == 400 and answer["error"]["code"] == "session_finished"

    trajectory = await run_order(serve(echoing(words), run), long_order)
    assert trajectory.rewards == {"environment": 0.5}


async def test_the_report_stands_and_says_that_it_stopped_early(serve: Serve, long_order: Order, words: Any) -> None:
    async def run(task: Any, client: Caller) -> None:
        await client.chat([user("say")])
        finish = client.base_url.removesuffix("/v1") + "/finish"
        assert (await client.post(finish, {"reward": 0.5, "done": False}))[0] == 200
        raise RuntimeError("died after it")

    trajectory = await run_order(serve(echoing(words), run), long_order)
    assert trajectory.status is TrajectoryStatus.TRUNCATED and trajectory.rewards == {"environment": 0.5}


async def test_the_environment_judges_the_answer_where_that_is_asked(
    serve: Serve, long_order: Order, words: Any
) -> None:
    async def run(task: Any, client: Caller) -> dict[str, Any]:
        assert "+" in task["messages"][-1]["content"]
        await client.chat(task["messages"])
        return {"answer": "no number"}

    services = serve(echoing(words), run, "arithmetic", loop_options={"reward": "environment"})
    trajectory = await run_order(services, long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE and trajectory.rewards == {"environment": 0.0}


@pytest.mark.parametrize("how", ["raises", "returns", "finishes"])
async def test_a_dead_engine_is_told_to_the_program_and_is_the_failure(
    serve: Serve, long_order: Order, words: Any, how: str
) -> None:
    engine = echoing(words)

    async def run(task: Any, client: Caller) -> float:
        await client.chat([user("say")])
        engine.fault = EngineUnavailable("engine stub://0 is away")
        status, answer, _ = await client.post("/chat/completions", {"messages": [user("say")]})
        assert status == 503 and answer["error"]["code"] == "engine_unavailable"
        if how == "raises":
            raise RuntimeError("gave up")
        if how == "finishes":
            await client.post(client.base_url.removesuffix("/v1") + "/finish", {"reward": 0.0})
        return 0.0

    services = serve(engine, run, retries=0)
    trajectory = await run_order(services, long_order)
    counted = services.metrics.door_calls_total
    chat = [counted.labels(env="game", route="chat", outcome=o)._value.get() for o in ("ok", "engine", "limit")]
    assert chat == [1.0, 1.0, 0.0]
    assert trajectory.status is TrajectoryStatus.ERROR and trajectory.failure is not None
    assert trajectory.failure.boundary == "engine" and trajectory.rewards == {}


@pytest.mark.parametrize(
    ("result", "kind"),
    [(None, "NoReward"), ("much", "WrongValue"), ({"reward": "x"}, "WrongValue"), ({"error": "lost"}, "Told"),
     (ZeroDivisionError("x"), "ZeroDivisionError")],
)  # fmt: skip
async def test_a_program_without_a_result_is_a_failure_and_not_a_zero(
    serve: Serve, long_order: Order, words: Any, result: Any, kind: str
) -> None:
    async def run(task: Any, client: Caller) -> Any:
        await client.chat([user("say")])
        if isinstance(result, Exception):
            raise result
        return result

    trajectory = await run_order(serve(echoing(words), run), long_order)
    assert trajectory.status is TrajectoryStatus.ERROR and trajectory.failure is not None
    assert (trajectory.failure.boundary, trajectory.failure.kind) == ("program", kind)
    assert trajectory.rewards == {} and trajectory.reward is None and len(trajectory.turns) == 1


async def test_a_program_that_never_calls_is_a_failure(serve: Serve, long_order: Order, words: Any) -> None:
    async def run(task: Any, client: Caller) -> float:
        return 1.0

    trajectory = await run_order(serve(echoing(words), run), long_order)
    assert trajectory.failure is not None and trajectory.failure.kind == "NoCalls"


REFUSED: list[tuple[str, Any, int]] = [
    ("/chat/completions", {"messages": [user("say")], "response_format": {"type": "json_object"}}, 400),
    ("/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
    ("/chat/completions", b"{", 400),
    ("/responses", {"input": 3}, 400),
    ("/messages", {"messages": [user("say")]}, 400),
    ("/completions", {"prompt": "say"}, 404),
]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("how", ["returns", "finishes"])
@pytest.mark.parametrize(("path", "body", "status"), REFUSED)
async def test_a_program_whose_last_call_was_refused_is_a_failure_also_if_it_reports(
    serve: Serve, long_order: Order, words: Any, path: str, body: Any, status: int, how: str, first: bool
) -> None:
    async def run(task: Any, client: Caller) -> float:
        if not first:
            await client.chat([user("say")])
        assert (await client.post(path, body))[0] == status
        if how == "finishes":
            await client.post(client.base_url.removesuffix("/v1") + "/finish", {"reward": 0.0})
        return 0.0

    trajectory = await run_order(serve(echoing(words), run), long_order)
    assert trajectory.status is TrajectoryStatus.ERROR and trajectory.rewards == {} and trajectory.failure is not None
    assert (trajectory.failure.boundary, trajectory.failure.kind) == ("program", "Refused")
    assert "/sessions/" not in trajectory.failure.message


async def test_a_program_that_goes_on_after_a_refusal_has_its_reward_and_the_refusals_are_counted(
    serve: Serve, long_order: Order, words: Any
) -> None:
    async def run(task: Any, client: Caller) -> dict[str, Any]:
        for path, body, status in REFUSED:
            assert (await client.post(path, body))[0] == status
        await client.chat([user("say")])
        return {"reward": 0.5, "signals": {"solved": 1}}

    trajectory = await run_order(serve(echoing(words), run), long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE and trajectory.rewards == {"environment": 0.5}
    signals = trajectory.turns[-1].signals
    assert (signals["refused_calls"], signals["solved"]) == (len(REFUSED), 1.0)


@pytest.mark.parametrize(
    ("output", "report"),
    [
        *[('{"reward": 1, "answer": "a%sb"}' % c, Report(1.0, answer=f"a{c}b"))  # noqa: UP031 - braces
          for c in "\u2028\u2029\u0085\u00a0\x7f\u200b"],
        ('{"reward": 1, "answer": "a\\u001cb"}', Report(1.0, answer="a\x1cb")),
        ('step 1\rstep 2\r{"reward": 1}\r\n\r\n', Report(1.0)), ('{"reward": 1}\n\x0c', Report(1.0)),
        ('\x1b[0m{"reward": 1}\x1b[0m', Report(1.0)), ('\ufeff{"reward": 1}', Report(1.0)),
        ('noise\n{"reward": 1}', Report(1.0)), ('{"reward": null}', Report()),
        ('{"reward": 1}\nnoise', None), ("1.0", None), ("{'reward': 1}", None), ("", None), ("[" * 100_000, None),
    ],
)  # fmt: skip
def test_the_last_line_is_read_as_the_program_wrote_it(output: str, report: Report | None) -> None:
    assert report_in(last_line(output)) == report


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", '"1.0"', "1e999"])
def test_a_last_line_with_a_wrong_reward_is_a_failure_with_its_value(value: str) -> None:
    with pytest.raises(PlugInError, match="reward: expected a finite number"):
        report_in(f'{{"reward": {value}}}')


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\u2581"), min_size=1, max_size=12))
def test_the_bytes_of_the_tokens_of_a_reply_are_the_bytes_of_its_text(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode(text).ids
    if kind == "metaspace":
        text = " " + text
    found = b"".join(map(bytes_of_tokens(PreTrainedTokenizerFast(tokenizer_object=tokenizer)), ids))
    assert found == text.encode()


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(BPE({c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer


def _byte_fallback(prefix: str = "") -> Tokenizer:
    pieces = ["<unk>", "\u2581", *map(chr, range(33, 127)), *(f"<0x{i:02X}>" for i in range(256))]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [normalizers.Prepend("\u2581")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "\u2581")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


TOKENIZERS = {"byte_level": _byte_level, "byte_fallback": _byte_fallback, "metaspace": lambda: _byte_fallback("\u2581")}


async def test_logprobs_of_a_reply_carry_the_bytes_of_each_token(serve: Serve, long_order: Order, smollm2: Any) -> None:
    ids = smollm2.encode("a 🦜 é", add_special_tokens=False)
    engine = StubEngine(script=lambda _, s: [*ids, smollm2.eos_token_id])

    async def run(task: Any, client: Caller) -> float:
        answer = await client.chat([user("say")], logprobs=True)
        content = answer["choices"][0]["logprobs"]["content"][: len(ids)]
        assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "a 🦜 é"
        assert len(content) > 4  # the parrot is several tokens
        return 1.0

    trajectory = await run_order(serve(engine, run, tokenizer=smollm2, sampling={"max_tokens": 32}), long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure


async def test_too_many_calls_and_bodies_that_are_too_large_are_refused(
    serve: Serve, long_order: Order, words: Any
) -> None:
    engine = echoing(words)

    async def run(task: Any, client: Caller) -> float:
        status, answer, _ = await client.post("/chat/completions", {"messages": [user("say")], "n": 3})
        assert status == 429 and answer["error"]["type"] == "rate_limit_error"
        status, answer, _ = await client.post("/chat/completions", b" " * 5000)
        assert status == 413 and "error" in answer
        await client.chat([user("say")])
        return 1.0

    options = {"max_concurrent_calls": 2, "body_bytes_max": 4096}
    trajectory = await run_order(serve(engine, run, loop_options=options), long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure


def command(tmp_path: Path, source: str, name: str = "agent.py", runner: str = sys.executable) -> dict[str, Any]:
    (tmp_path / name).write_text(source)
    tmp_path.chmod(0o755)
    return {"command": [runner, str(tmp_path / name)]}


AGENT = """
import json, os, urllib.request
def chat(messages, **more):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages, **more}).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=200) as response:
        return json.load(response)["choices"][0]["message"]
"""


async def test_a_program_is_a_process_and_its_last_line_is_its_report(
    serve: Serve, long_order: Order, words: Any, tmp_path: Path
) -> None:
    source = AGENT + (
        "task = json.loads(os.environ['AFTERPLAY_TASK'])\n"
        "history = task['messages']\n"
        "for _ in range(2):\n"
        "    history += [chat(history), {'role': 'user', 'content': 'try again'}]\n"
        "print('x' * 5_000_000)\n"
        "print(json.dumps({'reward': 0.25, 'signals': {'seed': task['seed']}}))\n"
    )
    engine = echoing(words)
    trajectory = await run_order(serve(engine, loop_options=command(tmp_path, source)), long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert trajectory.rewards == {"environment": 0.25} and [t.branch for t in trajectory.turns] == [0, 0]
    assert_exact(trajectory, engine)


async def test_a_program_that_dies_keeps_the_end_of_its_errors(
    serve: Serve, long_order: Order, words: Any, tmp_path: Path
) -> None:
    source = AGENT + "chat([{'role': 'user', 'content': 'say'}])\nraise SystemError('out of ideas')\n"
    trajectory = await run_order(serve(echoing(words), loop_options=command(tmp_path, source)), long_order)
    assert trajectory.status is TrajectoryStatus.ERROR and trajectory.failure is not None
    assert trajectory.failure.boundary == "program" and "out of ideas" in trajectory.failure.details
    said = "the program ended: exit code 1, after SystemError: out of ideas ("
    line = source.count("\n")
    assert trajectory.failure.message.startswith(said), trajectory.failure.message
    assert trajectory.failure.message.endswith(f"agent.py, line {line}, in <module>)")
    assert trajectory.rewards == {} and len(trajectory.turns) == 1


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("print(repr({'reward': 1.0}))", "NoReward", """no reward, and its last line is "{'reward': 1.0}": print"""),
        ("print('1.0')", "NoReward", "no reward, and its last line is '1.0': print"),
        ("chat([], response_format={'type': 'json_object'})", "ExitCode",
         "HTTP Error 400: Bad Request; its last call was refused: response_format"),
    ],
)  # fmt: skip
async def test_a_program_without_a_reward_is_told_what_came(
    serve: Serve, long_order: Order, words: Any, tmp_path: Path, source: str, kind: str, message: str
) -> None:
    source = f"{AGENT}chat([{{'role': 'user', 'content': 'say'}}])\nprint('thinking', flush=True)\n{source}\n"
    trajectory = await run_order(serve(echoing(words), loop_options=command(tmp_path, source)), long_order)
    assert trajectory.failure is not None and trajectory.failure.kind == kind
    assert message in trajectory.failure.message and "thinking" in trajectory.failure.details


@pytest.mark.slow
async def test_a_program_that_hangs_is_ended_with_its_children_and_is_a_failure(
    serve: Serve, long_order: Order, words: Any, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    shell = f"sleep 1000 & echo $! > {pid_file}; echo stuck >&2; sleep 1000"
    options = {"command": ["/bin/sh", "-c", shell], "sandbox": "none"}
    trajectory = await run_order(serve(echoing(words), loop_options=options, max_seconds=4.0), long_order)
    assert trajectory.failure is not None and trajectory.failure.kind == "TimeoutError", trajectory.failure
    assert "stuck" in trajectory.failure.details and trajectory.rewards == {}
    assert ended(int(pid_file.read_text()))


async def test_a_child_that_lingers_delays_nobody_and_is_ended(
    serve: Serve, long_order: Order, words: Any, tmp_path: Path
) -> None:
    source = AGENT + (
        "import subprocess, sys\n"
        "chat([{'role': 'user', 'content': 'say'}])\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "print('{\"reward\": 1}')\n"
    )
    options = {**command(tmp_path, source), "sandbox": "none"}
    trajectory = await run_order(serve(echoing(words), loop_options=options), long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert ended(int((tmp_path / "pid").read_text()))


async def test_a_command_that_is_not_there_is_a_failure_with_its_name(
    serve: Serve, long_order: Order, words: Any
) -> None:
    trajectory = await run_order(serve(echoing(words), loop_options={"command": ["/no/such/agent"]}), long_order)
    assert trajectory.failure is not None and "/no/such/agent" in trajectory.failure.message


async def test_a_program_in_another_language_plays_with_streams(
    serve: Serve, long_order: Order, words: Any, tmp_path: Path
) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: install Node.js 18 or newer to test a program in JavaScript")
    source = """
const history = JSON.parse(process.env.AFTERPLAY_TASK).messages;
for (let turn = 0; turn < 2; turn++) {
  const response = await fetch(process.env.OPENAI_BASE_URL + "/chat/completions", {
    method: "POST",
    headers: {"Content-Type": "application/json", Authorization: "Bearer " + process.env.OPENAI_API_KEY},
    body: JSON.stringify({model: "policy", messages: history, stream: true}),
  });
  let text = "";
  for (const line of (await response.text()).split("\\n\\n")) {
    if (line.startsWith("data: {")) text += JSON.parse(line.slice(6)).choices[0].delta.content ?? "";
  }
  history.push({role: "assistant", content: text}, {role: "user", content: "try again"});
}
await fetch(process.env.AFTERPLAY_SESSION_URL + "/finish", {method: "POST", body: JSON.stringify({reward: 1})});
"""
    engine = echoing(words)
    trajectory = await run_order(serve(engine, loop_options=command(tmp_path, source, "agent.mjs", node)), long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert [t.branch for t in trajectory.turns] == [0, 0] and trajectory.rewards == {"environment": 1.0}
    assert_exact(trajectory, engine)


async def test_a_function_reaches_its_session_without_the_proxy_of_the_environment(
    serve: Serve, long_order: Order, words: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # nobody is there
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "example.org")
    (tmp_path / "player.py").write_text("""
import json, urllib.request

def play(task, url, key):
    body = json.dumps({"model": "policy", "messages": task["messages"]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers)).read()
    return 1.0
""")
    engine = echoing(words)
    options = {"function": f"{tmp_path / 'player.py'}:play"}
    trajectory = await run_order(serve(engine, loop_options=options), long_order)
    assert trajectory.failure is None and trajectory.rewards == {"environment": 1.0}
    assert os.environ["no_proxy"] == "example.org,127.0.0.1,::1,localhost"


async def test_the_openai_package_calls_tools_streams_and_sees_limits(
    serve: Serve, long_order: Order, smollm2: Any
) -> None:
    openai = pytest.importorskip("openai", reason="pip install openai to test its client against the gateway")
    call = smollm2('<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>').input_ids
    final = smollm2("It is 5.").input_ids

    def script(ids: Any, sampling: Any) -> list[int]:
        return [*(final if "<tool_response>" in smollm2.decode(ids) else call), smollm2.eos_token_id]

    engine = StubEngine(script=script)
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

    async def run(task: Any, client: Caller) -> float:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="unused", timeout=SECONDS) as api:
            history: list[Any] = [user("2 + 3?")]
            answer = await api.chat.completions.create(model="m", messages=history, tools=[tool], temperature=0.3)
            message = answer.choices[0].message
            assert answer.choices[0].finish_reason == "tool_calls"
            assert message.tool_calls[0].function.name == "add"
            assert orjson.loads(message.tool_calls[0].function.arguments) == {"a": 2, "b": 3}
            history += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}]
            text = ""
            stream = await api.chat.completions.create(model="m", messages=history, tools=[tool], stream=True)
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
            assert text == "It is 5."
            with pytest.raises(openai.BadRequestError, match="max_turns"):
                await api.chat.completions.create(model="m", messages=[*history, {"role": "assistant", "content": text},
                                                                       user("more")], tools=[tool])  # fmt: skip
            return 1.0

    services = serve(
        engine, run, tokenizer=smollm2, sampling={"max_tokens": 64}, max_turns=2, max_tokens=4096, max_length=2048
    )
    trajectory = await run_order(services, long_order)
    assert trajectory.status is TrajectoryStatus.TRUNCATED and trajectory.rewards == {"environment": 1.0}
    assert [t.branch for t in trajectory.turns] == [0, 0], trajectory.failure
    flat = flattened(trajectory)
    assert flat.token_ids[flat.loss_mask].tolist() == [*call, smollm2.eos_token_id, *final, smollm2.eos_token_id]
    assert flat.token_ids.tolist() == [*engine.requests[-1][1], *final, smollm2.eos_token_id]


async def test_a_program_elsewhere_takes_a_task_and_finishes_it(serve: Serve, long_order: Order, words: Any) -> None:
    engine = echoing(words)
    services = serve(engine, loop_options={"external": True})
    url = services.loops["game"].gateway.url  # type: ignore[attr-defined]

    async def worker() -> None:
        async with caller(url) as client:
            status, lease, _ = await client.post("/sessions", {"wait_seconds": 60})
            assert status == 200 and lease["task"]["task_id"] == "game/1"
            client.base_url = lease["base_url"]
            await client.chat([user("say hello")])
            assert (await client.post(f"{lease['url']}/finish", {"reward": 2.0}))[0] == 200
            assert (await client.post(f"{url}/sessions", {"wait_seconds": 0}))[0] == 204

    async with anyio.create_task_group() as group, anyio.create_task_group() as servers:
        servers.start_soon(services.loops["game"].serve)
        servers.start_soon(services.pool.watch)
        group.start_soon(worker)
        with anyio.fail_after(SECONDS):
            trajectory = await Rollout(long_order, services).run()
        await anyio.wait_all_tasks_blocked()
        servers.cancel_scope.cancel()
    await services.close()
    assert trajectory.status is TrajectoryStatus.COMPLETE and trajectory.rewards == {"environment": 2.0}


@pytest.mark.parametrize("taken", [False, True])
async def test_a_task_that_nobody_takes_or_that_is_taken_and_left_is_a_failure(
    serve: Serve, long_order: Order, words: Any, taken: bool
) -> None:
    services = serve(
        echoing(words), loop_options={"external": True, "lease_seconds": 0.5}, max_seconds=SECONDS if taken else 1.0
    )
    url = services.loops["game"].gateway.url  # type: ignore[attr-defined]

    async def worker() -> None:
        async with caller(url) as client:
            assert (await client.post("/sessions", {"wait_seconds": 60}))[0] == 200

    async with anyio.create_task_group() as group:
        if taken:
            group.start_soon(worker)
        trajectory = await run_order(services, long_order)
    assert trajectory.failure is not None
    assert trajectory.failure.kind == ("LeaseExpired" if taken else "NotTaken")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one"),
        ({"command": ["x"], "external": True}, "exactly one"),
        ({"external": True, "host": "0.0.0.0"}, "token_env"),
        ({"external": True, "token_env": "AFTERPLAY_NO_SUCH_TOKEN"}, "is not set"),
        ({"function": "no_such_module:f"}, "no_such_module"),
        ({"command": ["x"], "port": 70000}, "port"),
    ],
)
async def test_options_that_cannot_work_stop_the_actor_with_the_key(
    serve: Serve, words: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        serve(echoing(words), loop_options=options)


async def test_tools_are_refused_where_no_parser_reads_what_the_model_writes(
    serve: Serve, long_order: Order, words: Any
) -> None:
    tokenizer = copy.deepcopy(words)
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + words.chat_template
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

    async def program(task: Any, client: Caller) -> Any:
        body = {"model": "m", "messages": [user("say")], "tools": [tool]}
        status, answer, _ = await client.post("/chat/completions", body)
        assert status == 400 and answer["error"]["param"] == "tools", answer
        assert "options.parser: auto found no parser" in answer["error"]["message"]
        await client.chat([user("say")])
        return {"reward": 1}

    services = serve(echoing(words), program, tokenizer=tokenizer)
    assert (await run_order(services, long_order)).status is TrajectoryStatus.COMPLETE


async def test_a_port_that_is_taken_is_told_with_what_to_do(serve: Serve, words: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=r"set port to a free one"):
            serve(echoing(words), loop_options={"external": True, "port": port})


def ended(pid: int, seconds: float = 10.0) -> bool:
    """True if it ends in time. The wait does not poll."""
    try:
        if not hasattr(os, "pidfd_open"):  # macOS; on Linux psutil would wait until somebody asks for the exit code too
            psutil.Process(pid).wait(seconds)
            return True
        handle = os.pidfd_open(pid)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return True
    except psutil.TimeoutExpired:
        return False
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def test_a_process_that_lives_has_not_ended() -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        assert not ended(child.pid, 0)
        child.kill()
        assert ended(child.pid)


def blocks(language: str) -> list[str]:
    """Fenced code of docs/GATEWAY.md."""
    text = (ROOT / "docs" / "GATEWAY.md").read_text()
    return [part.partition("```")[0] for part in text.split(f"```{language}\n")[1:]]


async def test_the_program_of_the_documentation_plays(
    serve: Serve, long_order: Order, words: Any, tmp_path: Path
) -> None:
    pytest.importorskip("openai", reason="pip install openai to test the program of docs/GATEWAY.md")
    (source,) = blocks("python")
    assert len(source.strip().splitlines()) <= 15
    order = dataclasses.replace(
        long_order, task=dataclasses.replace(long_order.task, payload={"prompt": "say hello", "answer": "4"})
    )
    engine = echoing(words)
    trajectory = await run_order(serve(engine, loop_options=command(tmp_path, source)), order)
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert trajectory.rewards == {"environment": 1.0} and [t.branch for t in trajectory.turns] == [0, 0, 0]
    assert_exact(trajectory, engine)


def test_the_run_file_of_the_documentation_and_the_example_load(words: Any, metrics: Any) -> None:
    (yaml,) = blocks("yaml")
    assert loads(yaml).environments["agents"].loop.options["command"] == ["python", "agent.py"]
    config = load(ROOT / "configs" / "program.yaml").environments["guess"]
    host = EnvironmentHost("guess", config)
    loop = build_loop(host, Renderer(words), metrics)
    assert isinstance(loop, ProgramLoop) and loop.command is not None
    loop.gateway.close()
    assert (ROOT / loop.command[1]).is_file()


def test_python_in_a_command_is_the_one_that_runs_afterplay() -> None:
    assert ProgramLoop(command=("python", "agent.py")).command == (sys.executable, "agent.py")
    for command in (("python3", "agent.py"), ("/usr/bin/python", "agent.py"), ("agent.sh", "python")):
        assert ProgramLoop(command=command).command == command


def verifiers_program(python: str, plugin: str, *more: str) -> dict[str, Any]:
    """Options of a loop that plays the taskset of a folder beside this file."""
    program = [python, str(ROOT / "configs" / "programs" / "verifiers_rollout.py")]
    program += ["--taskset", "gateway_words", "--harness", "gateway_words", *more]
    return {"command": program, "environment": {"PYTHONPATH": str(Path(__file__).parent / plugin)}}


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [False, True])
async def test_a_verifiers_environment_plays_and_its_reward_is_the_score(
    serve: Serve, long_order: Order, words: Any, tmp_path: Path, tokens: bool
) -> None:
    """verifiers owns the loop; its dependencies exclude others of Afterplay's, so it lives in a Python of its own."""
    python = os.environ.get("AFTERPLAY_VERIFIERS_PYTHON")
    if python is None:
        pytest.skip(
            "set AFTERPLAY_VERIFIERS_PYTHON to the Python of a virtual environment with verifiers==0.4.0 "
            "(make setup-dev makes one in .venv/verifiers; or python -m venv DIR; DIR/bin/pip install verifiers==0.4.0)"
        )
    if tokens:
        words.save_pretrained(str(tmp_path))
        tmp_path.chmod(0o755)
    more = ("--tokenizer", str(tmp_path)) if tokens else ()
    engine = echoing(words)
    options = verifiers_program(python, "verifiers_plugin", *more)
    trajectory = await run_order(serve(engine, loop_options=options), long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert trajectory.rewards == {"environment": 2.0}
    assert [t.branch for t in trajectory.turns] == [0, 0]
    assert_exact(trajectory, engine)
    assert trajectory.turns[0].context_messages[-1].content.endswith("say hello" if not tokens else "<|assistant|>")


@pytest.mark.parametrize("scored", [True, False])
async def test_the_program_for_verifiers_reports_the_score_or_that_there_is_none(
    serve: Serve, long_order: Order, words: Any, scored: bool
) -> None:
    """The program is the one that is shipped; verifiers is a stand-in."""
    engine = echoing(words)
    more = ("--env", json.dumps({"scored": scored}))
    options = verifiers_program(sys.executable, "verifiers_stand_in", *more)
    trajectory = await run_order(serve(engine, loop_options=options), long_order)
    assert [t.branch for t in trajectory.turns] == [0, 0]
    assert trajectory.turns[0].context_messages[-1].content == "say hello"
    assert_exact(trajectory, engine)
    if scored:
        assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
        assert trajectory.rewards == {"environment": 1.0}
    else:
        assert trajectory.status is TrajectoryStatus.ERROR and trajectory.failure is not None
        assert "no score" in trajectory.failure.message and trajectory.rewards == {}


async def test_a_cancelled_order_ends_its_program_and_keeps_what_was_played(
    serve: Serve, long_order: Order, words: Any, tmp_path: Path
) -> None:
    """The second call is never answered; while it waits the order is taken back."""
    source = AGENT + (
        "import os\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "chat([{'role': 'user', 'content': 'say'}])\n"
        "chat([{'role': 'user', 'content': 'guess'}])\n"
    )
    engine, asked = StubEngine(), anyio.Event()

    def script(ids: Any, sampling: Any) -> list[int]:
        engine.latency_seconds = 1000.0
        return [10, words.eos_token_id]

    engine._script = script
    services = serve(engine, loop_options={**command(tmp_path, source), "sandbox": "none"})
    rollout = Rollout(long_order, services)
    generate = engine.generate

    async def watched(*args: Any, **options: Any) -> Any:
        if engine.latency_seconds:
            asked.set()
        return await generate(*args, **options)

    engine.generate = watched  # type: ignore[method-assign]
    async with anyio.create_task_group() as group:
        group.start_soon(services.pool.watch)
        group.start_soon(services.serve)
        with anyio.fail_after(SECONDS):
            async with anyio.create_task_group() as running:
                running.start_soon(rollout.run)
                await asked.wait()
                running.cancel_scope.cancel()
        group.cancel_scope.cancel()
    await services.close()
    trajectory = rollout.aborted("taken back")
    assert trajectory.status is TrajectoryStatus.ABORTED and len(trajectory.turns) == 1
    assert engine.in_flight == 0 and ended(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
async def test_time_that_ended_while_a_call_waited_for_an_engine_is_the_engines_failure(
    serve: Serve, long_order: Order, words: Any
) -> None:
    """A reward of 0 would say that the policy failed."""
    engine = echoing(words)

    async def run(task: Any, client: Caller) -> None:
        await client.chat([user("say")])
        engine.alive = False
        await client.post("/chat/completions", {"messages": [user("say")]})

    trajectory = await run_order(serve(engine, run, max_seconds=4.0, wait_seconds_max=100.0), long_order)
    assert trajectory.failure is not None and trajectory.failure.boundary == "engine", trajectory.status
    assert trajectory.rewards == {}


@pytest.mark.parametrize("asleep_first", [False, True])
async def test_no_time_passes_for_a_program_while_the_engines_sleep(
    asleep_first: bool, serve: Serve, long_order: Order, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    run_program = ProgramLoop.run_program

    async def noted(loop: ProgramLoop, session: Session, files: Any, seconds_max: float) -> Any:
        limits.append(seconds_max)
        return await run_program(loop, session, files, seconds_max)

    monkeypatch.setattr(ProgramLoop, "run_program", noted)

    def deadlines() -> list[float]:
        return [scope.deadline - anyio.current_time() for scope in timeout._scopes]

    async def run(task: Any, client: Caller) -> float:
        await client.chat([user("say")])
        timeout.fell_asleep()
        assert len(deadlines()) == 3 and set(deadlines()) == {math.inf}, "rollout, calls, program"
        timeout.woke()
        assert all(0 < left <= SECONDS for left in deadlines())
        return 1.0

    services = serve(echoing(words), run)
    timeout = services.pool.patience
    timeout.pauses = True
    if asleep_first:
        timeout.fell_asleep()
    trajectory = await run_order(services, long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert limits == [math.inf], "a sandbox knows nothing of engines that sleep"


async def test_one_call_of_several_beyond_the_limit_truncates(serve: Serve, long_order: Order, words: Any) -> None:
    engine = echoing(words)
    engine.latency_seconds = 0.2

    async def run(task: Any, client: Caller) -> float:
        statuses: list[int] = []

        async def one(number: int) -> None:
            body = {"messages": [user("say")], "user": str(number)}
            statuses.append((await client.post("/chat/completions", body))[0])

        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(one, number)
        assert sorted(statuses) == [200, 200, 400]
        return 1.0

    trajectory = await run_order(serve(engine, run, max_turns=2), long_order)
    assert trajectory.status is TrajectoryStatus.TRUNCATED and trajectory.rewards == {"environment": 1.0}


async def test_a_greedy_order_is_played_greedily_whatever_the_program_asks(
    serve: Serve, long_order: Order, words: Any
) -> None:
    async def run(task: Any, client: Caller) -> float:
        status, _, headers = await client.post("/chat/completions", {"messages": [user("say")], "temperature": 1.0})
        assert status == 200 and headers["X-Afterplay-Ignored"] == "temperature"
        return 1.0

    services = serve(echoing(words), run, loop_options={"sampling_parameters": "refuse"})
    trajectory = await run_order(services, dataclasses.replace(long_order, greedy=True))
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert [t.temperature for t in trajectory.turns] == [0.0]


async def test_a_body_that_never_comes_does_not_hold_the_gateway(
    serve: Serve, long_order: Order, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "TRANSFER_SECONDS_MAX", 0.2)

    async def run(task: Any, client: Caller) -> float:
        await client.chat([user("say")])
        address, _, path = client.base_url.removeprefix("http://").partition("/")
        host, _, port = address.partition(":")
        head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n\r\n{{"
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(head.encode())
            assert (await stream.receive()).startswith(b"HTTP/1.1 408")
        await client.chat([user("say")])
        return 1.0

    trajectory = await run_order(serve(echoing(words), run), long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
