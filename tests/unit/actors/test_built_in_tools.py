"""Calculator, Python sandbox, search and MCP servers, each for real."""

from __future__ import annotations

import ast
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from actors.sandboxes import bubblewrap
from actors.tools import ToolError, ToolResult
from actors.tools.calculator import calculate
from actors.tools.mcp import MCP
from actors.tools.python import Python, showing_the_last_value
from actors.tools.search import Search
from pipeline.errors import ConfigurationError
from pipeline.schema import Task

SERVER = Path(__file__).with_name("mcp_server.py")
NUMBER = st.integers(-(10**30), 10**30)


@given(a=NUMBER, b=NUMBER, operation=st.sampled_from(["+", "-", "*"]))
def test_calculator_is_exact_on_integers(a: int, b: int, operation: str) -> None:
    assert calculate(f"({a}) {operation} ({b})") == str(
        ast.literal_eval(str({"+": a + b, "-": a - b, "*": a * b}[operation]))
    )


@given(text=st.text(max_size=60) | st.text("0123456789+-*/().e^ ,%", max_size=60))
def test_calculator_answers_or_refuses_and_never_fails(text: str) -> None:
    started = time.perf_counter()
    try:
        assert isinstance(calculate(text), str)
    except ToolError as error:
        assert str(error)
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1/3 + 1/6", "0.5"),
        ("2^10", "1024"),
        ("sqrt(16) + abs(-2)", "6"),
        ("sqrt(2)", str(math.sqrt(2))),
        ("0.1 + 0.2", "0.3"),
        ("7 // 2 * 10 + 7 % 2", "31"),
        ("round(10/3, 2)", "3.33"),
        ("max(1, 2, 3)", "3"),
        ("2 ** -1", "0.5"),
    ],
)
def test_calculator_computes(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("9**9**9", "1/0", "__import__('os')", "(1).real", "[1]*10**9", "x", "1e999", "factorial(10**6)", "-" * 999),
        *(
            "(-1) ** 0.5",
            "'a'*5",
            "lambda: 1",
            "9" * 900 + "**9",
            "sqrt(-1)",
            "min()",
            "1 if 1 else 2",
            "10**400/3.5e1",
        ),
    ],
)
def test_calculator_refuses_what_is_no_bounded_arithmetic(expression: str) -> None:
    with pytest.raises(ToolError):
        calculate(expression)


@asynccontextmanager
async def sandbox(**options: Any) -> AsyncIterator[Python]:
    pytest.importorskip("pydantic_monty", reason="pip install pydantic-monty==1.4.0")
    tool = Python(**options)
    try:
        yield tool
    finally:
        await tool.close()


async def run(tool: Any, key: str = "e", **arguments: Any) -> str:
    result = await tool.execute(key, arguments)
    assert isinstance(result, ToolResult)
    return result.text


async def test_python_prints_and_keeps_variables_for_one_episode_only() -> None:
    async with sandbox() as tool:
        await tool.create("a", Task("t", "e", 0))
        assert await run(tool, "a", code="x = 20\nprint('hi')\nx + 1") == "hi\n21\n"
        assert await run(tool, "a", code="x * 2; x") == "20\n"
        assert await run(tool, "a", code="(\n    x + 2\n)") == "22\n"
        assert "NameError" in await run(tool, "b", code="x")
        await tool.release("a")
        assert "NameError" in await run(tool, "a", code="x")
        assert not tool._states.keys() - {"a", "b"}


async def test_python_calls_of_one_turn_keep_the_variables_of_each() -> None:
    async with sandbox() as tool:
        async with anyio.create_task_group() as group:
            for code in ("a = 1", "b = a + 1", "c = b + 1"):
                group.start_soon(partial(run, tool, code=code))
        assert await run(tool, code="a, b, c") == "(1, 2, 3)\n"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("while True: pass", "TimeoutError"),
        ("x = [0]\nwhile True: x = x + x", "MemoryError"),
        ("def f(): return f()\nf()", "RecursionError"),
        ("open('/etc/passwd').read()", "PermissionError"),
        ("import subprocess", "ModuleNotFoundError"),
        ("1/0", "ZeroDivisionError"),
        ("def (", "Expected"),
        ("import time\ntime.sleep(100)\nprint('slept')", ""),
        ("10 ** 5000", ""),
    ],
)
async def test_python_tells_what_went_wrong_within_its_limits(code: str, told: str) -> None:
    endless = told == "TimeoutError"  # the others end by themselves, however slow the machine is
    async with sandbox(seconds_max=0.5 if endless else 60, memory_mib=16) as tool:
        with anyio.fail_after(120):
            assert told in await run(tool, code=code)
            assert await run(tool, code="1 + 1") == "2\n"


