"""An actor: its queue of orders, and the async shell around that queue, the rollouts and the outbox.

*Consumes* ORDER, CANCEL, ACK, and WATCH and ENGINES for its engines; *produces* exactly one TRAJECTORY for every order
that was not cancelled, sent until it is acknowledged. *Waits* to begin an order while all slots are taken or the outbox
is full; *unblocked by* a finished rollout or an acknowledgement. Sending waits for credit.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio
from anyio.abc import TaskGroup

from actors.engine.concurrency import LOOK_SECONDS, ConcurrencyLimit
from actors.environments.host import EnvironmentHost
from actors.metrics import ActorMetrics
from actors.rollout.lessons import MemoryClient
from actors.rollout.rollout import Rollout
from actors.rollout.services import Services
from pipeline.errors import LimitExceeded, SchemaError, TransportClosed, WireError
from pipeline.runtime.progress import RoleState
from pipeline.runtime.witness import WitnessFile
from pipeline.schema import SCHEMA_VERSION, Failure, Order, Trajectory, TrajectoryStatus
from pipeline.schema.codec import Limits, check_limits, encode_trajectory
from pipeline.schema.orders import decode_request
from pipeline.schema.record_file import Frames
from pipeline.transport.link import Link
from pipeline.transport.messages import Event, EventKind, Kind, WireMessage
from pipeline.transport.outbox import Outbox

log = logging.getLogger(__name__)

OVERDUE_SECONDS = 300.0
"""A rollout that takes twice its time limit and this hangs, cancelled or not."""


class OrderQueue:
    """Orders of an actor, from arrival to answer. Pure.

    An order is *waiting* until a slot is free, then *in flight* until it is answered or cancelled; each leaves exactly
    once. None is begun while ``slots`` orders or more are in flight; others wait in the order of their arrival.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.ended = 0
        """Orders that were begun and are answered or cancelled."""
        self._waiting: OrderedDict[str, Order] = OrderedDict()
        self._in_flight: dict[str, Order] = {}

    def __contains__(self, order_id: object) -> bool:
        return order_id in self._waiting or order_id in self._in_flight

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def ids(self) -> list[str]:
        return [*self._in_flight, *self._waiting]

    def accept(self, order: Order) -> bool:
        """Queue it; False for an order that is here already (sent twice around a reconnection)."""
        if order.order_id in self:
            return False
        self._waiting[order.order_id] = order
        return True

    def begin(self) -> Order | None:
        """The next order, in flight from here on; None when none waits or no slot is free."""
        if not self._waiting or len(self._in_flight) >= self.slots:
            return None
        order_id, order = self._waiting.popitem(last=False)
        self._in_flight[order_id] = order
        return order

    def withdraw(self, order_id: str) -> Order | None:
        """Take back an order that is still waiting."""
        return self._waiting.pop(order_id, None)

    def finish(self, order_id: str) -> None:
        """The order is answered. Raises KeyError for one that was not in flight."""
        del self._in_flight[order_id]
        self.ended += 1

    def withdraw_all(self) -> list[Order]:
        """Take back everything that is still waiting."""
        orders = list(self._waiting.values())
        self._waiting.clear()
        return orders


