"""The real shells of stage, hub, links and learner session on virtual time, over an in-memory wire, with faults.

What runs is :func:`pipeline.stage.role.serve` over a store, :class:`WireHub`, :class:`WireLink` and
:class:`learner.session.LearnerSession`. Simulated are the wire, the time that the disk takes, rollouts and training. A
history draws faults for its first seconds: connections that are cut (also between HELLO and WELCOME), links that are
muted or held, processes that are killed or stopped, a peer that says HELLO twice, a learner that comes back after
another took its place. Then it must end its run in time, and :meth:`ShellSimulation.audit` compares the books of all
sides.

Play many histories: ``python -m tests.support.shell_simulation 10000`` (with ``--from`` the first seed).
"""

from __future__ import annotations

import argparse
import copy
import logging
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import anyio.to_thread

from learner.data.trained import Trained
from learner.session import LearnerProgress, LearnerSession
from pipeline.config import RunConfig
from pipeline.errors import AfterplayError
from pipeline.runtime.process import RoleContext
from pipeline.runtime.rundir import RunDirectory
from pipeline.schema import SCHEMA_VERSION, Order
from pipeline.stage import role
from pipeline.stage.core import StageCore
from pipeline.store.ledger import read_ledger
from pipeline.transport.codec import decode_order, encode_message, encode_trajectory
from pipeline.transport.outbox import Outbox
from pipeline.transport.protocol import EventKind, Frames, Kind, Limits, Link, WireMessage
from tests.support.memory_transport import Faults, MemoryHub, MemoryLink, MemoryLinkWire, MemoryNetwork
from tests.support.simulated_roles import rollout
from tests.support.virtual_time import run_virtually

UPDATES, GROUPS, ROLLOUTS, SLOTS = 8, 2, 2, 4
FAULTS = ("cut", "cut", "cuts", "mute", "hold", "kill", "kill stage", "stop stage", "liar", "replace")
FAULT_SECONDS = 12.0
"""Faults happen in this time."""
SILENCE_SECONDS_MAX = 3.0
SETTLE_SECONDS_MAX = 100.0
"""Longest time from the last fault to the end of the run: an order that a lying peer took expires after 37 s, that of
its replacement as well; without faults a run takes about 10 s."""
UNREACHABLE_SECONDS_MAX = 3.0
"""Longest time in which the stage may count a peer as connected that the hub does not know."""


class Violation(AssertionError):
    """The books of a history do not agree, or it stands still."""