async def test_python_forgets_variables_that_are_too_large_and_says_so() -> None:
    async with sandbox(state_bytes_max=10_000) as tool:
        assert "too large" in await run(tool, code="x = 'a' * 100000")
        assert "NameError" in await run(tool, code="x")
        assert len(await run(tool, code="print('y' * 5_000_000)")) < 300_000


async def test_python_runs_many_calls_with_few_workers() -> None:
    async with sandbox(processes=2) as tool, anyio.create_task_group() as group:

        async def one(n: int) -> None:
            assert await run(tool, f"e{n}", code=f"sum(range({n}))") == f"{sum(range(n))}\n"

        for n in range(100):
            group.start_soon(one, n)


async def test_python_cancelled_in_the_middle_leaves_the_tool_usable() -> None:
    async with sandbox(seconds_max=20, processes=1) as tool:
        with anyio.move_on_after(0.3) as scope:
            await run(tool, code="while True: pass")
        assert scope.cancelled_caught
        with anyio.fail_after(60):
            assert await run(tool, code="2 + 2") == "4\n"


async def test_python_runs_behind_bubblewrap_where_it_is_installed() -> None:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        pytest.skip("needs bubblewrap: apt install bubblewrap")
    refusal = bubblewrap.refusal(bwrap)
    if refusal is not None:
        pytest.skip(f"bubblewrap may not make namespaces here (unprivileged container?): {refusal}")
    async with sandbox(sandbox="bubblewrap") as tool:
        assert await run(tool, code="6 * 7") == "42\n"
        assert tool._wrapper is not None


