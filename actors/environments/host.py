"""Runs one environment section for the agent loop: sync or async, inline or in threads, with checks and time limits.

Errors, wrong results and timeouts of plug-in code become a :class:`PlugInError` with the
boundary ``environment start``, ``environment step`` or ``environment close``, and a message that names the section.

Blocking environments run in threads (:class:`BlockingCalls`). When too many of their calls hang, the actor drains and
is started again.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np

from actors.environments.base import Environment, Episode, Reply, Step
from actors.environments.plugins import build
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.errors import ConfigurationError, PlugInError, PlugInTimeout, boundary, explained
from pipeline.runtime.plugin_limits import BlockingCalls, kept_running
from pipeline.schema import ROLES, Message, Task
from pipeline.schema.trajectory import finite_number
from pipeline.tasks.splits import encode_splits

log = logging.getLogger(__name__)

START, STEP, CLOSE = "environment start", "environment step", "environment close"
INLINE_SECONDS_MAX = 0.05
"""A plain ``def`` that holds the loop for longer, ``INLINE_SLOW_MAX`` times, is worth a warning (once a section)."""
INLINE_SLOW_MAX = 5
CLOSE_SECONDS_MAX = 5.0
MESSAGE_CHARACTERS_MAX = 1_000_000
"""Text of one answer: what is longer would hold the actor's loop for seconds while it is tokenised."""