class TimedActor:
    """Answers each order after a while; keeps what is not acknowledged until it is killed."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name, self._rng = name, rng
        self.orders: dict[str, Order] = {}
        self.outbox: Outbox[str, Frames] = Outbox(1 << 20)

    async def run(self, link: Link) -> None:
        self._describe(link)
        async with link, anyio.create_task_group() as rollouts:
            while True:
                event = await link.receive()
                if event.kind is EventKind.CONNECTED:
                    assert event.message is not None
                    self.outbox.reconnected()
                    self.outbox.grant(int(event.message.header["credit_bytes"]))
                elif event.kind is EventKind.DISCONNECTED:
                    self.outbox.reconnected()
                elif event.message is not None:
                    self._handle(link, event.message, rollouts.start_soon)
                self._describe(link)
                await self._flush(link)

    def _handle(self, link: Link, message: WireMessage, start: Callable[..., None]) -> None:
        header = message.header
        if message.kind is Kind.ORDER:
            order = decode_order(header)
            if order.order_id not in self.outbox and order.order_id not in self.orders:
                self.orders[order.order_id] = order
                _require(len(self.orders) <= SLOTS, f"{self.name} was given more orders than it has slots")
                start(self._play, link, order)
        elif message.kind is Kind.CANCEL:
            for order_id in header["order_ids"]:
                self.orders.pop(order_id, None)
                self.outbox.refuse(order_id)
        elif message.kind is Kind.ACK:
            for order_id in [*header["trajectory_ids"], *header["refused"]]:
                self.outbox.refuse(order_id)

    async def _play(self, link: Link, order: Order) -> None:
        await anyio.sleep(self._rng.uniform(0.2, 1.5))
        if self.orders.pop(order.order_id, None) is None:
            return
        frames = encode_trajectory(rollout(order, order.policy_version))
        self.outbox.add(order.order_id, frames, sum(len(f) for f in frames))
        self._describe(link)
        await self._flush(link)

    async def _flush(self, link: Link) -> None:
        while (taken := self.outbox.take()) is not None:
            await link.send(WireMessage(Kind.TRAJECTORY, {"trajectory_id": taken[0]}, taken[1]))

    def _describe(self, link: Link) -> None:
        holding = [*self.orders, *self.outbox.ids]
        link.describe({"role": "actor", "slots": SLOTS, "holding": holding, "schema_version": SCHEMA_VERSION})


@dataclass(slots=True)
class Weights:
    """Contents of a checkpoint."""

    history: list[list[str]] = field(default_factory=list)
    """Trajectories by update."""
    policy_version: int = -1
    unacknowledged: dict[int, list[str]] = field(default_factory=dict)
    trained: dict[int, Trained] = field(default_factory=dict)

    @property
    def updates(self) -> int:
        return len(self.history)


@dataclass(slots=True)
class Disk:
    """The part of the run directory that learner processes share."""

    durable: Weights = field(default_factory=Weights)
    published: int = -1
    """Newest version that any of them published."""


class TimedLearner:
    """The loop of the learner around the real session, with times instead of tensors."""

    def __init__(self, disk: Disk, rng: random.Random) -> None:
        self.weights, self.disk, self._rng = copy.deepcopy(disk.durable), disk, rng
        self.version = -1
        self.stopped = False
        """It was killed, or stopped and another process took its place: it writes no checkpoint any more."""
        self.session: LearnerSession | None = None
        self._announced = anyio.Event()
        self._announced.set()

    async def run(self, link: Link, groups: Any) -> None:
        w = self.weights
        progress = LearnerProgress(w.updates, w.policy_version, w.updates, w.unacknowledged, trained=w.trained)
        async with link, anyio.create_task_group() as tasks:
            session = self.session = LearnerSession(link, groups, 2 * GROUPS, progress, Limits())
            tasks.start_soon(session.run)
            self.version = max(await session.welcome(), self.disk.published) + 1
            tasks.start_soon(self._publish, session, self.version, w.updates)
            while w.updates < UPDATES:
                await self._update(session, tasks.start_soon)
            await anyio.sleep_forever()

    async def _update(self, session: LearnerSession, start: Callable[..., None]) -> None:
        w = self.weights
        groups = await session.ready(w.updates)
        await anyio.sleep(self._rng.uniform(0.05, 0.6))
        w.history.append([t.trajectory_id for group in groups for t in group.trajectories])
        await session.consumed(w.updates - 1, Trained({}, {}, self.version))
        await self._announced.wait()
        self.version += 1
        start(self._publish, session, self.version, w.updates)
        if w.updates % 2 == 0 or w.updates == UPDATES:
            w.unacknowledged, w.trained = session.unacknowledged()
            w.policy_version = self.version
            start(self._save, session, copy.deepcopy(w))

    async def _publish(self, session: LearnerSession, version: int, updates: int) -> None:
        self._announced = anyio.Event()
        self.disk.published = max(self.disk.published, version)
        await anyio.sleep(self._rng.uniform(0.02, 0.5))
        await session.announce(version, updates)
        self._announced.set()

    async def _save(self, session: LearnerSession, weights: Weights) -> None:
        await anyio.sleep(self._rng.uniform(0.02, 1.0))
        if not self.stopped and weights.updates > self.disk.durable.updates:
            self.disk.durable = weights
            await session.checkpointed(weights.updates)


class ShellSimulation:
    """One history. :meth:`play` runs it and audits it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        faults = Faults(
            seed,
            disconnect=rng.choice((0.0, 0.0, 0.02, 0.1)),
            delay_seconds=(0.0, rng.choice((0.0, 0.01, 0.2))),
            greetings=rng.random() < 0.5,
        )
        self.network = MemoryNetwork(faults)
        self.config = RunConfig.model_validate(
            {
                "run": {"directory": str(folder), "name": "r", "total_steps": UPDATES, "seed": seed},
                "groups": {"n_rollout": ROLLOUTS, "groups_per_step": GROUPS, "attempts_max": 100},
                "staleness": {"max": rng.choice((0, 1, 2))},
                "environments": {"a": {"max_seconds": 5}},
                "replay": {"synchronous": "NORMAL"},
                "transport": {"silence_seconds_max": SILENCE_SECONDS_MAX},
                "traces": {"failed": False},
            }
        )
        self.directory = RunDirectory(self.config.run.path).create()
        self.core: StageCore | None = None
        self.hub: MemoryHub | None = None
        self.actors: dict[str, TimedActor] = {}
        self.learner: TimedLearner | None = None
        self.disk = Disk()
        self.unexpected: list[str] = []
        """Processes that ended although nobody killed them."""
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._unreachable: dict[str, float] = {}
        self._calm = False

    def play(self) -> float:
        """The virtual time that it took. Raises :class:`Violation`."""
        with self._patched():
            return run_virtually(self._play)

    async def _play(self) -> float:
        lives: dict[str, Callable[[], Awaitable[None]]] = {
            "stage": self._stage, "learner": self._learner,
            "actor-0": lambda: self._actor("actor-0"), "actor-1": lambda: self._actor("actor-1"),
        }  # fmt: skip
        async with anyio.create_task_group() as tasks:
            self._start = tasks.start_soon
            for name, life in lives.items():
                tasks.start_soon(self._supervise, name, life)
            tasks.start_soon(self._watch)
            tasks.start_soon(self._mischief)
            await anyio.sleep(FAULT_SECONDS)
            self._calm, self.network.faults = True, Faults()
            with anyio.move_on_after(SETTLE_SECONDS_MAX):
                while not self._settled():
                    await anyio.sleep(0.5)
            ended = anyio.current_time()
            self.audit()
            tasks.cancel_scope.cancel()
        return ended

    def _settled(self) -> bool:
        learner, core = self.learner, self.core
        return (
            core is not None
            and learner is not None
            and learner.session is not None
            and learner.weights.updates == self.disk.durable.updates == UPDATES == core.batches.consumed
            and not learner.session.unacknowledged()[0]
            and not any(len(actor.outbox) for actor in self.actors.values())
            and not core.leases.in_flight
            and core.dispatch.durable_updates == UPDATES
        )

    def audit(self) -> None:
        """Compare what all sides believe at the end."""
        learner, core = self.learner, self.core
        _require(learner is not None and core is not None, "a process did not come back")
        assert learner is not None and core is not None and learner.session is not None
        made, batches = learner.weights.updates, core.batches
        placed = {g.group_id: g.update for g in core.records.values() if g.group_number in batches.placed}
        _require(
            made == batches.consumed == UPDATES,
            f"no progress: {made} updates at the learner, {batches.consumed} at the stage, placed {placed}",
        )
        _require(not placed, f"trained, but placed: {placed}")
        _require(not learner.session.unacknowledged()[0], "the learner's log is not acknowledged")
        for actor in self.actors.values():
            _require(not len(actor.outbox), f"{actor.name} was not answered: {actor.outbox.ids}")
            _require(not actor.orders, f"{actor.name} still plays {list(actor.orders)}")
        trained = [t for ids in learner.weights.history for t in ids]
        _require(len(trained) == len(set(trained)) == UPDATES * GROUPS * ROLLOUTS, "a rollout was trained twice")
        ledger = read_ledger(self.directory.store_file, rows=True)
        _require(ledger.audit() == [], f"the ledger: {ledger.audit()}")
        _require(ledger.trajectories["trained"] == len(trained), f"{ledger.trajectories} of {len(trained)} trained")
        _require(core.dispatch.durable_updates == UPDATES, "the last checkpoint was not told")
        _require(not self.unexpected, f"ended by itself: {self.unexpected}")
        impossible = core.journal.counters["messages.impossible"] + core.journal.counters["messages.refused"]
        _require(not impossible, f"{impossible} messages of honest peers were refused")

    def _check(self) -> None:
        """Check the invariants of every moment."""
        core, hub, now = self.core, self.hub, anyio.current_time()
        if core is None or hub is None:
            self._unreachable.clear()
            return
        up = {name for name, actor in core.leases.actors.items() if actor.down_since is None}
        lost = (up | ({core.dispatch.peer} if core.dispatch.peer else set())) - set(hub.peers)
        self._unreachable = {name: self._unreachable.get(name, now) for name in lost}
        for name, since in self._unreachable.items():
            _require(now - since < UNREACHABLE_SECONDS_MAX, f"{name} counts as connected and the hub does not know it")
        for group in core.records.values():
            if group.consumed and not group.dropped:
                rows = [slot.trajectory.row_id for slot in group.slots if slot.trajectory is not None]
                _require(all(row in core.payloads for row in rows), f"{group.group_id} may be needed again")
        known = {g.update for g in core.records.values() if g.consumed}
        missing = [u for u in range(self.disk.durable.updates, core.batches.consumed) if u not in known]
        _require(not missing, f"updates {missing} are forgotten and in no checkpoint")

    async def _watch(self) -> None:
        while True:
            await anyio.sleep(0.25)
            self._check()

    async def _supervise(self, name: str, life: Callable[[], Awaitable[None]]) -> None:
        """As the supervisor does: a process that ends is started again."""
        while True:
            with anyio.CancelScope() as scope:
                self._scopes[name] = scope
                try:
                    await life()
                except* Exception as errors:
                    if any(isinstance(e, Violation) for e in errors.exceptions):
                        raise
                    self.unexpected.append(f"{name}: {errors.exceptions!r}")
            await anyio.sleep(self.rng.uniform(0.1, 2.0))

    async def _stage(self) -> None:
        self._ctx = ctx = RoleContext("replay", 0, self.config, self.directory)
        self.hub = MemoryHub(self.network, silence_seconds_max=SILENCE_SECONDS_MAX)
        try:
            await role.serve(ctx, self.hub)
        finally:
            self.core = self.hub = None

    async def _learner(self) -> None:
        self.learner = learner = TimedLearner(self.disk, self.rng)
        self._learner_over = over = anyio.Event()
        scope = anyio.CancelScope()

        async def live() -> None:
            with scope:
                try:
                    await learner.run(self._link("learner"), self.config.groups)
                except* AfterplayError as errors:
                    if not learner.stopped:
                        self.unexpected.append(f"learner: {errors.exceptions!r}")
            over.set()

        self._start(live)
        try:
            await over.wait()
        except BaseException:
            scope.cancel()
            raise

    async def _actor(self, name: str) -> None:
        self.actors[name] = actor = TimedActor(name, self.rng)
        await actor.run(self._link(name))

    def _link(self, name: str) -> MemoryLink:
        return MemoryLink(self.network, name, silence_seconds_max=SILENCE_SECONDS_MAX)

    async def _mischief(self) -> None:
        rng, start = self.rng, self._start
        for at in sorted(rng.uniform(0.5, FAULT_SECONDS - 1) for _ in range(rng.randint(1, 6))):
            await anyio.sleep(at - anyio.current_time())
            victim = rng.choice(("learner", "learner", "actor-0", "actor-1"))
            match rng.choice(FAULTS):
                case "cut":
                    self.network.disconnect(victim)
                case "cuts":
                    start(self._cuts, victim)
                case "mute":
                    start(self._part, victim)
                case "hold":
                    self.network.hold(victim, rng.uniform(0.1, 2 * SILENCE_SECONDS_MAX))
                case "kill":
                    self._kill(victim)
                case "kill stage":
                    self.network.kill_hub()
                    self._scopes["stage"].cancel()
                case "stop stage":
                    self._ctx.stopping.set()
                case "liar":
                    start(self._lie)
                case "replace":
                    self._replace()

    async def _cuts(self, victim: str) -> None:
        """Cut again and again, a moment after each new connection."""
        for _ in range(self.rng.randint(2, 6)):
            self.network.disconnect(victim)
            await anyio.sleep(self.rng.choice((0.05, 0.1, 0.2)) + self.rng.uniform(0, 0.1))

    def _kill(self, name: str) -> None:
        if name == "learner" and self.learner is not None:
            self.learner.stopped = True
        self.network.kill_link(name)
        self._scopes[name].cancel()

    async def _lie(self) -> None:
        """A peer that gives two names on one connection, lives on and does nothing."""
        wire = MemoryLinkWire(self.network, "liar")
        for attempt in range(20):
            wire.connect()
            if wire.lost is None:
                break
            await anyio.sleep(0.5 * (attempt + 1))
        for name in ("ghost-0", "ghost-1"):
            hello = {"role": "actor", "name": name, "slots": 3, "holding": [], "schema_version": SCHEMA_VERSION}
            wire.send(encode_message(WireMessage(Kind.HELLO, hello)))
            await anyio.sleep(1.0)
        while not self._calm:
            wire.send(encode_message(WireMessage(Kind.HEARTBEAT)))
            await anyio.sleep(0.5)
        wire.disconnect()

    def _replace(self) -> None:
        """The learner is stopped for a while, another takes its place, and then the first goes on."""
        session = None if self.learner is None else self.learner.session
        if self.learner is not None and session is not None and session.epoch:
            self.learner.stopped = True
            self.network.hold("learner", self.rng.uniform(1.0, 3 * SILENCE_SECONDS_MAX))
            self._learner_over.set()

    async def _part(self, victim: str) -> None:
        """Nothing arrives for a while; the connection does not outlive it."""
        seconds = self.rng.uniform(0.1, 2 * SILENCE_SECONDS_MAX)
        self.network.mute(victim, seconds)
        await anyio.sleep(seconds)
        self.network.disconnect(victim)

    @contextmanager
    def _patched(self) -> Iterator[None]:
        rng = self.rng
        slow = rng.choice((0.02, 0.1, 0.5))

        async def run_sync(function: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
            """A thread that works for a while before and after what it does."""
            await anyio.sleep(rng.choice((0.0, 0.0, rng.uniform(0, slow))))
            result = function(*arguments)
            await anyio.sleep(rng.choice((0.0, 0.0, rng.uniform(0, slow))))
            return result

        def core(*arguments: Any, **more: Any) -> StageCore:
            self.core = StageCore(*arguments, **more)
            return self.core

        with ExitStack() as stack:
            for target, name, value in (
                (anyio.to_thread, "run_sync", run_sync),
                (role, "StageCore", core),
                (role, "interrupting_blocks", nullcontext),
            ):
                stack.enter_context(mock.patch.object(target, name, value))
            yield


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(f"at {anyio.current_time():.1f} s: {otherwise}")


def play(folder: Path, seed: int) -> float:
    """One history; the virtual seconds that it took. Raises :class:`Violation` that names the seed."""
    try:
        return ShellSimulation(folder / str(seed), seed).play()
    except* Exception as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise Violation(f"history {seed}: {type(first).__name__}: {first}") from first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("histories", type=int)
    parser.add_argument("--from", dest="first", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    started, found = time.monotonic(), 0
    for seed in range(options.first, options.first + options.histories):
        with tempfile.TemporaryDirectory() as folder:
            try:
                play(Path(folder), seed)
            except* Violation as violations:
                found += 1
                print(violations.exceptions[0], flush=True)
    print(f"{options.histories} histories, {found} failed, {time.monotonic() - started:.0f} s")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