class Actor:
    """One actor on one link. ``run`` serves until cancelled; ``drain`` ends the work first."""

    def __init__(
        self,
        services: Services,
        link: Link,
        *,
        slots: int,
        slots_min: int | None = None,
        outbox_bytes_max: int,
        limits: Limits,
        witness: WitnessFile | None = None,
    ) -> None:
        self._services = services
        self._link = link
        self._memory = MemoryClient(link)
        self._witness = witness
        self._limits = limits
        self._limit = ConcurrencyLimit(slots if slots_min is None else slots_min, slots)
        self._orders = OrderQueue(self._limit.value)
        self._outbox: Outbox[str, Frames] = Outbox(outbox_bytes_max)
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._cancelled: set[str] = set()
        self._deadlines: dict[str, float] = {}
        """Monotonic time by which each rollout in flight must have ended."""
        self._draining = False
        self.connected = False
        self._slots_told = 0
        self._changed = anyio.Event()
        self._blocked_since: float | None = None
        self._group: TaskGroup | None = None
        link.describe(self._hello)

    @property
    def environments(self) -> Mapping[str, EnvironmentHost]:
        return self._services.environments

    @property
    def metrics(self) -> ActorMetrics:
        return self._services.metrics

    @property
    def slots(self) -> int:
        """Rollouts in progress at most."""
        return self._orders.slots

    @property
    def offered(self) -> int:
        """Slots that the replay stage may use: none while the actor drains."""
        return 0 if self._draining else self.slots

    @property
    def in_flight(self) -> int:
        """Rollouts in progress."""
        return self._orders.in_flight

    @property
    def unacknowledged(self) -> int:
        """Finished trajectories that are not acknowledged yet."""
        return len(self._outbox)

    @property
    def holding(self) -> list[str]:
        """Every order that is waiting, in flight, or finished and unacknowledged."""
        return [*self._orders.ids, *self._outbox.ids]

    def _hello(self) -> dict[str, Any]:
        return {
            "role": "actor",
            "name": self._services.actor_id,
            "schema_version": SCHEMA_VERSION,
            "slots": self.offered,
            "splits": self._services.splits,
            "holding": self.holding,
        }

    def doing(self) -> tuple[RoleState, str]:
        """The state of this actor, and in words what it waits for; empty when it works."""
        if not self.connected:
            return RoleState.WAITING_FOR_REPLAY, getattr(self._link, "reason", "") or "not connected"
        engine = self._services.pool.waiting_reason()
        if engine:
            return RoleState.WAITING_FOR_ENGINES, engine
        if self._outbox.full:
            return RoleState.WAITING_FOR_REPLAY, f"acknowledgements ({len(self._outbox)} trajectories in the outbox)"
        return (RoleState.PLAYING if self._orders.in_flight else RoleState.WAITING_FOR_ORDERS), ""

    def overdue(self, now: float) -> bool:
        """True if a rollout has not ended long after its own time limit, which therefore is not kept."""
        return any(now > deadline for deadline in self._deadlines.values())

    async def run(self) -> None:
        """Serve until cancelled. Raises :class:`TransportClosed` when the replay stage refuses this actor for good."""
        async with anyio.create_task_group() as group:
            self._group = group
            group.start_soon(self._send)
            group.start_soon(self._services.pool.tell, self._send_engines)
            if not self._limit.constant:
                group.start_soon(self._follow_engines)
            await self._receive()

    async def drain(self, seconds_max: float, flush_seconds_max: float = 1.5) -> bool:
        """Begin nothing more, let episodes finish for ``seconds_max``, abort the others, and send what can be sent.

        The replay stage sends no orders once it knows that there are no slots. Those that arrive meanwhile are not
        begun, and answered ``aborted`` at the end: answered at once, they might come straight back. Returns whether
        every trajectory was acknowledged."""
        self._draining = True
        with suppress(TransportClosed), anyio.move_on_after(seconds_max):
            if self.connected:
                await self._link.send(WireMessage(Kind.SLOTS, {"slots": self.offered}))
            while self._orders.in_flight:
                await self._changed.wait()
        for scope in self._scopes.values():
            scope.cancel()
        while self._orders.in_flight:
            await self._changed.wait()
        for order in self._orders.withdraw_all():
            self._answer(Rollout(order, self._services).aborted("the actor stopped before it was begun"), order)
        self._work()
        with anyio.move_on_after(flush_seconds_max):
            while len(self._outbox) and self.connected:
                await self._changed.wait()
        return not len(self._outbox)

    async def _receive(self) -> None:
        while True:
            event = await self._link.receive()
            try:
                self._handle(event)
            except (WireError, SchemaError, KeyError, TypeError, ValueError) as error:
                log.error("ignored an invalid message from the replay stage: %r", error)
            self._work()

    def _handle(self, event: Event) -> None:
        message = event.message
        if event.kind is EventKind.CONNECTED:
            assert message is not None
            self.connected, self._slots_told = True, 0
            self._memory.connected()
            self._services.pool.connected()
            self._outbox.reconnected()
            self._outbox.grant(int(message.header["credit_bytes"]))
            log.info("connected to the replay stage, %d trajectories to send again", len(self._outbox))
        elif event.kind is EventKind.DISCONNECTED:
            self.connected = False
            self._memory.lost()
            if self._outbox.in_flight_bytes:
                self.metrics.send_failures_total.labels(reason="disconnected").inc()
            self._outbox.reconnected()
            log.warning("lost the replay stage: %s", event.reason)
        elif message is None:
            return
        elif message.kind is Kind.ORDER:
            order = decode_request(Order, message.header)
            if order.order_id not in self._outbox:
                self._orders.accept(order)
        elif message.kind is Kind.CANCEL:
            for order_id in message.header["order_ids"]:
                self._cancel(str(order_id))
        elif message.kind is Kind.ACK:
            self._acknowledged(message)
        elif message.kind is Kind.WATCH:
            self._services.pool.chosen()
        elif message.kind is Kind.ENGINES:
            self._services.pool.told(message.header["engines"])
        elif message.kind is Kind.LESSONS:
            self._memory.answered(message.header)
        else:
            log.warning(
                "expected ORDER, CANCEL, ACK, WATCH, ENGINES or LESSONS of the replay stage, got %s", message.kind
            )

    def _acknowledged(self, message: WireMessage) -> None:
        acknowledged = message.header.get("trajectory_ids", ())
        if self._witness is not None and acknowledged:
            self._witness.write("acknowledged", ids=acknowledged)
        for trajectory_id in acknowledged:
            self._outbox.forget(trajectory_id)
        for trajectory_id, reason in (message.header.get("refused") or {}).items():
            if self._outbox.forget(trajectory_id):
                self.metrics.send_failures_total.labels(reason="rejected").inc()
                log.warning("trajectory %s was refused: %s", trajectory_id, reason)

    def _cancel(self, order_id: str) -> None:
        """End the rollout, send nothing."""
        order = self._orders.withdraw(order_id)
        if order is not None:
            self._count(Rollout(order, self._services).aborted("cancelled before it was begun"), order)
        elif order_id in self._scopes:
            self._cancelled.add(order_id)
            self._scopes[order_id].cancel()
        else:
            self._outbox.forget(order_id)

    def _work(self) -> None:
        """Begin what can be begun, and wake whoever waits for a change."""
        assert self._group is not None
        while not (self._draining or self._outbox.full):
            order = self._orders.begin()
            if order is None:
                break
            scope = self._scopes[order.order_id] = anyio.CancelScope()
            self._deadlines[order.order_id] = time.monotonic() + 2 * order.seconds_max + OVERDUE_SECONDS
            self._group.start_soon(self._play, order, scope)
        self.metrics.inflight_episodes.set(self._orders.in_flight)
        self.metrics.concurrency.set(self.slots)
        self.metrics.send_queue_trajectories.set(len(self._outbox))
        self._changed.set()
        self._changed = anyio.Event()

    async def _play(self, order: Order, scope: anyio.CancelScope) -> None:
        rollout = Rollout(order, self._services, self._memory)
        trajectory: Trajectory | None = None
        with scope:
            trajectory = await rollout.run()
        del self._scopes[order.order_id], self._deadlines[order.order_id]
        cancelled = order.order_id in self._cancelled
        self._cancelled.discard(order.order_id)
        self._orders.finish(order.order_id)
        if cancelled:
            self._count(rollout.aborted("cancelled by the replay stage"), order)
        else:
            self._answer(trajectory or rollout.aborted("the actor was stopped"), order)
        self._work()

    def _answer(self, trajectory: Trajectory, order: Order) -> None:
        """Put it in the outbox; one that no message can carry is answered as an error."""
        try:
            frames = self._encoded(trajectory)
        except (LimitExceeded, SchemaError) as error:
            log.error("trajectory %s cannot be sent: %s", trajectory.trajectory_id, error)
            self.metrics.send_failures_total.labels(reason="rejected").inc()
            failure = Failure("actor", type(error).__name__, str(error))
            lost: dict[str, Any] = {"turns": (), "rewards": {}, "lessons": None, "hinted_contexts": {}}
            trajectory = replace(trajectory, status=TrajectoryStatus.ERROR, failure=failure, **lost)
            frames = self._encoded(trajectory)
        self._count(trajectory, order)
        if self._witness is not None:
            self._witness.made(trajectory)
        self._outbox.add(trajectory.trajectory_id, frames, sum(memoryview(f).nbytes for f in frames))

    def _encoded(self, trajectory: Trajectory) -> Frames:
        if trajectory.n_tokens > self._limits.tokens_max:
            raise LimitExceeded(
                f"trajectory has {trajectory.n_tokens} tokens, more than "
                f"stage.tokens_max={self._limits.tokens_max}: raise it, or lower "
                f"environments.{trajectory.task.environment}.max_tokens"
            )
        frames = encode_trajectory(trajectory)
        check_limits([b"trajectory", trajectory.trajectory_id.encode(), *frames], self._limits)
        return frames

    def _count(self, trajectory: Trajectory, order: Order) -> None:
        """One terminal event per rollout. An unknown environment is labelled ``unknown``: label sets stay closed. Of an
        evaluation only the costs are counted: its reward, tokens and versions are not of training."""
        metrics, name, failure = self.metrics, trajectory.task.environment, trajectory.failure
        env = name if name in self.environments else "unknown"
        metrics.trajectories_total.labels(env=env, outcome=trajectory.status.value).inc()
        if failure is not None:
            if trajectory.status is TrajectoryStatus.ERROR:
                words = (trajectory.trajectory_id, failure.boundary, failure.kind, failure.message)
                log.warning("order %s failed: %s: %s: %s", *words)
            return
        metrics.episode_duration_seconds.labels(env=env).observe(trajectory.timings.duration_seconds)
        if order.evaluation:
            return
        metrics.episode_tokens.labels(env=env).observe(trajectory.n_sampled)
        score, lessons = trajectory.rewards.get("environment"), trajectory.lessons
        if score is not None:
            metrics.episode_reward.labels(env=env).observe(score)
            if self._services.lesson_prompter is not None:
                metrics.lessons_reward.labels(lessons="no" if lessons is None else "yes").observe(score)
        if lessons is not None:
            metrics.lessons_episodes_total.labels(train="keep" if lessons.keep else "discard").inc()
        versions = trajectory.version_range()
        if versions is not None:
            metrics.trajectory_span_versions.observe(versions[1] - versions[0])

    async def _send(self) -> None:
        while True:
            taken = self._outbox.take()
            out_of_credit = taken is None and self._outbox.n_bytes > self._outbox.in_flight_bytes
            if taken is not None or out_of_credit:
                self._blocked_since = time.perf_counter()
            if taken is None:
                await self._changed.wait()
            else:
                trajectory_id, frames = taken
                await self._link.send(WireMessage(Kind.TRAJECTORY, {"trajectory_id": trajectory_id}, frames))
            self.count_blocked()
            self._blocked_since = None

    def count_blocked(self) -> None:
        """Add the time since the last call, so that the counter moves while the actor is blocked."""
        if self._blocked_since is not None:
            now = time.perf_counter()
            self.metrics.send_blocked_seconds_total.inc(now - self._blocked_since)
            self._blocked_since = now

    async def _follow_engines(self) -> None:
        """Play more or fewer rollouts at once, by the load of the engines, and tell the replay stage."""
        pool = self._services.pool
        while True:
            await anyio.sleep(LOOK_SECONDS)
            playing, ended = self._orders.in_flight, self._orders.ended
            known = (pool.router.prompt_tokens, pool.router.known_tokens)
            self._orders.slots = self._limit.observe(pool.reports(), playing, ended, *known)
            if self.connected and self.offered != self._slots_told:
                self._slots_told = self.offered
                await self._link.send(WireMessage(Kind.SLOTS, {"slots": self.offered}))
            self._work()

    async def _send_engines(self, engines: dict[str, Any]) -> None:
        if self.connected:
            await self._link.send(WireMessage(Kind.ENGINES, {"engines": engines}))
