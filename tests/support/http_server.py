"""An HTTP server on a free loopback port, in the event loop of a test or in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TypeVar

from aiohttp import web

T = TypeVar("T")
BODY_BYTES_MAX = 10_000_000


@asynccontextmanager
async def serving(
    answer: web.Application | Callable[[web.Request], Awaitable[web.StreamResponse]], port: int = 0
) -> AsyncIterator[str]:
    """Base URL of a server: an application, or one that answers every request by ``answer``."""
    app = answer if isinstance(answer, web.Application) else web.Application(client_max_size=BODY_BYTES_MAX)
    if app is not answer:
        app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextmanager
def in_thread(serving: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """Enters an async context manager in the event loop of another thread, for tests that block their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        entered = asyncio.run_coroutine_threadsafe(serving.__aenter__(), loop).result(20)
        try:
            yield entered
        finally:
            asyncio.run_coroutine_threadsafe(serving.__aexit__(None, None, None), loop).result(20)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
