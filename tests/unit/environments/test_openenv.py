"""OpenEnv's protocol against a small server that speaks it, good and hostile."""

import json
from contextlib import asynccontextmanager

import anyio
import pytest

from actors.environments import Reply
from actors.environments.host import EnvironmentHost
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.errors import PlugInError
from pipeline.schema import Task

websockets = pytest.importorskip("websockets", reason="openenv: pip install '.[openenv]'")


class Server:
    """Counts down from the seed; the action ``{"message": "down"}`` takes one off. Faults are put in from outside."""

    def __init__(self):
        self.open = 0
        self.closed_well = 0
        self.fault = None
        self.received = []

    async def serve(self, socket):
        self.open += 1
        left = 0
        try:
            async for raw in socket:
                message = json.loads(raw)
                self.received.append(message)
                if message["type"] == "close":
                    self.closed_well += 1
                    return
                if message["type"] == "reset":
                    left = message["data"]["seed"]
                elif str(message["data"]["message"]).strip() == "down":
                    left -= 1
                if self.fault is not None and message["type"] == "step":
                    await self.fault(socket)
                    continue
                seen = {"observation": {"left": left, "text": f"{left} left", "metadata": {"x": 1}}}
                data = {**seen, "reward": 1.0 if left == 0 else None, "done": left == 0}
                await socket.send(json.dumps({"type": "observation", "data": data}))
        except websockets.ConnectionClosed:
            pass
        finally:
            self.open -= 1


@asynccontextmanager
async def serving():
    from websockets.asyncio.server import serve

    server = Server()
    async with serve(server.serve, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        yield server, f"http://127.0.0.1:{port}"


def host(url, **options):
    section = EnvironmentConfig(name="openenv", options={"urls": [url], **options}, step_seconds_max=2.0)
    return EnvironmentHost("game", section)


def task(seed):
    return Task(f"game/{seed}", "game", seed)


async def test_an_episode_is_a_connection_and_ends_with_close():
    async with serving() as (server, url):
        game = host(url, observation="text", instructions="Count down.")
        episode = await game.start(task(3))
        assert episode.messages[0].content == "Count down.\n\n3 left"
        steps = [await game.step(episode, Reply("down")) for _ in range(3)]
        assert [(step.reward, step.done) for step in steps] == [(0.0, False), (0.0, False), (1.0, True)]
        await game.close(episode)
        assert server.closed_well == 1
        assert server.received[0] == {"type": "reset", "data": {"seed": 3}}


async def test_many_episodes_at_once_have_their_own_state():
    async with serving() as (server, url):
        game = host(url)

        async def play(seed):
            episode = await game.start(task(seed))
            for _ in range(seed):
                step = await game.step(episode, Reply(" down "))
            assert step.done
            await game.close(episode)

        async with anyio.create_task_group() as group:
            for seed in range(1, 40):
                group.start_soon(play, seed)
        assert server.closed_well == 39


async def test_json_actions_are_filled_from_the_reply():
    async with serving() as (server, url):
        game = host(url, action={"message": "{json}", "kind": "move", "deep": {"said": ["<{reply}>", None]}})
        episode = await game.start(task(3))
        for said in ("hello", '{"n": ' + "[" * 300 + "]" * 300 + "}"):
            assert "Reply with a JSON object" in (await game.step(episode, Reply(said))).messages[0].content
        server.fault = _silent_observation
        await game.step(episode, Reply('I do {"n": [1]} now'))
        assert server.received[-1]["data"] == {
            "message": {"n": [1]}, "kind": "move", "deep": {"said": ['<I do {"n": [1]} now>', None]}
        }  # fmt: skip
        await game.close(episode)


async def _silent_observation(socket):
    await socket.send(json.dumps({"type": "observation", "data": {"observation": {}, "reward": 0, "done": False}}))


async def _error(socket):
    await socket.send(json.dumps({"type": "error", "data": {"message": "no such move", "code": "EXECUTION_ERROR"}}))


async def _garbage(socket):
    await socket.send("{")


async def _wrong_shape(socket):
    await socket.send(json.dumps({"type": "observation", "data": {"observation": 3}}))


async def _hang_up(socket):
    await socket.close()


async def _silence(socket):
    pass


async def _megabytes(socket):
    await socket.send(json.dumps({"type": "observation", "data": {"observation": {"x": "y" * 100_000}}}))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (_error, "no such move"),
        (_garbage, "OpenEnv protocol"),
        (_wrong_shape, "OpenEnv protocol"),
        (_hang_up, "Closed"),
        (_silence, "no answer within"),
        (_megabytes, "Closed"),
    ],
)
async def test_a_servers_fault_fails_the_episode_under_its_name_and_leaks_nothing(fault, says):
    async with serving() as (server, url):
        section = EnvironmentConfig(
            name="openenv",
            options={"urls": [url], "message_bytes_max": 50_000},
            step_seconds_max=1.0 if fault is _silence else 60.0,
        )
        game = EnvironmentHost("game", section)
        episode = await game.start(task(3))
        server.fault = fault
        with pytest.raises(PlugInError, match=says) as failed:
            await game.step(episode, Reply("down"))
        assert failed.value.boundary == "environment step"
        await game.close(episode)
        with anyio.fail_after(60):
            while server.open:
                await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("scheme", ["ws", "http"])
async def test_the_name_of_a_host_is_not_changed(scheme, monkeypatch):
    game, asked = host(f"{scheme}://http-games:8000/"), []

    async def connect(url, **_):
        asked.append(url)
        raise ConnectionRefusedError

    monkeypatch.setattr(game.environment, "_connect", connect)
    with pytest.raises(PlugInError):
        await game.start(task(1))
    assert asked == ["ws://http-games:8000/ws"]


async def test_no_server_is_a_failure_that_says_so():
    game = host("http://127.0.0.1:9")
    with pytest.raises(PlugInError, match=r"[Cc]onnect"):
        await game.start(task(1))
