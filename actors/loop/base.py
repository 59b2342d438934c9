"""The interface between an agent loop and the rollout that runs it.

The rollout (:mod:`actors.loop.rollout`) owns engines, limits, tokens, retries and the trajectory. An :class:`AgentLoop`
decides what is said next: it is built once per environment section from the options of ``environments.<name>.loop``,
and makes one :class:`AgentEpisode` per order, which owns all state of that play.

A complete loop that asks the policy to check itself once before the environment judges::

    class Reconsider(AgentLoop):
        def begin(self, game: Game) -> AgentEpisode:
            return ReconsiderEpisode(game)

    class ReconsiderEpisode(AgentEpisode):
        asked = False

        async def answer(self, reply: Reply) -> Answer:
            if not self.asked:
                self.asked = True
                return Answer((Message("user", "Are you sure? Answer again."),))
            return Answer.of(await self.game.step(reply))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from actors.environments.base import Episode, Reply, Step
from actors.environments.host import EnvironmentHost
from actors.loop.driven import DrivenEpisode
from actors.loop.limits import Limit
from actors.rendering import Renderer
from pipeline.metrics.actor import ActorMetrics
from pipeline.schema import Message, Task

ToolSchema = Mapping[str, Any]
"""``{"type": "function", "function": {"name", "description", "parameters"}}``, as chat templates take it."""


class Game(Protocol):
    """The environment's side of one play, as an agent loop sees it."""

    @property
    def key(self) -> str:
        """Names this play; no two at once have the same."""
        ...

    @property
    def task(self) -> Task: ...

    @property
    def episode(self) -> Episode: ...

    async def step(self, reply: Reply) -> Step:
        """The environment's answer, timed and checked. Raises :class:`PlugInError`."""
        ...


@dataclass(frozen=True, slots=True)
class Opening:
    """How the conversation starts."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    """What the policy may call, for the chat template."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What follows a reply. Without ``done`` and ``limit`` the policy goes on after ``messages``."""

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    """Finished: COMPLETE."""
    limit: Limit | None = None
    """A limit of the loop was reached: TRUNCATED."""
    signals: Mapping[str, float] = field(default_factory=dict)
    said: Message | None = None
    """The reply with its tool calls apart (``extra["tool_calls"]``), for templates that cannot render the reply as it
    was sampled."""

    @classmethod
    def of(cls, step: Step) -> Answer:
        """The environment's step and nothing else."""
        return cls(step.messages, step.reward, step.done, None, step.signals)


class AgentEpisode(ABC):
    """One play. Its methods are called one at a time."""

    def __init__(self, game: Game) -> None:
        self.game = game

    async def start(self) -> Opening:
        """The first prompt; the environment's messages unless a loop adds to them."""
        return Opening(self.game.episode.messages)

    @abstractmethod
    async def answer(self, reply: Reply) -> Answer:
        """Answer one reply of the policy."""

    def rewrite(self, messages: Sequence[Message], prompt_tokens: int) -> Sequence[Message]:
        """The history to go on with, before each further turn. ``messages`` is all of it, ``prompt_tokens`` what it
        would take. Anything but the same messages forks a branch: the old one is trained as it was played, the new one
        begins with the rewritten history as context. Must depend on its arguments alone."""
        return messages

    async def close(self) -> None:  # noqa: B027 - optional
        """Called exactly once, however the episode ended, before the environment's episode is closed."""


class AgentLoop(ABC):
    """How the episodes of one environment section are played."""

    @abstractmethod
    def begin(self, game: Game) -> AgentEpisode | DrivenEpisode:
        """The agent's side of one play."""

    def bind(self, host: EnvironmentHost, renderer: Renderer, metrics: ActorMetrics) -> None:  # noqa: B027 - optional
        """Called once after construction, with what the section's episodes are played with. May raise
        :class:`ConfigurationError`."""

    async def serve(self) -> None:  # noqa: B027 - optional
        """Runs beside the episodes for as long as the actor lives, for what has to be kept connected."""

    async def close(self) -> None:  # noqa: B027 - optional
        """The actor stops."""
