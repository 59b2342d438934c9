"""An environment of two tasks: two turns of a chat, whose reward is the number of fours in the last reply."""

import contextlib
import json
import os
import urllib.request
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any


class Tasks(list[str]):
    bounded = True


class TwoTurns:
    def __init__(self, scored: bool) -> None:
        self.taskset, self.scored = Tasks(["guess", "say hello"]), scored

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def run_episode(self, task: str, context: Any) -> SimpleNamespace:
        messages = [{"role": "user", "content": task}]
        for _ in range(2):
            messages += [said := chat(context, messages), {"role": "user", "content": "try again"}]
        reward = float(said["content"].count("4"))
        rewards = {"fours": reward if self.scored else None}
        return SimpleNamespace(ok=True, errors=[], traces=[SimpleNamespace(reward=reward, rewards=rewards, errors=[])])


def chat(context: Any, messages: list[dict[str, str]]) -> dict[str, str]:
    body = json.dumps({"model": context.model, "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ[context.client.api_key_var]}"}
    request = urllib.request.Request(f"{context.client.base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=200) as response:
        return json.load(response)["choices"][0]["message"]


def resolve_env_config(block: dict[str, Any]) -> dict[str, Any]:
    assert block["taskset"] == {"id": "gateway_words"}
    assert block["agent"] == {"runtime": {"type": "subprocess"}, "harness": {"id": "gateway_words"}}
    return block


def load_environment(config: dict[str, Any]) -> TwoTurns:
    return TwoTurns(scored=config.get("scored", True))
