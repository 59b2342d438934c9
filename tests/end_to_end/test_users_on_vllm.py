"""Clients of users on a real vLLM server: OpenAI's on the newest weights of a run, and ``afterplay env eval`` with
native tool calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import aiohttp
import anyio.to_thread
import pytest

import afterplay
from pipeline.config.load import dump
from pipeline.runtime.run_directory import RunDirectory
from pipeline.supervisor.run import run_lock
from tests.end_to_end.test_engine_contract import Api, next_version, other_weights
from tests.support.running_engine import RunningEngine

BANK = """
from typing import Literal
from afterplay import Environment, Episode, Message, Step, tool

class Account(Episode):
    messages = (Message("user", "Say hello."),)

    @tool
    def balance(self, currency: Literal["euro", "dollar"]) -> str:
        "Look up the balance of the account."
        return "17 " + currency

    def step(self, reply):
        return Step(reward=1.0, done=True)

class Bank(Environment):
    loop = "tool_agent"

    def start(self, task):
        return Account()
"""
SECONDS_MAX = 300
pytestmark = [pytest.mark.vllm, pytest.mark.smoke, pytest.mark.timeout(2 * SECONDS_MAX)]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_native_tool_calls_of_a_server_are_answered_by_the_environment(
    vllm_engine: RunningEngine, tmp_path: Path, choice: str
) -> None:
    """A small model calls the tool only when it must, and hardly knows its argument: the answer may be an error."""
    (tmp_path / "bank.py").write_text(BANK)
    engine = ["--url", vllm_engine.url, "--key", vllm_engine.config.engine.actor_key]
    options = [*engine, "--out", "out", "--body", f"tool_choice={choice}"]
    limits = ["--tasks", "1", "--samples", "1", "--turns", "2", "--max-tokens", "40", "--temperature", "0"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pipeline.cli.app", "env", "eval", "bank.py:Bank", *options, *limits],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    assert [row["failure"] for row in rows] == [None]
    turns = [turn for row in rows for turn in row["transcript"]["turns"]]
    calls = [turn["signals"].get("tool_calls", 0) for turn in turns]
    answers = [message for turn in turns for message in turn["messages"] if message["role"] == "tool"]
    if choice == "auto":
        assert calls == [0] and answers == [] and rows[0]["reward"] == 1.0
    else:
        assert calls == [1, 1] and len(answers) == 1


async def test_the_client_of_a_run_samples_from_the_newest_weights(vllm_engine: RunningEngine, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai", reason="pip install openai to test its client")
    directory = RunDirectory(vllm_engine.config.run.path)
    directory.config_file.write_text(dump(vllm_engine.config))
    with run_lock(directory):
        client: openai.OpenAI = afterplay.load(directory.path).policy()
        question = [{"role": "user", "content": "Tell a story."}]

        async def ask() -> str:
            answer = await anyio.to_thread.run_sync(
                lambda: client.chat.completions.create(
                    model="policy", messages=question, max_tokens=12, temperature=0, seed=0
                )
            )
            return str(answer.choices[0].message.content)

        async with aiohttp.ClientSession(headers=vllm_engine.control) as session:
            api = Api(vllm_engine, session)
            first = await ask()
            assert first and await ask() == first
            await api.update(next_version(vllm_engine), other_weights(api, tmp_path / "weights"))
            assert await ask() != first
