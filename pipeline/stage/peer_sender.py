"""Sends messages to peers, with a queue and a task for each, so that a slow peer does not delay the others.

*consumes* effects whose rows are durable; *produces* sends on the hub; *waits for* that one peer's queue. Queues are
bounded by the protocol: orders by an actor's slots, groups by the learner's credits. Payloads are read when their turn
comes.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from itertools import islice

import anyio
import anyio.abc

from pipeline.errors import LimitExceeded, PeerGone
from pipeline.runtime.disk_wait import when_room
from pipeline.store.journal import Send
from pipeline.store.payload_refs import PayloadCache
from pipeline.store.store import ReplayStore
from pipeline.transport.hub import Hub
from pipeline.transport.messages import Frames, Kind, WireMessage

log = logging.getLogger("afterplay.replay")

READ_AHEAD = 16


class PeerSender:
    """A peer that is not welcome (down, or its HELLO not answered yet) gets nothing: that would be of an old
    connection.
    """

    def __init__(self, hub: Hub, store: ReplayStore, cache: PayloadCache, group: anyio.abc.TaskGroup) -> None:
        self._hub = hub
        self._store = store
        self._cache = cache
        self._group = group
        self._queues: dict[str, deque[Send]] = {}
        self._wake: dict[str, anyio.Event] = {}
        self._welcome: set[str] = set()
        self._idle = anyio.Event()

    def shut(self, peer: str) -> None:
        """The peer's connection is new or gone: forget what was meant for the old one."""
        self._welcome.discard(peer)
        if peer in self._queues:
            self._queues[peer].clear()

    def post(self, effect: Send) -> None:
        """Queue without waiting."""
        peer = effect.peer
        if peer not in self._queues:
            self._queues[peer], self._wake[peer] = deque(), anyio.Event()
            self._group.start_soon(self._run, peer, name=f"to {peer}")
        if effect.kind is Kind.WELCOME:
            self._welcome.add(peer)
        elif peer not in self._welcome and effect.kind is not Kind.REFUSED:
            return
        self._queues[peer].append(effect)
        self._wake[peer].set()

    async def drain(self) -> None:
        """Wait until everything queued was handed to the hub."""
        while any(self._queues.values()):
            self._idle = anyio.Event()
            await self._idle.wait()

    async def _run(self, peer: str) -> None:
        queue = self._queues[peer]
        ahead: dict[int, Frames] = {}
        while True:
            if not queue:
                self._idle.set()
                self._wake[peer] = anyio.Event()
                await self._wake[peer].wait()
            while queue:
                effect = queue[0]
                frames = await self._payload(effect, queue, ahead)
                if not queue or queue[0] is not effect:
                    continue
                try:
                    if frames is not None:
                        await self._hub.send(peer, WireMessage(effect.kind, effect.header, frames))
                except PeerGone as error:
                    log.info("%s: %s", peer, error)
                    self.shut(peer)
                except LimitExceeded as error:
                    log.error("%s to %s cannot be sent: %s", effect.kind.value, peer, error)
                if queue and queue[0] is effect:
                    queue.popleft()

    async def _payload(self, effect: Send, queue: deque[Send], ahead: dict[int, Frames]) -> Frames | None:
        """Frames that go with ``effect``, read together with the next ones'; None when they were forgotten."""
        row_id = effect.payload
        if row_id is None:
            return ()
        found = self._cache.get(row_id) or ahead.pop(row_id, None)
        if found is None:
            ahead.clear()
            wanted = [
                e.payload
                for e in islice(queue, READ_AHEAD)
                if e.payload is not None and self._cache.get(e.payload) is None
            ]
            ahead.update(await when_room(partial(self._store.payloads, wanted), self._store.path, "a delivery"))
            found = ahead.pop(row_id, None)
        return found
