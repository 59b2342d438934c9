"""Threads for environments that block.

anyio's worker threads are joined at exit, so one hung environment would keep the process alive for ever, and an
abandoned call gives its place back at once, so hung calls would pile up. Here threads are daemons, and a hung call
keeps its place."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class BlockingCalls:
    """At most ``threads_max`` calls at once, hung ones included; others wait their turn (and are cancelled cleanly)."""

    def __init__(self, threads_max: int) -> None:
        self._places = asyncio.Semaphore(threads_max)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call ``function`` in a thread of its own. Cancelling this leaves the call behind, still holding its place."""
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            self._places.release()
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)  # type: ignore[arg-type]

        def call() -> None:
            value: T | None = None
            failure: BaseException | None = None
            try:
                value = function(*args)
            except Exception as error:
                failure = RuntimeError("StopIteration escaped") if isinstance(error, StopIteration) else error
            except BaseException as error:
                failure = RuntimeError(f"{type(error).__name__} escaped: {error}")
            try:
                loop.call_soon_threadsafe(settle, value, failure)
            except RuntimeError:
                return  # the loop is closed: nobody waits for this any more

        try:
            threading.Thread(target=call, daemon=True, name="environment").start()
        except BaseException:
            self._places.release()
            raise
        return await future
