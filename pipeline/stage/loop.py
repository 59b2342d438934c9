"""The main loop: gather events, apply them, write one transaction, and only then send messages.

*consumes* events of the hub and verdicts of the scorer from one bounded inbox; *produces* transactions and then
messages; *waits for* an event or the next deadline; is slowed down by the disk: at most one transaction is written and
one waits. While the disk is full it stands still, nothing is acknowledged, and the peers wait.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice

import anyio
import anyio.abc
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from pipeline.errors import EnvironmentFailing, LimitExceeded, PeerGone
from pipeline.lessons.service import LessonService
from pipeline.runtime.disk import when_room
from pipeline.runtime.process import RoleContext
from pipeline.runtime.progress import RoleState
from pipeline.schema.record_file import Frames
from pipeline.stage.core import StageCore
from pipeline.stage.ingest import Scoring, Verdicts
from pipeline.stage.metrics import Observer
from pipeline.store.effects import Effect, Evaluated, Finished, GivenUp, Score, Send, UntrainedRollout
from pipeline.store.evaluation_results import write_results
from pipeline.store.journal import Changes
from pipeline.store.store import PayloadCache, ReplayStore
from pipeline.transport.hub import Hub
from pipeline.transport.messages import Event, EventKind, Kind, WireMessage

log = logging.getLogger(__name__)

READ_AHEAD = 16


class PeerSender:
    """Sends messages to peers, with a queue and a task for each, so that a slow peer does not delay the others.

    *consumes* effects whose rows are durable; *produces* sends on the hub; *waits for* that one peer's queue. Queues
    are bounded by the protocol: orders by an actor's slots, groups by the learner's credits, and of states of engines
    a newer one takes the place of the last. Payloads are read when their turn comes. A peer that is not welcome (down,
    or its HELLO not answered yet) gets nothing: that would be of an old connection.
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
        queue = self._queues[peer]
        if effect.kind is Kind.ENGINES and len(queue) > 1 and queue[-1].kind is Kind.ENGINES:
            queue.pop()  # the newer one says all; the first of the queue may be under way
        queue.append(effect)
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


COMMIT_BATCH_MAX = 256
"""Events committed in one transaction."""

IDLE_SECONDS_MAX = 5.0
"""Longest time between two iterations (heartbeat)."""

STANDSTILL_SECONDS = 1.0
"""A longer wait for the disk does not count in the time that orders have: their answers could not be received."""


Item = Event | Verdicts

Written = tuple[Changes, list[Effect], float]


