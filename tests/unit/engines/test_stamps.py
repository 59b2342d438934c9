"""Requests come on the event loop while the control thread stamps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from actors.embedded.generator import Generator
from actors.embedded.requests import EngineRequest, VersionRecord


class _Batching:
    """Samples nothing."""

    def __init__(self, counted: Callable[[], None]) -> None:
        self.unread: set[str] = set()
        self.frozen, self.is_running = nullcontext, lambda: True
        self.submit = self.cancel_request = lambda request: None
        self._counted = counted

    def sampled_counts(self) -> dict[str, int]:
        counts = dict.fromkeys(self.unread, 0)
        self._counted()
        return counts


@pytest.mark.parametrize("moment", ["before it is submitted", "behind the count"])
async def test_a_request_that_begins_beside_a_stamp_has_the_new_version(moment: str) -> None:
    loop = asyncio.get_running_loop()
    generator: Any = object.__new__(Generator)
    begun = asyncio.Event()
    tasks: list[asyncio.Task[Any]] = []

    async def begin() -> None:
        request = EngineRequest("a", [1], 4, 1.0, frozenset(), False, True)
        tasks.append(asyncio.create_task(generator.generate(request)))
        await begun.wait()

    class Record(VersionRecord):
        def begin(self, request_id: str) -> None:
            super().begin(request_id)
            begun.set()
            if moment == "before it is submitted":
                thread = threading.Thread(target=lambda: asyncio.run(generator.stamp("7")))
                thread.start()
                thread.join()

    def counted() -> None:
        if moment == "behind the count":
            asyncio.run_coroutine_threadsafe(begin(), loop).result()

    generator._stopping, generator._waiting, generator._streams = False, {}, {}
    generator.options, generator.finished = SimpleNamespace(queue_max=4), {"abort": 0}
    generator._batching, generator.versions = _Batching(counted), Record()
    with ThreadPoolExecutor(1) as generator._control:
        await (begin() if moment == "before it is submitted" else generator.stamp("7"))
        assert generator.versions.finish("a", 3) == [{"version": "7", "start": 0, "end": 3}]
        tasks[0].cancel()
        await asyncio.wait(tasks)
