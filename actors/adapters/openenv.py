"""``openenv``: environment servers that speak OpenEnv's WebSocket protocol. The package itself is not needed.

One connection to ``<url>/ws`` is one episode. Messages are JSON: ``{"type": "reset", "data": {"seed": 7}}`` and
``{"type": "step", "data": {action}}`` are answered by ``{"type": "observation", "data": {"observation": {...},
"reward": 1.0, "done": false}}`` or ``{"type": "error", "data": {"message", "code"}}``; ``{"type": "close"}`` ends the
session (openenv 0.10, ``core/env_server/types.py``).
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import Field
from pydantic.dataclasses import dataclass

from actors.adapters.catalogue import held_out, package, undone_on_error
from actors.environments.base import STRICT_OPTIONS, Environment, Episode, Reply, Step
from pipeline.schema import Message, Task

CLOSE_SECONDS_MAX = 1.0


class OpenEnvError(Exception):
    """The server answered with an error, or violated the protocol."""


@dataclass(config=STRICT_OPTIONS)
class OpenEnv(Environment):
    """Environment servers of the OpenEnv protocol, one WebSocket an episode."""

    splits = held_out(2**30)

    urls: tuple[str, ...] = Field(default=("ws://127.0.0.1:8000",), min_length=1)
    """Servers (``ws://host:port`` or ``http://host:port``), taken in turn."""
    action: dict[str, Any] = Field(default_factory=lambda: {"message": "{reply}"})
    """The action of a step. ``{reply}`` in a text is replaced by the policy's reply; a value that is exactly
    ``{json}`` for the JSON object in the reply."""
    observation: str | None = None
    """Key of the observation that the policy reads. None: all of it as JSON, without ``metadata``."""
    instructions: str = ""
    """Text before the first observation."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """More data of the reset message. The seed of the task is always sent."""
    message_bytes_max: int = Field(default=16 * 2**20, ge=1024, le=2**30)
    connect_seconds_max: float = Field(default=20.0, gt=0, le=600)

    def __post_init__(self) -> None:
        for url in self.urls:
            if not url.startswith(("ws://", "wss://", "http://", "https://")):
                raise ValueError(f"urls: expected ws:// or http:// addresses, got {url!r}")
        self._connect = package("openenv", "websockets.asyncio.client").asyncio.client.connect
        self._turn = itertools.cycle(self.urls)

    async def start(self, task: Task) -> OpenEnvEpisode:
        url = re.sub("^http", "ws", f"{next(self._turn).rstrip('/')}/ws")
        socket = await self._connect(
            url,
            max_size=self.message_bytes_max,
            open_timeout=self.connect_seconds_max,
            close_timeout=CLOSE_SECONDS_MAX,
            proxy=None,
        )
        with undone_on_error(socket.transport.abort):
            answer = await ask(socket, "reset", _message("reset", {**self.reset, "seed": task.seed % 2**31}))
            return OpenEnvEpisode(self, socket, answer)


class OpenEnvEpisode(Episode):
    def __init__(self, options: OpenEnv, socket: Any, first: Mapping[str, Any]) -> None:
        self._options, self._socket = options, socket
        self.messages = (Message("user", "\n\n".join(filter(None, (options.instructions, self._text(first))))),)

    async def step(self, reply: Reply) -> Step:
        try:
            message = _message("step", _filled(self._options.action, str(reply)))
        except (ValueError, orjson.JSONEncodeError):  # JSON is read to a greater depth than it is written
            return Step((Message("user", "Reply with a JSON object."),), signals={"unknown_action": 1.0})
        data = await ask(self._socket, "step", message)
        done = bool(data.get("done"))
        reward = data.get("reward")
        signals = {"unknown_action": 0.0}
        return Step(() if done else (Message("user", self._text(data)),), float(reward or 0.0), done, signals)

    async def close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS_MAX):
                await self._socket.send(orjson.dumps({"type": "close"}).decode())
                await self._socket.close()
        except Exception:  # the session ends with the connection in any case
            self._socket.transport.abort()

    def _text(self, data: Mapping[str, Any]) -> str:
        observation = data["observation"]
        key = self._options.observation
        if key is None:
            shown = {k: v for k, v in observation.items() if k != "metadata"}
            return orjson.dumps(shown).decode()
        if key not in observation:
            raise OpenEnvError(
                f"expected an observation with {key!r}, got {sorted(observation)}: set options.observation"
            )
        value = observation[key]
        return value if isinstance(value, str) else orjson.dumps(value).decode()


async def ask(socket: Any, kind: str, message: str) -> dict[str, Any]:
    """One request and its answer: ``{"observation", "reward", "done"}``. Raises :class:`OpenEnvError`."""
    await socket.send(message)
    raw = await socket.recv()
    try:
        answer = orjson.loads(raw)
        data = answer["data"]
        if answer["type"] == "error":
            raise OpenEnvError(f"{kind}: {data.get('message', 'no message')} ({data.get('code', 'no code')})")
        if answer["type"] != "observation" or not isinstance(data["observation"], dict):
            raise KeyError("observation")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OpenEnvError(
            f"{kind}: expected an observation of the OpenEnv protocol, got {str(raw)[:200]!r}"
        ) from error
    return dict(data)


def _message(kind: str, data: Mapping[str, Any]) -> str:
    return orjson.dumps({"type": kind, "data": data}).decode()


def _filled(template: Any, reply: str) -> Any:
    """The action for a reply. Raises :class:`ValueError` where the template wants JSON and there is none."""
    if template == "{json}":
        return orjson.loads(reply[reply.index("{") : reply.rindex("}") + 1])
    if isinstance(template, dict):
        return {key: _filled(value, reply) for key, value in template.items()}
    if isinstance(template, list):
        return [_filled(value, reply) for value in template]
    return template.replace("{reply}", reply) if isinstance(template, str) else template
