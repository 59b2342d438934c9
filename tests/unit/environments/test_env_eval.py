"""``afterplay env eval`` against an endpoint that speaks OpenAI's chat completions, good and bad."""

import json
import re
import sys
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from actors.engine.chat_endpoint import ChatAnswer, ChatEndpoint, base_url
from actors.env_commands.chat_dialogue import reply_text, request_messages
from actors.env_commands.evaluate import EvalRequest, evaluate, read_rows
from actors.tools.parsing.base import CallError
from actors.tools.parsing.registry import FORMATS
from pipeline.cli.app import app
from pipeline.errors import ConfigurationError
from pipeline.schema import FinishReason, Message
from tests.support.chat_server import chat_server
from tests.support.http_server import in_thread

ROOT = Path(__file__).resolve().parents[3]

BUSY = (429, {"error": {"message": "slow down"}}, {"Retry-After": "0"})


def run(url, tmp_path, name="arithmetic", **more):
    seen = []
    settings = {"tasks": 3, "samples": 2, "concurrency": 4, "retries": 1, "out": tmp_path / "eval", **more}
    result = evaluate(EvalRequest(name, url, **settings), lambda *counts: seen.append(counts))
    return result, {row["trajectory_id"]: row for row in read_rows(result.folder / "rollouts.jsonl")}


def right(body):
    """The answer to a sum."""
    a, b = map(int, re.findall(r"\d+", body["messages"][-1]["content"])[-2:])
    return str(a + b)


def test_every_task_is_sampled_as_often_as_asked(tmp_path):
    with chat_server(right) as server:
        result, rows = run(server.url, tmp_path)
    assert Counter(row["task_id"] for row in rows.values()) == {f"arithmetic/{i}": 2 for i in range(3)}
    assert len(server.requests) == 6 and {r["model"] for r in server.requests} == {"stand-in"}
    assert result.summary.score == 1.0 and result.summary.always == 3 and result.summary.left == 0
    assert result.summary.tokens == 5.0 and "too easy" in result.words[-1]
    stated = json.loads((result.folder / "summary.json").read_text())
    assert stated["pass_at"]["2"]["value"] == 1.0 and stated["url"] == server.url
    assert "arithmetic/2" in (result.folder / "rollouts.html").read_text()


def test_a_second_run_asks_nothing_and_more_samples_ask_the_rest(tmp_path):
    with chat_server(right) as server:
        run(server.url, tmp_path)
        run(server.url, tmp_path)
        assert len(server.requests) == 6
        result, rows = run(server.url, tmp_path, samples=3, tasks=4)
        assert len(server.requests) == 12 == len(rows) and result.summary.left == 0


def test_a_line_that_a_kill_cut_off_is_run_again(tmp_path):
    with chat_server(right) as server:
        result, _ = run(server.url, tmp_path)
        file = result.folder / "rollouts.jsonl"
        file.write_bytes(file.read_bytes()[:-20])
        _, rows = run(server.url, tmp_path)
        assert len(server.requests) == 7 and len(rows) == 6


def test_another_evaluation_does_not_get_into_the_folder(tmp_path):
    with chat_server(right) as server:
        run(server.url, tmp_path)
        with pytest.raises(ConfigurationError, match="another request"):
            run(server.url, tmp_path, temperature=0.5)


