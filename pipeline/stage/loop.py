"""The main loop: gather events, apply them, write one transaction, and only then send messages.

*consumes* events of the hub and verdicts of the scorer from one bounded inbox; *produces* transactions and then
messages; *waits for* an event or the next deadline; is slowed down by the disk: at most one transaction is written and
one waits. While the disk is full it stands still, nothing is acknowledged, and the peers wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from pipeline.errors import EnvironmentFailing
from pipeline.runtime.disk_wait import when_room
from pipeline.runtime.process import RoleContext
from pipeline.schema.state import RoleState
from pipeline.scorer.verdict import Verdict
from pipeline.stage.core import StageCore
from pipeline.stage.metrics import Observer
from pipeline.stage.peer_sender import PeerSender
from pipeline.stage.scoring import Scoring
from pipeline.store.journal import Changes, Effect, Evaluated, Finished, GivenUp, Score, Send, UntrainedRollout
from pipeline.store.payload_refs import PayloadCache
from pipeline.store.records import TrajectoryRecord
from pipeline.store.store import ReplayStore
from pipeline.transport.messages import Event, EventKind

COMMIT_BATCH_MAX = 256
"""Events committed in one transaction."""
IDLE_SECONDS_MAX = 5.0
"""Longest time between two iterations (heartbeat)."""
STANDSTILL_SECONDS = 1.0
"""A longer wait for the disk does not count in the time that orders have: their answers could not be received."""


@dataclass(slots=True)
class Scored:
    """Verdicts that are committed together."""

    verdicts: Sequence[tuple[TrajectoryRecord, Verdict]]


Item = Event | Scored
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
    ) -> None:
        self._ctx = ctx
        self._core = core
        self._store = store
        self._outgoing = outgoing
        self._cache = cache
        self._scoring = scoring
        self._observer = observer
        self._written_send: MemoryObjectSendStream[Written]
        self._written_receive: MemoryObjectReceiveStream[Written]
        self._written_send, self._written_receive = anyio.create_memory_object_stream(1)
        self.on_commit: Callable[[float], None] = lambda seconds: None
        self.on_finished: Callable[[Finished], None] = lambda group: None
        """Called with each group that became complete, once that is durable."""
        self.on_untrained: Callable[[list[UntrainedRollout]], None] = lambda rollouts: None
        """Called with the failed and evaluated rollouts of a round that people may look at, in a worker thread."""
        self.on_evaluated: Callable[[list[dict[str, Any]]], None] = lambda results: None
        """Called with the evaluations that ended, in a worker thread."""

    async def run(self, inbox: MemoryObjectReceiveStream[Item]) -> None:
        """Until the sending end of the inbox closes; what was applied is then written and answered. Raises
        :class:`EnvironmentFailing` where an environment never succeeds."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._write)
            async with self._written_send:
                await self._apply_round([])
                while not self._core.outcomes.hopeless() and (items := await self._gather(inbox)) is not None:
                    await self._apply_round(items)
        if why := self._core.outcomes.hopeless():
            raise EnvironmentFailing(why)

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
            if isinstance(item, Scored):
                for record, verdict in item.verdicts:
                    core.scored(record, verdict)
            else:
                self._apply(item)
        core.plan()
        changes, effects = core.collect()
        self._observer.update(core)
        self._ctx.beat()
        self._report()
        if changes or effects:
            started = time.perf_counter()
            await self._written_send.send((changes, effects, started))
            if (seconds := time.perf_counter() - started) > STANDSTILL_SECONDS:
                core.stood_still(seconds)

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
                for row_id, frames in changes.payloads:
                    self._cache.put(row_id, frames)
                if changes:
                    n_bytes = changes.n_bytes
                    await when_room(partial(self._store.commit, changes), self._store.path, "the replay store", n_bytes)
                self._cache.forget(changes.forgotten_payloads)
                self.on_commit(time.perf_counter() - started)
                if ended := [effect.result for effect in effects if isinstance(effect, Evaluated)]:
                    # before the learner hears of it, because it may read the file
                    write = partial(self.on_evaluated, ended)
                    await when_room(write, self._ctx.directory.path, "the results of an evaluation")
                for effect in effects:
                    if isinstance(effect, Score):
                        self._scoring.put(effect)
                    elif isinstance(effect, GivenUp):
                        self._scoring.forget(effect.group)
                    elif isinstance(effect, Finished):
                        self.on_finished(effect)
                    elif isinstance(effect, Send):
                        self._outgoing.post(effect)
                if untrained := [effect for effect in effects if isinstance(effect, UntrainedRollout)]:
                    await anyio.to_thread.run_sync(self.on_untrained, untrained)

    def _report(self) -> None:
        core, batches = self._core, self._core.batches
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
            updates=batches.consumed,
            policy_version=core.policy_version,
            orders_in_flight=core.leases.in_flight,
            groups_open=batches.open,
            groups_ready=batches.ready,
            actors=core.leases.connected,
            evaluation=core.evaluations.progress,
            failed=core.outcomes.header(),
        )
