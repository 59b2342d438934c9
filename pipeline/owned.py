"""Whose code is running: what a plug-in's code started and left behind is cancelled, and what blocks is told apart.

A context variable says whose code is running; it is inherited by whatever that code starts. The event loop's task
factory (installed once, for a few hundred nanoseconds a task) notes new tasks with their owner."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_OWNER: ContextVar[StartedTasks | None] = ContextVar("afterplay_owner_of_tasks", default=None)


@contextmanager
def kept_running() -> Iterator[None]:
    """What is started inside belongs to nobody and is not ended with an episode or a call: for a connection or a
    browser that a plug-in opens once, when it is first needed."""
    token = _OWNER.set(None)
    try:
        yield
    finally:
        _OWNER.reset(token)


def plug_in_runs() -> bool:
    """Whether the code of an environment, loop, tool or score function is running in this context."""
    return _OWNER.get() is not None


class StartedTasks:
    """The tasks of one owner that have not ended."""

    def __init__(self) -> None:
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] | None = None

    @contextmanager
    def owning(self) -> Iterator[None]:
        """What is started inside belongs to this owner."""
        token = _OWNER.set(self)
        try:
            yield
        finally:
            _OWNER.reset(token)

    def add(self, task: asyncio.Task[Any]) -> None:
        if self._tasks is None:
            self._tasks = weakref.WeakSet()
        self._tasks.add(task)

    def cancel(self) -> int:
        """Cancel what is still running; how many that were."""
        running = [task for task in self._tasks or () if not task.done()]
        for task in running:
            task.cancel("what started this task has ended")
        return len(running)


def watch_tasks() -> None:
    """Note from now on who starts tasks on the running event loop. May be called again."""
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    if getattr(before, "afterplay_notes_owners", False):
        return

    def start(
        loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any
    ) -> asyncio.Task[Any]:
        if before is None:
            task: Any = asyncio.Task(coroutine, loop=loop, **options)
        else:
            task = before(loop, coroutine, **options)
        owner = _OWNER.get()
        if owner is not None and isinstance(task, asyncio.Task):
            owner.add(task)
        return task  # type: ignore[no-any-return]

    start.afterplay_notes_owners = True  # type: ignore[attr-defined]
    loop.set_task_factory(start)
