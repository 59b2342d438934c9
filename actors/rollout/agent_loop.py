"""The interface between an agent loop and the rollout that runs it.

The rollout (:mod:`actors.rollout.rollout`) owns engines, tokens, retries and the trajectory. An :class:`AgentLoop`
decides which messages the policy gets next: it is built once per environment section from the options of
``environments.<name>.loop``, and makes one :class:`AgentEpisode` per order, which owns all state of that rollout.

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

An episode that asks for completions in another order, or several at a time, overrides :meth:`AgentEpisode.run`.
The return values of a loop are checked, because it may be the user's.

In the loops ``multi_turn`` and ``single_turn`` only the environment answers the policy.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from actors.environments.base import Episode, Reply, Step
from actors.environments.host import EnvironmentHost
from actors.metrics import ActorMetrics
from actors.rendering.renderer import Renderer
from actors.rollout.recorder import Recorder
from actors.rollout.sampling import Policy
from actors.tools.parsing.base import ToolSchema
from pipeline.errors import PlugInError
from pipeline.runtime.plugin_limits import TaskOwner
from pipeline.schema import ROLES, Message, Task, TrajectoryStatus
from pipeline.schema.trajectory import finite_number


class Limit(StrEnum):
    """The limit that ended an episode."""

    TURNS = "max_turns"
    TOKENS = "max_tokens"
    CONTEXT = "model.max_length"
    SECONDS = "max_seconds"
    ASSISTANT_TURNS = "loop.options.max_assistant_turns"
    USER_TURNS = "loop.options.max_user_turns"


@dataclass(slots=True)
class Budget:
    """``tokens_max`` counts every stored token (context and sampled); ``context_max`` what the engine sees at once."""

    turns_max: int
    tokens_max: int
    context_max: int
    turn_tokens_max: int
    turns: int = 0
    tokens: int = 0

    def room(self, prompt_tokens: int, added_tokens: int) -> int | Limit:
        """Tokens that the next turn may sample after a prompt of ``prompt_tokens``, ``added_tokens`` of them new; or
        the limit that leaves no room for a single one."""
        if self.turns >= self.turns_max:
            return Limit.TURNS
        if prompt_tokens >= self.context_max:
            return Limit.CONTEXT
        left = self.tokens_max - self.tokens - added_tokens
        if left < 1:
            return Limit.TOKENS
        return min(self.turn_tokens_max, self.context_max - prompt_tokens, left)

    def spend(self, added_tokens: int, sampled_tokens: int) -> None:
        """One turn was sampled."""
        self.turns += 1
        self.tokens += added_tokens + sampled_tokens

    def give_back(self, tokens: int, *, turn: bool = False) -> None:
        """Less was used than was spent; with ``turn`` the turn was not sampled at all."""
        self.turns -= turn
        self.tokens -= tokens


class Game:
    """The environment's side of one rollout. ``key`` names this rollout; no two at once have the same."""

    def __init__(
        self, key: str, task: Task, host: EnvironmentHost, episode: Episode, metrics: ActorMetrics, started: TaskOwner
    ) -> None:
        """``started`` owns the tasks that the environment starts."""
        self.key, self.task, self.episode = key, task, episode
        self._host, self._metrics, self._started = host, metrics, started

    async def step(self, reply: Reply) -> Step:
        """The environment's answer, timed and checked. Raises :class:`PlugInError`."""
        started = time.perf_counter()
        with self._started.owning():
            step = await self._host.step(self.episode, reply)
        seconds = time.perf_counter() - started
        self._metrics.env_step_duration_seconds.labels(env=self._host.section).observe(seconds)
        return step

    async def close(self) -> None:
        """Close the environment's episode. Not for the loop: the rollout does it."""
        with self._started.owning():
            await self._host.close(self.episode)


@dataclass(frozen=True, slots=True)
class Opening:
    """Start of the conversation."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] = ()
    """Tools of the policy, for the chat template."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a reply. Without ``done`` and ``limit`` the policy continues after ``messages``."""

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    """Finished: COMPLETE."""
    limit: Limit | None = None
    """A limit of the loop was reached: TRUNCATED."""
    signals: Mapping[str, float] = field(default_factory=dict)
    parsed_reply: Message | None = None
    """The reply with its tool calls apart (``extra["tool_calls"]``), for templates that cannot render the reply as it
    was sampled."""

    @classmethod
    def of(cls, step: Step) -> Answer:
        """The environment's step and nothing else."""
        return cls(step.messages, step.reward, step.done, None, step.signals)


class Dialogue(Protocol):
    """The policy's side of one rollout, turn by turn."""

    @property
    def policy(self) -> Policy: ...

    @property
    def recorder(self) -> Recorder: ...

    async def begin(self, opening: Opening) -> Reply:
        """The first reply. Raises :class:`EpisodeLimit` and :class:`EngineError`."""
        ...

    def judge(self, answer: Answer) -> None:
        """Record the reward and the signals of ``answer`` for the last reply."""
        ...

    async def go_on(self, answer: Answer, rewrite: Callable[[Sequence[Message], int], Sequence[Message]]) -> Reply:
        """The reply to ``answer``. ``rewrite``: :meth:`AgentEpisode.rewrite`. Raises like :meth:`begin`."""
        ...