class StageLoop:
    """One iteration is one round: events, :meth:`StageCore.plan`, one transaction, effects."""

    def __init__(
        self,
        ctx: RoleContext,
        core: StageCore,
        store: ReplayStore,
        outgoing: PeerSender,
        cache: PayloadCache,
        scoring: Scoring,
        observer: Observer,
        lessons: LessonService | None,
        keep_untrained: Callable[[list[UntrainedRollout]], None],
    ) -> None:
        """``keep_untrained`` gets the failed and evaluated rollouts of a round, in a worker thread."""
        self._ctx = ctx
        self._core = core
        self._store = store
        self._outgoing = outgoing
        self._cache = cache
        self._scoring = scoring
        self._observer = observer
        self._committed = observer.metrics.rpc_duration_seconds.labels(op="insert", result="ok")
        self._lessons = lessons
        self._keep_untrained = keep_untrained
        self._written_send: MemoryObjectSendStream[Written]
        self._written_receive: MemoryObjectReceiveStream[Written]
        self._written_send, self._written_receive = anyio.create_memory_object_stream(1)

    async def run(self, inbox: MemoryObjectReceiveStream[Item]) -> None:
        """Until the sending end of the inbox closes; what was applied is then written and answered. Raises
        :class:`EnvironmentFailing` where an environment never succeeds."""
        outcomes = self._core.groups.outcomes
        async with anyio.create_task_group() as group:
            group.start_soon(self._write)
            async with self._written_send:
                await self._apply_round([])
                while not outcomes.hopeless() and (items := await self._gather(inbox)) is not None:
                    await self._apply_round(items)
        if reason := outcomes.hopeless():
            raise EnvironmentFailing(reason)

    async def _gather(self, inbox: MemoryObjectReceiveStream[Item]) -> list[Item] | None:
        now = anyio.current_time()
        deadline = min(self._core.next_deadline() or float("inf"), now + IDLE_SECONDS_MAX)
        items: list[Item] = []
        try:
            with anyio.move_on_after(max(0.0, deadline - now)):
                items.append(await inbox.receive())
            while items and len(items) < COMMIT_BATCH_MAX:
                items.append(inbox.receive_nowait())
        except anyio.WouldBlock:
            pass
        except anyio.EndOfStream:
            return items or None
        return items

    async def _apply_round(self, items: list[Item]) -> None:
        core = self._core
        core.set_time(anyio.current_time(), time.time())
        for item in items:
            if isinstance(item, Event):
                self._apply(item)
            else:
                for record, verdict in item:
                    core.ingest.scored(record, verdict)
        core.plan()
        changes, effects = core.collect()
        self._observer.update(core)
        self._ctx.beat()
        self._report()
        if changes or effects:
            started = time.perf_counter()
            await self._written_send.send((changes, effects, started))
            if (seconds := time.perf_counter() - started) > STANDSTILL_SECONDS:
                core.leases.postpone(seconds)

    def _apply(self, event: Event) -> None:
        core = self._core
        match event.kind:
            case EventKind.PEER_UP:
                assert event.message is not None
                core.peer_up(event.peer, event.message.header)
            case EventKind.PEER_DOWN:
                core.peer_down(event.peer, left=event.message is not None)
            case EventKind.MESSAGE:
                assert event.message is not None
                core.message(event.peer, event.message)
            case EventKind.CORRUPT:
                core.corrupt(event.peer, event.reason)

    async def _write(self) -> None:
        async with self._written_receive:
            async for changes, effects, started in self._written_receive:
                for row_id, frames in changes.payloads.items():
                    self._cache.put(row_id, frames)
                if changes:
                    n_bytes = changes.n_bytes
                    await when_room(partial(self._store.commit, changes), self._store.path, "the replay store", n_bytes)
                    self._committed.observe(time.perf_counter() - started)
                self._cache.forget(changes.forgotten_payloads)
                if ended := [effect.result for effect in effects if isinstance(effect, Evaluated)]:
                    # before the learner hears of it, because it may read the file
                    write = partial(write_results, self._ctx.directory.evaluations_file, ended)
                    await when_room(write, self._ctx.directory.path, "the results of an evaluation")
                for effect in effects:
                    if isinstance(effect, Score):
                        self._scoring.put(effect)
                    elif isinstance(effect, GivenUp):
                        self._scoring.forget(effect.group)
                    elif isinstance(effect, Finished) and self._lessons is not None:
                        self._lessons.finished(effect)
                    elif isinstance(effect, Send):
                        self._outgoing.post(effect)
                if untrained := [effect for effect in effects if isinstance(effect, UntrainedRollout)]:
                    await anyio.to_thread.run_sync(self._keep_untrained, untrained)

    def _report(self) -> None:
        core, staleness = self._core, self._core.staleness
        if core.evaluations.active is not None and (core.finished or core.evaluations.only):
            state, waiting = RoleState.EVALUATING, core.evaluations.progress
        elif core.finished:
            state, waiting = RoleState.FINISHED, ""
            self._ctx.finished()
        elif core.policy_version < 0:
            state, waiting = RoleState.WAITING_FOR_WEIGHTS, "the first version of the learner"
        elif core.groups.backoff.holds(anyio.current_time()):
            state = RoleState.FAILING
            waiting = f"rollouts that succeed (the last failed in {' '.join(core.groups.backoff.reason.split())[:300]})"
        elif core.groups.paused:
            state, waiting = RoleState.WAITING_FOR_DISK, core.groups.paused
        elif not core.leases.connected:
            state, waiting = RoleState.WAITING_FOR_ACTORS, ""
        elif core.dispatch.peer is None:
            state, waiting = RoleState.WAITING_FOR_LEARNER, ""
        else:
            state, waiting = RoleState.SERVING, ""
        self._ctx.report(
            state,
            waiting,
            updates=staleness.consumed,
            policy_version=core.policy_version,
            orders_in_flight=core.leases.in_flight,
            groups_open=staleness.open,
            groups_ready=staleness.ready,
            actors=core.leases.connected,
            evaluation=core.evaluations.progress,
            failed=core.groups.outcomes.header(),
        )
