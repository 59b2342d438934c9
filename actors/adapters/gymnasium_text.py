"""``gymnasium``: any registered Gymnasium environment, with functions that put observations into words and replies into
actions.

::

    environments:
      lake:
        name: gymnasium
        options:
          id: FrozenLake-v1
          describe: lake.py:describe        # describe(observation, env) -> str
          actions: [left, down, right, up]  # words of the actions 0, 1, 2, 3
          instructions: "Cross the frozen lake from S to G."
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from actors.adapters.catalogue import held_out, package, takes_long, undone_on_error
from actors.environments.base import STRICT_OPTIONS, Environment, Episode, Reply, Step
from pipeline.errors import ConfigurationError
from pipeline.runtime.plugins import attribute
from pipeline.schema import Message, Task


@dataclass(config=STRICT_OPTIONS)
class Gymnasium(Environment):
    """Any Gymnasium environment, with your description of observations and your names of actions."""

    splits = held_out(10**9)

    id: str = "FrozenLake-v1"
    """A registered id; ``module:id`` imports the module that registers it first."""
    describe: str | None = None
    """Import path of ``describe(observation, env) -> str`` (``module:function`` or ``path/file.py:function``; ``env``
    is the unwrapped environment). None: the observation as Python prints it."""
    actions: tuple[str, ...] = ()
    """Words of the actions of a discrete action space, from its first (mostly 0) on. The last of them in a reply is the
    action."""
    parse: str | None = None
    """Import path of ``parse(reply, env) -> action`` for any other action space; None from it: not understood."""
    instructions: str = ""
    """Text before the first observation. Empty: what the actions are."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of ``gymnasium.make``."""
    unknown_ends: bool = False
    """A reply that is no action ends the episode. Otherwise the policy gets a message, the world stands still, and the
    turn counts."""

    def __post_init__(self) -> None:
        gymnasium = package("gymnasium")
        self._make: Callable[..., Any] = gymnasium.make
        self._describe = _function(self.describe, "describe") if self.describe else lambda seen, _: str(seen)
        self._parse = _function(self.parse, "parse") if self.parse else None
        try:
            env = self._make(self.id, disable_env_checker=True, **self.options)
        except Exception as error:
            raise ValueError(f"gymnasium.make({self.id!r}) raised {type(error).__name__}: {error}") from error
        space = env.action_space
        env.close()
        discrete = isinstance(space, gymnasium.spaces.Discrete)
        words = {word.lower() for word in self.actions}
        if self._parse is None and not (discrete and len(self.actions) == len(words) == int(space.n)):
            raise ValueError(
                f"expected a different word for each action of {space}, or a parse function; got actions={self.actions}"
            )
        self._first = int(space.start) if discrete else 0
        self.blocking = takes_long(lambda: self.start(Task("gymnasium/1", "gymnasium", 1)).close())

    def start(self, task: Task) -> GymnasiumEpisode:
        env = self._make(self.id, disable_env_checker=True, **self.options)
        with undone_on_error(env.close):
            return GymnasiumEpisode(self, env, task.seed % 2**31)


class GymnasiumEpisode(Episode):
    def __init__(self, options: Gymnasium, env: Any, seed: int) -> None:
        self._options, self._env = options, env
        observation, _ = env.reset(seed=seed)
        env.action_space.seed(seed)
        words = f"Each turn, reply with one action: {', '.join(options.actions)}." if options.actions else ""
        text = options._describe(observation, env.unwrapped)
        self.messages = (Message("user", "\n\n".join(filter(None, (options.instructions or words, text)))),)

    def step(self, reply: Reply) -> Step:
        action = self._action(reply)
        if action is None:
            hint = f" Reply with one of: {', '.join(self._options.actions)}." if self._options.actions else ""
            return Step(
                (Message("user", f"That is not an action.{hint}"),),
                0.0,
                self._options.unknown_ends,
                {"unknown_action": 1.0},
            )
        observation, reward, terminated, truncated, _ = self._env.step(action)
        done = bool(terminated or truncated)
        text = "" if done else self._options._describe(observation, self._env.unwrapped)
        return Step(() if done else (Message("user", text),), float(reward), done, {"unknown_action": 0.0})

    def _action(self, reply: Reply) -> Any:
        if self._options._parse is not None:
            return self._options._parse(str(reply), self._env.unwrapped)
        ends = {action: _last(action, reply) for action in self._options.actions}
        word = max(ends, key=lambda action: (ends[action], len(action)))  # "pick up" is not "up"
        return self._options._first + self._options.actions.index(word) if ends[word] >= 0 else None

    def close(self) -> None:
        self._env.close()


def _last(word: str, reply: str) -> int:
    """End of the last occurrence of a word in a reply, -1 if it has none."""
    found = [match.end() for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", reply[-2000:], re.IGNORECASE)]
    return found[-1] if found else -1


def _function(path: str, option: str) -> Callable[..., Any]:
    try:
        function = attribute(path, option)
    except ConfigurationError as error:
        raise ValueError(str(error)) from error
    if not callable(function):
        raise ValueError(f"{option}: expected {path} to be a function, got {function!r}")
    return function  # type: ignore[no-any-return]