class AgentEpisode:
    """The agent's side of one rollout. Its methods are called one at a time."""

    def __init__(self, game: Game) -> None:
        self.game = game

    async def run(self, dialogue: Dialogue) -> TrajectoryStatus:
        """The whole rollout, turn by turn: COMPLETE, or TRUNCATED. Raises :class:`EpisodeLimit` at a limit.

        An episode that overrides it records its own turns in ``dialogue.recorder``."""
        reply = await dialogue.begin(checked_opening(await self.start()))
        while True:
            answer = checked_answer(await self.answer(reply))
            dialogue.judge(answer)
            if answer.done:
                return TrajectoryStatus.COMPLETE
            reply = await dialogue.go_on(answer, self.rewrite)

    async def start(self) -> Opening:
        """The first prompt; the environment's messages unless a loop adds to them."""
        return Opening(self.game.episode.messages)

    async def answer(self, reply: Reply) -> Answer:
        """Answer one reply of the policy. Every episode has it, unless it overrides :meth:`run`."""
        raise NotImplementedError(f"{type(self).__qualname__}.answer")

    def rewrite(self, messages: Sequence[Message], prompt_tokens: int) -> Sequence[Message]:
        """The history to continue with, before each further turn. ``messages`` is all of it, ``prompt_tokens`` what it
        would take. Anything but the same messages forks a branch: the old one is trained as it was sampled, the new one
        begins with the rewritten history as context. Must depend on its arguments alone."""
        return messages

    async def close(self) -> None:
        """Called exactly once, however the episode ended, before the environment's episode is closed."""


class AgentLoop(ABC):
    """Makes the agent episodes of one environment section."""

    @abstractmethod
    def begin(self, game: Game) -> AgentEpisode:
        """The agent's side of one rollout."""

    def bind(self, host: EnvironmentHost, renderer: Renderer, metrics: ActorMetrics) -> None:  # noqa: B027 - optional
        """Called once after construction, with what the section's episodes need. May raise
        :class:`ConfigurationError`."""

    async def serve(self) -> None:  # noqa: B027 - optional
        """Runs beside the episodes for as long as the actor lives, for what has to stay connected."""

    async def close(self) -> None:  # noqa: B027 - optional
        """The actor stops."""


AGENT_LOOP = "agent loop"


def checked_opening(opening: Any) -> Opening:
    """A checked copy with messages that the plug-in cannot change any more. Raises :class:`PlugInError`."""
    if not isinstance(opening, Opening):
        raise wrong("start() to return an Opening", opening)
    if not opening.messages or not _are_messages(opening.messages):
        raise wrong("Opening.messages to be Messages, at least one", opening.messages)
    messages = tuple(replace(message, extra=dict(message.extra)) for message in opening.messages)
    return replace(opening, messages=messages, tools=tuple(opening.tools))


def checked_answer(answer: Any) -> Answer:
    """Raises :class:`PlugInError`."""
    if not isinstance(answer, Answer):
        raise wrong("answer() to return an Answer", answer)
    if not _are_messages(answer.messages):
        raise wrong("Answer.messages to be Messages", answer.messages)
    if not answer.messages and not answer.done and answer.limit is None:
        raise wrong("Answer.messages to say something unless the episode ends", answer.messages)
    if not isinstance(answer.signals, Mapping):
        raise wrong("Answer.signals to be a mapping of names to numbers", answer.signals)
    signals = {name: _number(name, value) for name, value in answer.signals.items()}
    return replace(answer, reward=_number("reward", answer.reward), signals=signals)


def checked_history(messages: Any) -> tuple[Message, ...]:
    """Raises :class:`PlugInError`."""
    if not isinstance(messages, list | tuple) or not messages or not _are_messages(messages):
        raise wrong("rewrite() to return Messages, at least one", messages)
    return tuple(messages)


def _number(name: str, value: Any) -> float:
    number = finite_number(value)
    if number is None:
        raise wrong(f"Answer's {name} to be a finite number", value)
    return number


def _are_messages(messages: Any) -> bool:
    return isinstance(messages, list | tuple) and all(
        isinstance(m, Message) and isinstance(m.role, str) and m.role in ROLES and isinstance(m.content, str)
        for m in messages
    )


def wrong(expected: str, came: Any) -> PlugInError:
    """The error for a wrong value from a loop."""
    return PlugInError(AGENT_LOOP, "WrongValue", f"expected {expected}, got {repr(came)[:200]}")


class MultiTurn(AgentLoop):
    """The environment answers every reply until it is done."""

    def begin(self, game: Game) -> AgentEpisode:
        return _MultiTurnEpisode(game)


class SingleTurn(AgentLoop):
    """The episode is complete after one reply, whatever the environment would answer next."""

    def begin(self, game: Game) -> AgentEpisode:
        return _SingleTurnEpisode(game)


class _MultiTurnEpisode(AgentEpisode):
    async def answer(self, reply: Reply) -> Answer:
        return Answer.of(await self.game.step(reply))


class _SingleTurnEpisode(_MultiTurnEpisode):
    async def answer(self, reply: Reply) -> Answer:
        return replace(await super().answer(reply), messages=(), done=True)
