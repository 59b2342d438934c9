"""Asks the replay stage for lessons over the actor's own link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import anyio

from pipeline.errors import PeerGone, WireError
from pipeline.lessons.records import Lesson, decode_lessons
from pipeline.transport.base import Kind, Link, Message


class Search(Protocol):
    """Somewhere that lessons are found. May take for ever, and may raise anything: the caller has a limit."""

    async def search(self, order_id: str, query: str, top_k: int) -> list[Lesson]: ...


class StageRecall:
    """RECALL and LESSONS of one link. The actor tells it what came and when the connection was lost."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: dict[str, _Answer] = {}
        self._connected = False

    async def search(self, order_id: str, query: str, top_k: int) -> list[Lesson]:
        """Raises :class:`PeerGone` when the stage is not there, :class:`WireError` for an answer that is none. Whoever
        gives up cancels."""
        if not self._connected:
            raise PeerGone("the replay stage is not connected")
        answer = self._waiting[order_id] = _Answer()
        try:
            header = {"order_id": order_id, "query": query, "top_k": top_k}
            await self._link.send(Message(Kind.RECALL, header))
            await answer.came.wait()
        finally:
            if self._waiting.get(order_id) is answer:
                del self._waiting[order_id]
        if answer.header is None:
            raise PeerGone("the replay stage was lost before it answered")
        return decode_lessons(answer.header)

    def connected(self) -> None:
        self._connected = True

    def lost(self) -> None:
        """The connection is gone: nobody will answer."""
        self._connected = False
        for answer in self._waiting.values():
            answer.came.set()

    def answered(self, header: Mapping[str, Any]) -> None:
        """LESSONS came; too late for one who gave up."""
        order_id = header.get("order_id")
        if not isinstance(order_id, str):
            raise WireError(f"LESSONS header is not understood: expected order_id as text, got {order_id!r}")
        answer = self._waiting.get(order_id)
        if answer is not None:
            answer.header = header
            answer.came.set()


class _Answer:
    def __init__(self) -> None:
        self.came = anyio.Event()
        self.header: Mapping[str, Any] | None = None
