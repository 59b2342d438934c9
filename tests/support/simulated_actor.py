"""The real actor process over the links and engines of a simulation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

from actors.engine.pool import EnginePool
from actors.engine.router import Lease, MoveReason, Router
from actors.environments.base import Environment, Episode, Reply, Step
from actors.process import role
from actors.process.actor import Actor
from actors.rendering.renderer import Renderer
from pipeline.runtime.witness import WitnessFile
from pipeline.schema import Message, Task
from pipeline.transport.link import Link
from tests.support.routing import engine_of
from tests.support.simulated_engine import FIRST_TOKEN, PROCESS
from tests.support.word_tokenizer import SPECIAL, word_tokenizer

WEIGHTS_MAX = 1000
_RENDERERS: list[Renderer] = []


class Turns(Environment):
    """Ends after one reply or two. Every other rollout succeeds."""

    def __init__(self) -> None:
        self._episodes = 0

    def start(self, task: Task) -> Episode:
        self._episodes += 1
        return _Turns(1 + task.seed % 2, float(self._episodes % 2))


class _Turns(Episode):
    def __init__(self, turns: int, reward: float) -> None:
        self.messages = (Message("user", "w0"),)
        self.left, self.reward = turns, reward

    def step(self, reply: Reply) -> Step:
        self.left -= 1
        if self.left:
            return Step((Message("user", "w1"),))
        return Step(reward=self.reward, done=True)


class MemoryWitness(WitnessFile):
    """Lines of all actors of a run."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, what: str, **facts: Any) -> None:
        self.lines.append({"what": what, **facts})


class SimulatedActors:
    """State of the actor processes of a run, by name."""

    def __init__(self, rng: random.Random, on_death: Callable[[str, str], None]) -> None:
        """``on_death``: called with actor and engine where the actor moves a conversation because the engine died."""
        self.pools: dict[str, EnginePool] = {}
        self.actors: dict[str, Actor] = {}
        self.witness = MemoryWitness()
        self._rng = rng
        self._on_death = on_death

    @contextmanager
    def over(self, link: Callable[[str], Link]) -> Iterator[None]:
        """Inside, :func:`actors.process.role.main` connects by ``link`` and is seen here."""
        acquire = Router.acquire

        def actor(*arguments: Any, **more: Any) -> Actor:
            made = self.actors[PROCESS.get()] = Actor(*arguments, **{**more, "witness": self.witness})
            return made

        def pool(*arguments: Any, **more: Any) -> EnginePool:
            made = EnginePool(*arguments, **more, jitter=random.Random(self._rng.random()))
            self.pools[PROCESS.get()] = made
            return made

        def acquired(router: Router, session: str, *arguments: Any) -> Lease | None:
            before = engine_of(router, session)
            lease = acquire(router, session, *arguments)
            if lease is not None and lease.move is MoveReason.DIED and before is not None:
                self._on_death(PROCESS.get(), before)
            return lease

        with ExitStack() as stack:
            for target, name, value in (
                (role, "open_link", lambda config, name: link(name)),
                (role, "renderer_of", lambda config, folder: _renderer()),
                (role, "EnginePool", pool),
                (role, "Actor", actor),
                (role, "gc_policy", nullcontext),
                (role, "interrupting_blocks", nullcontext),
                (Router, "acquire", acquired),
            ):
                stack.enter_context(mock.patch.object(target, name, value))
            yield


def _renderer() -> Renderer:
    """Each weight of an engine is a word."""
    if not _RENDERERS:
        words = [f"w{number}" for number in range(FIRST_TOKEN - len(SPECIAL) + WEIGHTS_MAX)]
        renderer = Renderer(word_tokenizer(words=words))
        # the template in Python, which takes a tenth of the time
        renderer._template._render = _rendered  # type: ignore[method-assign, assignment]
        _RENDERERS.append(renderer)
    return _RENDERERS[0]


def _rendered(messages: list[dict[str, Any]], tools: object = None, closed: bool = False) -> str:
    text = "".join(f"<|{message['role']}|>{message['content']}<|end|>" for message in messages)
    return text if closed else f"{text}<|assistant|>"
