"""What hub and link share: the task group that owns their tasks, and an orderly end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import anyio
from anyio.abc import TaskGroup


class Endpoint:
    """An async context manager whose tasks live exactly as long as the ``async with`` block.

    An exception of the block leaves unchanged (not wrapped in a group); a crash of one of our tasks cancels the block
    and leaves as an exception group.
    """

    def __init__(self) -> None:
        self._group: TaskGroup | None = None

    async def _enter(self, *tasks: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        for task in tasks:
            self._group.start_soon(task)

    async def _leave(
        self, say_bye: Callable[[], Awaitable[None]], close: Callable[[], Awaitable[None]], *args: object
    ) -> None:
        """Part within a bounded time, end the tasks, close the wire."""
        group, self._group = self._group, None
        if group is None:
            return
        error = args[1] if len(args) > 1 else None
        crashed = isinstance(error, anyio.get_cancelled_exc_class()) and group.cancel_scope.cancel_called
        try:
            if not crashed:
                with anyio.CancelScope(shield=True):
                    await say_bye()
            group.cancel_scope.cancel()
            if isinstance(error, anyio.get_cancelled_exc_class()):
                await group.__aexit__(type(error), error, error.__traceback__)
            else:
                await group.__aexit__(None, None, None)
        finally:
            with anyio.CancelScope(shield=True):
                await close()