class EnvironmentHost:
    """One section of ``environments``, constructed once per actor. Raises :class:`ConfigurationError`."""

    def __init__(
        self,
        section: str,
        config: EnvironmentConfig,
        threads_max: int = 64,
        environment: Environment | None = None,
        hidden: tuple[Path, ...] = (),
    ) -> None:
        self.section = section
        self.config = config
        self.environment = environment if environment is not None else build(section, config)
        """The plug-in itself."""
        self.hidden = (*hidden, *getattr(self.environment, "hidden", ()))
        """Paths that its programs do not see: the run directory, whatever they may read, and the folder of all runs
        where it is not their own."""
        self.blocking = config.blocking or bool(getattr(self.environment, "blocking", False))
        """True if its plain functions run in threads."""
        self.threads = BlockingCalls(threads_max, config.step_seconds_max)
        """Threads of the section's blocking calls."""
        loop = getattr(self.environment, "loop", None)
        self.loop: str | None = loop if isinstance(loop, str) else None
        """The agent loop that the environment asks for."""
        self._slow = 0
        self._closing: set[asyncio.Future[None]] = set()

    def tools(self) -> tuple[Any, ...]:
        """Tools that the environment gives to all its episodes. Raises :class:`ConfigurationError`."""
        tools = getattr(self.environment, "tools", None)
        if not callable(tools):
            return ()
        with explained(f"environments.{self.section}: tools() raised"):
            return tuple(tools())

    def splits(self) -> dict[str, list[list[int]]]:
        """The environment's own splits, for the replay stage; none where its tasks are rows of data. Raises
        :class:`ConfigurationError`."""
        if self.config.tasks_from is not None:
            return {}
        with explained(f"environments.{self.section}: reading splits raised"):
            own = getattr(self.environment, "splits", None) or {}
        try:
            return encode_splits(own)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"environments.{self.section}: expected splits to map names to sequences of seeds, got {own!r:.200}: "
                f"{error}"
            ) from error

    async def start(self, task: Task) -> Episode:
        """A new episode of ``task`` whose messages have been checked. Raises :class:`PlugInError`."""
        task = replace(task, payload=copy.deepcopy(dict(task.payload))) if task.payload else task
        late = partial(self._close_late, asyncio.get_running_loop())
        episode = await self._call(START, self.environment.start, task, late=late)
        if not callable(getattr(episode, "step", None)):
            raise self._wrong(START, "start() to return an Episode (an object with messages and step)", episode)
        try:
            messages = self._messages(START, getattr(episode, "messages", None), "Episode.messages")
            if not messages:
                raise self._wrong(START, "Episode.messages to hold at least one message", messages)
            hint = getattr(episode, "hint", None)
            if hint is not None and not isinstance(hint, str):
                raise self._wrong(START, "Episode.hint to be text or None", hint)
            files = getattr(episode, "files", None)
            if files is not None and not are_files(files):
                raise self._wrong(START, "Episode.files to map relative paths to texts", files)
            episode.messages = messages
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.close(episode)
            raise
        return cast(Episode, episode)

    async def step(self, episode: Episode, reply: Reply) -> Step:
        """The checked answer of the environment. Raises :class:`PlugInError`."""
        step = await self._call(STEP, episode.step, reply)
        if not isinstance(step, Step):
            raise self._wrong(STEP, "step() to return a Step", step)
        messages = self._messages(STEP, step.messages, "Step.messages")
        if not isinstance(step.done, bool | np.bool_):
            raise self._wrong(STEP, "Step.done to be True or False", step.done)
        if not messages and not step.done:
            raise self._wrong(STEP, "Step.messages to say something unless the episode is done", messages)
        reward = self._number(step.reward, "Step.reward")
        if not isinstance(step.signals, Mapping):
            raise self._wrong(STEP, "Step.signals to be a mapping of names to numbers", step.signals)
        signals = {str(name): self._number(value, f"Step.signals[{name!r}]") for name, value in step.signals.items()}
        return Step(messages, reward, bool(step.done), signals)

    async def close(self, episode: Episode) -> None:
        """Free the episode. A failure here is logged: the rollout is over, and its result stands. A call that needs a
        thread is made when one is free, also where nobody waits for it any more."""
        close = getattr(episode, "close", None)
        if not callable(close):
            return
        if not self.blocking or inspect.iscoroutinefunction(close):
            await self._close(close)
            return
        with kept_running():
            closing = asyncio.ensure_future(self._close(close))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)

    async def _close(self, close: Callable[..., Any]) -> None:
        try:
            await self._call(CLOSE, close, seconds_max=CLOSE_SECONDS_MAX)
        except PlugInError as error:
            log.warning("environment %s: %s", self.section, error)

    def _close_late(self, loop: asyncio.AbstractEventLoop, episode: Any) -> None:
        """Close an episode that began after its rollout had given up. Runs in the thread of its start."""
        close = getattr(episode, "close", None)
        if inspect.iscoroutinefunction(close):
            asyncio.run_coroutine_threadsafe(self.close(episode), loop)
        elif callable(close):
            close()

    async def _call(
        self,
        where: str,
        function: Callable[..., Any],
        *args: Any,
        seconds_max: float | None = None,
        late: Callable[[Any], object] | None = None,
    ) -> Any:
        seconds_max = self.config.step_seconds_max if seconds_max is None else seconds_max
        in_thread = self.blocking and not inspect.iscoroutinefunction(function)
        with boundary(where):
            result = None if in_thread else self._timed(where, function, *args)
            if not in_thread and not inspect.isawaitable(result):
                return result
            with anyio.CancelScope() as scope:

                def begun() -> None:
                    scope.deadline = anyio.current_time() + seconds_max

                if in_thread:
                    result = await self.threads.run(function, *args, begun=begun, late=late)
                else:
                    begun()
                return await result if inspect.isawaitable(result) else result
            assert scope.cancelled_caught
        key = "" if where == CLOSE else f" (environments.{self.section}.step_seconds_max)"
        raise PlugInTimeout(
            where, "TimeoutError", f"environment {self.section}: no answer within {seconds_max:g} s{key}"
        )

    def _timed(self, where: str, function: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args)
        finally:
            seconds = time.perf_counter() - started
            self._slow += seconds > INLINE_SECONDS_MAX
            if seconds > INLINE_SECONDS_MAX and self._slow == INLINE_SLOW_MAX:
                log.warning(
                    "environment %s: %s held the event loop for %.0f ms; set environments.%s.blocking: true",
                    self.section, where, seconds * 1e3, self.section,
                )  # fmt: skip

    def _messages(self, where: str, messages: Any, what: str) -> tuple[Message, ...]:
        if not isinstance(messages, tuple | list) or not all(isinstance(m, Message) for m in messages):
            raise self._wrong(where, f"{what} to be a tuple of Message", messages)
        for message in messages:
            if not (isinstance(message.role, str) and isinstance(message.content, str)):
                raise self._wrong(where, f"{what} to have text as role and content", message)
            if message.role not in ROLES:
                raise self._wrong(where, f"{what} to have one of the roles {', '.join(sorted(ROLES))}", message.role)
        n_characters = sum(len(message.content) for message in messages)
        if n_characters > MESSAGE_CHARACTERS_MAX:
            raise self._wrong(
                where, f"{what} to have at most {MESSAGE_CHARACTERS_MAX} characters in all", f"{n_characters}"
            )
        return tuple(map(_valid, messages))

    def _number(self, value: Any, what: str) -> float:
        number = finite_number(value)
        if number is None:
            raise self._wrong(STEP, f"{what} to be a finite number", value)
        return number

    def _wrong(self, where: str, expected: str, came: Any) -> PlugInError:
        shown = repr(came)
        shown = shown if len(shown) <= 200 else shown[:200] + "…"
        return PlugInError(where, "WrongValue", f"environment {self.section}: expected {expected}, got {shown}")


def are_files(files: object) -> bool:
    """True for texts by relative path.

    >>> are_files({"src/a.py": "x = 1"}), are_files({"../a.py": ""}), are_files({"a.py": None})
    (True, False, False)
    """
    return isinstance(files, Mapping) and all(
        isinstance(path, str)
        and isinstance(text, str)
        and path
        and not path.startswith("/")
        and ".." not in path.split("/")
        for path, text in files.items()
    )


def _valid(message: Message) -> Message:
    """A copy that the environment cannot change any more, without what no tokenizer can take."""
    content = message.content
    if not content.isascii():
        content = content.encode("utf-8", "replace").decode()
    return replace(message, content=content, extra=dict(message.extra))