@pytest.fixture
def forbidding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bubblewrap on a machine without user namespaces."""
    script = tmp_path / "bwrap"
    script.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    script.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


async def test_python_runs_without_a_bubblewrap_that_is_forbidden(
    forbidding: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with sandbox() as tool:
        assert await run(tool, code="6 * 7") == "42\n"
    assert "No permissions to create new namespace" in caplog.text


async def test_python_that_must_run_behind_bubblewrap_says_why_it_cannot(forbidding: None) -> None:
    async with sandbox(sandbox="bubblewrap") as tool:
        with pytest.raises(ConfigurationError, match=r"No permissions.*user namespaces"):
            await tool.create("e", Task("t", "e", 0))


async def test_python_says_where_bubblewrap_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with sandbox(sandbox="bubblewrap") as tool:
        monkeypatch.setenv("PATH", "")
        with pytest.raises(ConfigurationError, match="bwrap"):
            await tool.create("e", Task("t", "e", 0))


@given(code=st.text(max_size=40) | st.sampled_from(["é = 1; é", "# x\n'ä'  # y", "(1,\n 2)", "x = 1", "f(\n)", "1;2"]))
@example("*0")
@example("x = 1; (x + 1)  # y")
@example("(\n1 + 2\n)")
def test_showing_the_last_value_keeps_code_readable(code: str) -> None:
    changed = showing_the_last_value(code)
    try:
        ast.parse(code.replace("\r\n", "\n").replace("\r", "\n"))
    except (SyntaxError, ValueError):
        return
    ast.parse(changed)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rows = [
        {"title": "Paris", "text": "Paris is the capital of France. " + "It has museums. " * 50},
        {"title": "Rome", "text": "Rome is the capital of Italy."},
        {"text": "Cats sleep a lot; a cat's sleep is light."},
    ]
    file = tmp_path / "corpus.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


async def test_search_finds_passages_whatever_is_asked(corpus: Path) -> None:
    tool = Search(corpus=str(corpus), top_k=2, characters=100)
    try:
        text = await run(tool, query="What is the capital of Italy?")
        assert text.startswith("[1] Rome\nRome is the capital of Italy.") and "[2] Paris\n" in text
        assert len(text) < 300
        assert "light" in await run(tool, query='sleeping "cats" AND NEAR( * : -')
        assert await run(tool, query="zebra") == "Nothing was found."
        with pytest.raises(ToolError, match="no words"):
            await run(tool, query='"*"')
        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(lambda: run(tool, query="capital"))
    finally:
        await tool.close()


def test_search_index_is_kept_and_built_anew_when_the_corpus_changes(corpus: Path, tmp_path: Path) -> None:
    index = tmp_path / "index" / "corpus.sqlite"
    Search(corpus=str(corpus), index=str(index))
    first = index.stat().st_ino
    Search(corpus=str(corpus), index=str(index))
    assert index.stat().st_ino == first
    corpus.write_text(corpus.read_text() + '\n{"text": "Zebras graze."}')
    tool = Search(corpus=str(corpus), index=str(index))
    assert index.stat().st_ino != first and [p.name for p in index.parent.iterdir()] == ["corpus.sqlite"]
    assert tool._query("zebra") != []


def test_search_names_the_line_of_the_corpus_that_is_wrong(corpus: Path) -> None:
    corpus.write_text(corpus.read_text() + '\n{"body": "x"}')
    with pytest.raises(ConfigurationError, match="line 4"):
        Search(corpus=str(corpus))


@asynccontextmanager
async def served(tool: MCP) -> AsyncIterator[MCP]:
    async with anyio.create_task_group() as group:
        group.start_soon(tool.serve)
        with anyio.fail_after(60):
            yield tool
        group.cancel_scope.cancel()


async def ask(tool: MCP, name: str, **arguments: Any) -> str:
    (found,) = (t for t in await tool.tools() if t.name == name)
    return (await found.execute("e", arguments)).text


@pytest.fixture
def stdio() -> MCP:
    pytest.importorskip("mcp", reason="pip install mcp")
    return MCP(command=(sys.executable, str(SERVER)), backoff_seconds=0.05)


async def test_mcp_server_over_stdio_is_called_and_its_errors_are_told(stdio: MCP) -> None:
    async with served(stdio) as tool:
        names = {t.name: t for t in await tool.tools()}
        assert set(names) == {"add", "fail", "die", "sleep", "who", "read"}
        assert names["add"].parameters["required"] == ["a", "b"] and names["add"].description == "Add two integers."
        assert await ask(tool, "add", a=2, b=40) == "42"
        with pytest.raises(ToolError, match=r"fail|because"):
            await ask(tool, "fail", why="because")
        assert await ask(tool, "add", a=1, b=1) == "2" and tool.connections == 1


@pytest.mark.slow
async def test_the_text_of_a_file_that_an_mcp_server_sends_is_in_the_answer(stdio: MCP) -> None:
    async with served(stdio) as tool:
        assert await ask(tool, "read") == "words of a file\n[resource]"


async def test_mcp_server_that_died_is_started_again(stdio: MCP) -> None:
    async with served(stdio) as tool:
        first = int(await ask(tool, "who"))
        with pytest.raises(Exception):  # noqa: B017 - whatever the version of mcp raises
            await ask(tool, "die")
        second = int(await ask(tool, "who"))
        assert first != second and tool.connections == 2
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


async def test_mcp_call_that_cannot_be_sent_or_read_leaves_the_connection_to_the_others(stdio: MCP) -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    async with served(stdio) as tool:
        first = await ask(tool, "who")
        with pytest.raises(ValueError, match="depth"):
            await ask(tool, "add", a=1, b=2, other=deep)
        stdio._session._tool_output_schemas["add"] = {"required": ["absent"]}
        with pytest.raises(RuntimeError, match="structured content"):
            await ask(tool, "add", a=1, b=2)
        assert await ask(tool, "who") == first and tool.connections == 1


@pytest.mark.slow
async def test_mcp_server_that_gives_no_answers_is_started_again(stdio: MCP) -> None:
    async with served(stdio) as tool:
        await tool.tools()
        for _ in range(3):
            with anyio.move_on_after(0.2) as scope:
                await ask(tool, "sleep", seconds=30)
            assert scope.cancelled_caught
        assert await ask(tool, "add", a=1, b=2) == "3" and tool.connections == 2


async def test_mcp_calls_of_episodes_that_are_given_up_do_not_count_as_unanswered(stdio: MCP) -> None:
    class Silent:
        async def call_tool(self, name: str, arguments: Any) -> Any:
            await anyio.sleep_forever()

    session = stdio._session = Silent()
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(stdio.call, "add", {})
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert stdio._session is session
    for _ in range(3):
        with anyio.move_on_after(0.01):
            await stdio.call("add", {})
    assert stdio._session is None


@pytest.mark.slow
async def test_mcp_takes_only_the_tools_that_are_allowed_and_puts_a_prefix_before_them() -> None:
    pytest.importorskip("mcp", reason="pip install mcp")
    command = (sys.executable, str(SERVER))
    async with served(MCP(command=command, allow=("add",), prefix="sum_")) as tool:
        assert [t.name for t in await tool.tools()] == ["sum_add"]
        assert await ask(tool, "sum_add", a=1, b=2) == "3"


@pytest.fixture
def http() -> Iterator[str]:
    pytest.importorskip("mcp", reason="pip install mcp")
    pytest.importorskip("uvicorn", reason="pip install uvicorn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SERVER), "--http", str(port)], stderr=subprocess.DEVNULL)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait(10)


@pytest.mark.slow
async def test_mcp_server_over_http_is_called(http: str) -> None:
    async with served(MCP(url=http, headers={"x-test": "1"}, backoff_seconds=0.1)) as tool:
        assert await ask(tool, "add", a=20, b=22) == "42"
        with pytest.raises(ToolError, match=r"fail|because"):
            await ask(tool, "fail", why="because")


def test_mcp_wants_exactly_one_way_to_the_server() -> None:
    for options in ({}, {"command": ("x",), "url": "http://127.0.0.1:1/mcp"}):
        with pytest.raises(ValueError, match="either command"):
            MCP(**options)