@pytest.mark.parametrize("text", ["", "{// of an editor\n}", "[1]"])
def test_settings_of_another_program_are_left_alone(text, tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(text)
    with chat_server(right) as server, pytest.raises(ConfigurationError, match="holds no settings of an evaluation"):
        run(server.url, tmp_path, out=tmp_path)
    assert file.read_text() == text


def test_a_busy_endpoint_is_asked_again(tmp_path):
    answers = iter([BUSY, BUSY])
    with chat_server(lambda body: next(answers, None) or right(body)) as server:
        result, _ = run(server.url, tmp_path, retries=2)
    assert result.summary.score == 1.0 and len(server.requests) == 8


def test_a_failure_is_counted_apart_and_tried_again_by_the_next_run(tmp_path):
    def script(body):
        return BUSY if ids[0] in body["messages"][-1]["content"] else right(body)

    ids = ["?"]
    with chat_server(right) as server:
        run(server.url, tmp_path / "first", samples=1)
        ids[0] = server.requests[1]["messages"][-1]["content"]
        server.requests.clear()
        server.script = script
        result, rows = run(server.url, tmp_path)
        assert result.summary.scored == 4 and result.summary.failures == {"engine: EngineUnavailable": 2}
        assert "slow down; given up after 2 requests" in result.examples["engine: EngineUnavailable"]
        assert result.stopped is None and result.summary.score == 1.0
        assert {r["reward"] for r in rows.values() if r["failure"]} == {None}
        server.requests.clear()
        server.script = right
        result, rows = run(server.url, tmp_path)
        assert len(server.requests) == 2 and result.summary.failures == {} and result.summary.scored == 6


def test_time_that_ends_while_the_endpoint_is_busy_is_its_failure(tmp_path):
    """The episode of two turns has a reward of 0 by then, which would say that the policy failed."""
    later = (429, {"error": {"message": "slow down"}}, {"Retry-After": "600"})
    text = "run: {name: ours}\nmodel: {source: tiny}\nenvironments: {guess: {name: number_guess, max_seconds: 0.5}}\n"
    (tmp_path / "ours.yaml").write_text(text)
    with chat_server(lambda body: later if len(body["messages"]) > 1 else "-1") as server:
        result, rows = run(server.url, tmp_path, "guess", run_file=tmp_path / "ours.yaml", tasks=1, samples=1)
    assert result.summary.failures == {"engine: EngineUnavailable": 1} and result.summary.scored == 0
    assert "slow down" in result.examples["engine: EngineUnavailable"]
    assert [row["n_turns"] for row in rows.values()] == [1]


def test_an_endpoint_that_fails_everything_ends_the_evaluation(tmp_path):
    with chat_server(lambda body: (500, {"error": "out of memory"}, {"Retry-After": "0"})) as server:
        result, _ = run(server.url, tmp_path, tasks=100, retries=0)
    assert "the last 4 rollouts failed" in result.stopped and "out of memory" in result.stopped
    assert result.summary.scored == 0 and len(server.requests) < 20


def test_a_wrong_key_ends_the_evaluation_at_once(tmp_path):
    with chat_server(lambda body: (401, {"error": {"message": "bad key"}}, {})) as server:
        result, _ = run(server.url, tmp_path, tasks=100)
    assert "HTTP 401: bad key" in result.stopped and len(server.requests) <= 4


def test_the_key_is_read_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    with chat_server(right) as server:
        run(server.url, tmp_path, key="env:MY_KEY", tasks=1)
    assert set(server.keys) == {"Bearer secret"}
    assert all("secret" not in path.read_text() for path in (tmp_path / "eval").iterdir())


def test_nobody_at_the_address_is_said_at_once(tmp_path):
    with pytest.raises(ConfigurationError, match="takes no connection"):
        run("http://127.0.0.1:9/v1", tmp_path)


def test_a_model_is_asked_for_where_there_are_several(tmp_path):
    with chat_server(right, ("a", "b")) as server:
        with pytest.raises(ConfigurationError, match="--model: expected one of a, b"):
            run(server.url, tmp_path)
        run(server.url, tmp_path, model="b")
    assert {r["model"] for r in server.requests} == {"b"}


def test_a_conversation_goes_on_until_the_environment_ends_it(tmp_path):
    with chat_server(lambda body: str(len(body["messages"]) // 2)) as server:
        _, rows = run(server.url, tmp_path, "number_guess", turns=3)
    longest = max(server.requests, key=lambda body: len(body["messages"]))["messages"]
    assert [m["role"] for m in longest][-3:] == ["user", "assistant", "user"]
    assert {row["status"] for row in rows.values()} <= {"complete", "truncated"}
    assert max(row["n_turns"] for row in rows.values()) == 3


def calling(body):
    """Calls the calculator, then says what it answered; the second sample never does."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return {"content": last["content"], "reasoning": "it is said"}
    a, b = re.findall(r"\d+", last["content"])[-2:]
    function = {"name": "calculator", "arguments": json.dumps({"expression": f"{a} + {b}"})}
    return {"content": None, "tool_calls": [{"id": "x1", "type": "function", "function": function}]}


def test_tool_calls_are_run_and_stated_in_the_form_of_the_api(tmp_path):
    with chat_server(calling) as server:
        result, rows = run(server.url, tmp_path, "big_sums", options={"examples": 0})
    assert result.summary.score == 1.0 and result.summary.turns == 2.0
    assert server.requests[0]["tools"][0]["function"]["name"] == "calculator"
    second = next(r for r in server.requests if r["messages"][-1]["role"] == "tool")["messages"]
    (called,) = second[-2]["tool_calls"]
    assert called["id"] == second[-1]["tool_call_id"] and json.loads(called["function"]["arguments"])["expression"]
    turns = next(iter(rows.values()))["transcript"]["turns"]
    assert turns[1]["message"]["extra"] == {"reasoning": "it is said"} and turns[1]["tokens"] == 5


def test_tools_can_be_told_as_text(tmp_path):
    def script(body):
        said = body["messages"][-1]["content"]
        if "<tool_response>" in said:
            return re.search(r"\d+", said).group()
        a, b = re.findall(r"\d+", said)[-2:]
        return reply_text_of("calculator", f"{a} + {b}")

    def reply_text_of(name, expression):
        call = {"name": name, "arguments": {"expression": expression}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    with chat_server(script) as server:
        result, _ = run(server.url, tmp_path, "big_sums", options={"examples": 0}, tools_as_text=True)
    assert result.summary.score == 1.0
    assert "tools" not in server.requests[0] and "calculator" in server.requests[0]["messages"][0]["content"]


def test_a_prompt_that_is_too_long_truncates_the_episode(tmp_path):
    refusal = (400, {"error": {"message": "This model's maximum context length is 4 tokens", "code": 400}}, {})

    def script(body):
        return refusal if len(body["messages"]) > 2 else "0"

    with chat_server(script) as server:
        result, rows = run(server.url, tmp_path, "number_guess")
    assert {row["status"] for row in rows.values()} <= {"complete", "truncated"}
    assert result.summary.truncated and not result.summary.failures


def test_the_newer_name_of_the_limit_is_used_where_the_older_is_refused(tmp_path):
    words = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."

    def script(body):
        return (400, {"error": {"message": words}}, {}) if "max_tokens" in body else right(body)

    with chat_server(script) as server:
        result, _ = run(server.url, tmp_path, concurrency=1, turn_tokens=7)
    assert result.summary.score == 1.0 and server.requests[-1]["max_completion_tokens"] == 7
    assert sum("max_tokens" in body for body in server.requests) == 1


RUN_FILE = """
run: {name: ours}
model: {source: tiny}
sampling: {temperature: 0.7, max_tokens: 9}
replay: {success_threshold: 0.5}
environments:
  guess:
    name: program
    max_turns: 3
    loop: {name: program, options: {function: "MODULE:play"}}
"""

PROGRAM = """
import json, urllib.request

def play(task, base_url, api_key):
    body = {"messages": [{"role": "user", "content": f"seed {task['seed']}"}], "tools": [], "temperature": 0.1}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(base_url + "/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as response:
        said = json.load(response)["choices"][0]["message"]["content"]
    return float(said == str(task["seed"]))
"""


def test_an_agent_program_calls_the_endpoint_through_the_gateway(tmp_path):
    (tmp_path / "play.py").write_text(PROGRAM)
    (tmp_path / "ours.yaml").write_text(RUN_FILE.replace("MODULE", str(tmp_path / "play.py")))
    with chat_server(lambda body: body["messages"][-1]["content"].removeprefix("seed ")) as server:
        result, _ = run(server.url, tmp_path, "guess", run_file=tmp_path / "ours.yaml")
    assert result.summary.score == 1.0 and result.summary.failures == {}, result.examples
    assert {(r["temperature"], r["max_tokens"]) for r in server.requests} == {(0.7, 9)}
    assert result.summary.threshold == 0.5


UNENDING = PROGRAM.replace(
    """    with urllib.request.urlopen(request, timeout=20) as response:
        said = json.load(response)["choices"][0]["message"]["content"]
    return float(said == str(task["seed"]))
""",
    """    try:
        while True:
            urllib.request.urlopen(request, timeout=20).close()
    except urllib.error.HTTPError as error:
        assert error.code == 400, error.code
        return 0.5
""",
)


def test_a_program_is_told_the_limit_of_the_endpoint_and_its_episode_is_truncated(tmp_path):
    too_long = (400, {"error": {"message": "too long", "code": "context_length_exceeded"}}, {})
    (tmp_path / "play.py").write_text(UNENDING)
    (tmp_path / "ours.yaml").write_text(RUN_FILE.replace("MODULE", str(tmp_path / "play.py")))
    with chat_server(lambda body: too_long if len(server.requests) > 1 else "1") as server:
        result, _ = run(server.url, tmp_path, "guess", run_file=tmp_path / "ours.yaml", tasks=1, samples=1)
    assert (result.summary.truncated, result.summary.score, result.summary.turns) == (1, 0.5, 1.0), result.examples


QUESTIONS = """
run: {name: ours}
model: {source: tiny}
environments:
  sums:
    name: question
    tasks_from: {kind: jsonl, path: FOLDER/q.jsonl, columns: {prompt: q, answer: a}, splits: {train: 0.5, eval: 0.5}}
scorer:
  environment_weight: 0
  functions: [{path: number, name: right, weight: 0.5}, {path: "FOLDER/score.py:short", name: short, weight: 0.5}]
"""


def test_the_scorer_of_the_run_file_gives_the_reward(tmp_path):
    rows = [{"q": f"{i} + 1?", "a": str(i + 1)} for i in range(20)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "score.py").write_text("def short(t):\n    return None if t.task.payload['answer'] == '9' else 1.0\n")
    (tmp_path / "ours.yaml").write_text(QUESTIONS.replace("FOLDER", str(tmp_path)))
    with chat_server(lambda body: str(int(body["messages"][-1]["content"].split()[0]) + 1)) as server:
        found = [
            run(server.url, tmp_path / split, "sums", run_file=tmp_path / "ours.yaml", split=split, tasks=20, samples=1)
            for split in ("train", "eval")
        ]
    tasks = [{row["task_id"] for row in rows.values()} for _, rows in found]
    assert len(tasks[0]) + len(tasks[1]) == 20 and not tasks[0] & tasks[1]
    assert all(result.summary.score == 1.0 for result, _ in found)
    failures = {reason: n for result, _ in found for reason, n in result.summary.failures.items()}
    assert failures == {"scorer short: missing": 1}


def test_an_environment_of_verifiers_needs_no_code(tmp_path, monkeypatch):
    """The run file and the program are those that ship; verifiers is a stand-in that counts fours."""
    text = (ROOT / "configs" / "verifiers.yaml").read_text().replace("configs/", f"{ROOT}/configs/")
    text = text.replace("verifiers/bin/python", sys.executable).replace(
        "gsm8k-v1", "gateway_words, --harness, gateway_words"
    )
    (tmp_path / "ours.yaml").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "unit" / "actors" / "verifiers_stand_in"))
    with chat_server(lambda body: "4" * len(body["messages"])) as server:
        result, _ = run(server.url, tmp_path, "taskset", run_file=tmp_path / "ours.yaml", tasks=2, samples=1)
    assert result.summary.failures == {}, result.examples
    assert result.summary.score == 3.0 and result.summary.turns == 2.0


def test_an_environment_of_openenv_needs_no_code(tmp_path):
    """A server of the protocol whose episode ends, and pays, with the right word."""
    serve = pytest.importorskip("websockets.asyncio.server", reason="pip install '.[openenv]'").serve

    async def play(socket):
        async for raw in socket:
            message = json.loads(raw)
            done = message["type"] == "step" and message["data"]["message"] == "down"
            data = {"observation": {"text": "up or down?"}, "reward": float(done), "done": done}
            await socket.send(json.dumps({"type": "observation", "data": data}))

    @asynccontextmanager
    async def serving():
        async with serve(play, "127.0.0.1", 0) as listener:
            yield f"ws://127.0.0.1:{listener.sockets[0].getsockname()[1]}"

    with chat_server(lambda body: "down" if len(body["messages"]) > 1 else "up") as server, in_thread(serving()) as url:
        result, _ = run(server.url, tmp_path, "openenv", options={"urls": [url], "observation": "text"})
    assert (result.summary.score, result.summary.turns, result.summary.failures) == (1.0, 2.0, {})


def test_the_command_reports_in_words_and_ends_with_its_meaning(tmp_path):
    command = ["env", "eval", "arithmetic", "--tasks", "4", "--samples", "2", "--out", str(tmp_path / "out"), "--url"]
    with chat_server(lambda body: right(body) if "2" in body["messages"][-1]["content"] else "0") as server:
        result = CliRunner().invoke(app, [*command, server.url])
    assert result.exit_code == 0, result.output
    assert "pass@2" in result.output and "only these tasks give advantages" in result.output
    assert "training would change nothing" in result.output and "8 of 8 rollouts" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--key", "sk-123"], "env:NAME or file:PATH"),
        (["--key", "env:NOT_SET"], "NOT_SET"),
        (["--pass-at", "9"], "at most --samples"),
        (["--body", "x"], "--body x: expected option=value"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_asked(options, words, tmp_path):
    command = ["env", "eval", "arithmetic", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "out"), *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code != 0 and words in result.output + str(result.exception)


def test_the_tasks_of_a_split_are_taken_in_order(tmp_path):
    with chat_server(right) as server:
        with pytest.raises(ConfigurationError, match="--split: expected one of train"):
            run(server.url, tmp_path, split="test")
        _, rows = run(server.url, tmp_path, first=7, tasks=2, samples=1)
    assert sorted(rows) == ["train.7.0", "train.8.0"]


def test_the_history_of_calls_is_stated_with_the_ids_of_the_answers():
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    history = [
        Message("user", "go"),
        Message("assistant", f"thus\n{call}\n{call}"),
        Message("tool", "one", {"tool_call_id": "a", "name": "f"}),
        Message("tool", "two", {"tool_call_id": "b", "name": "f"}),
        Message("assistant", "done"),
        Message("tool", "nobody asked"),
    ]
    sent = request_messages(history)
    assert [c["id"] for c in sent[1]["tool_calls"]] == ["a", "b"] and sent[1]["content"] == "thus"
    assert [m["role"] for m in sent] == ["user", "assistant", "tool", "tool", "assistant", "user"]
    assert orjson.dumps(sent)


@pytest.mark.parametrize("arguments", [{"x": "é"}, '{"x": "é"}'])
@pytest.mark.parametrize("apart", [True, False])
def test_the_calls_of_a_written_example_are_stated_whatever_their_form(arguments, apart):
    call = {"name": "f", "arguments": arguments}
    example = Message("assistant", "", {"tool_calls": [{"function": call} if apart else call]})
    sent = request_messages([Message("user", "go"), example, Message("tool", "one")])
    (stated,) = sent[1]["tool_calls"]
    assert stated["function"] == {"name": "f", "arguments": '{"x": "é"}'} and sent[2]["tool_call_id"] == stated["id"]


@pytest.mark.parametrize("arguments", ["{broken", r'{"a": "\ud800"}'])
def test_arguments_that_are_no_json_are_a_call_that_cannot_be_read(arguments):
    text = reply_text(ChatAnswer("", (("f", arguments),), "", FinishReason.STOP, 0, 0))
    text.encode()
    (call,) = FORMATS["qwen"].parse(text, ()).calls
    assert isinstance(call, CallError) and "could not be read" in call.text


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x/v1?key=1"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigurationError, match="--url: expected an address"):
        base_url(url)
    assert ChatEndpoint("http://x").url == "http://x/v1"
