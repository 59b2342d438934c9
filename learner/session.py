"""Session with the replay stage: the learner's side of the protocol (docs/PROTOCOL.md) over a link.

*consumes* PLAN, DELIVERY, CANCEL, ACK and EVALUATION, in a task of its own: messages arrive while the trainer computes;
*produces* HELLO with its state on every connection, CONSUMED, VERSION, CHECKPOINTED and BYE, and repeats messages that
may have been lost; *waits for* nothing but the link. It holds at most the ``credit_groups`` groups that it grants.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio

from learner.data.assembler import GroupAssembler, Progress
from learner.data.groups import Group, StoredRollout
from learner.data.trained import Trained
from pipeline.config.learner import GroupsConfig
from pipeline.errors import TrainingError, TransportClosed, TransportError, WireError
from pipeline.schema import SCHEMA_VERSION
from pipeline.transport.codec import decode_plan, decode_trajectory
from pipeline.transport.protocol import EventKind, Kind, Limits, Link, WireMessage

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LearnerProgress:
    """Progress of the learner, as HELLO reports it."""

    updates: int = 0
    policy_version: int = -1
    """Newest version announced or restored; -1 before the first publication."""
    durable_updates: int = 0
    unacknowledged: dict[int, list[str]] = field(default_factory=dict)
    """Consumed group ids by update, not yet acknowledged."""
    announced: tuple[int, int] | None = None
    """Policy version and updates of the newest VERSION of this process."""
    trained: dict[int, Trained] = field(default_factory=dict)
    """Facts that CONSUMED carried of unacknowledged updates beside the ids; missing where it had none."""


class LearnerSession:
    """Connection state, assembled groups, and the messages of the learner."""

    def __init__(
        self,
        link: Link,
        groups: GroupsConfig,
        credit_groups: int,
        progress: LearnerProgress,
        limits: Limits,
    ) -> None:
        self.progress = progress
        self.assembler = GroupAssembler(groups.groups_per_step)
        self.session = uuid.uuid4().hex
        self.recorded_version: int | None = None
        """Newest version that the replay stage had recorded when it first answered."""
        self.evaluation: Mapping[str, Any] = {}
        """The newest EVALUATION; empty where none came."""
        self.connected = False
        self._link = link
        self._groups = groups
        self._credit_groups = credit_groups
        self._limits = limits
        self._changed = anyio.Event()
        self._leaving = False
        self._link.describe(self.hello())

    def hello(self) -> dict[str, Any]:
        """Header of HELLO."""
        progress = self.progress
        return {
            "role": "learner",
            "name": "learner",
            "schema_version": SCHEMA_VERSION,
            "session": self.session,
            "updates": progress.updates,
            "policy_version": progress.policy_version,
            "durable_updates": progress.durable_updates,
            "credit_groups": self._credit_groups,
            "holding": self.assembler.holding(),
            "consumed": [[update, ids] for update, ids in sorted(progress.unacknowledged.items())],
            "trained": [[update, facts.header()] for update, facts in sorted(progress.trained.items())],
        }

    async def run(self) -> None:
        """Receive until cancelled. Raises :class:`TrainingError` or :class:`WireError` for messages that break the
        protocol, :class:`TransportClosed` when the stage refused this learner; returns when the stage closes after our
        BYE."""
        while True:
            try:
                event = await self._link.receive()
            except TransportClosed:
                if self._leaving:
                    return
                raise
            if event.kind is EventKind.CONNECTED:
                await self._connected(event.message)
            elif event.kind is EventKind.DISCONNECTED:
                self.connected = False
                log.warning("lost the replay stage (%s), connecting again", event.reason)
            elif event.message is not None:
                self._handle(event.message)
            self._notify()

    async def welcome(self) -> int:
        """Wait for the first WELCOME; the newest policy version that the stage has recorded (-1: none)."""
        while self.recorded_version is None:
            await self._changed.wait()
        return self.recorded_version

    async def ready(self, update: int) -> tuple[Group, ...]:
        """Wait for the groups of ``update``; they are in training from then on."""
        while not self.assembler.ready(update):
            await self._changed.wait()
        groups = self.assembler.take(update)
        self._notify()
        return groups

    async def peek(self, update: int) -> tuple[Group, ...]:
        """Wait for the groups of ``update`` without taking them: :meth:`ready` returns the same if nothing changes
        until then."""
        while not self.assembler.ready(update):
            await self._changed.wait()
        return self.assembler.peek(update)

    async def changed(self) -> None:
        """Wait for any message."""
        await self._changed.wait()

    def group_progress(self, update: int) -> Progress:
        return self.assembler.progress(update)

    async def consumed(self, update: int, trained: Trained | None = None) -> None:
        """Report that the optimizer has made ``update``."""
        ids, facts = self.assembler.consumed(update), trained or Trained()
        self.progress.updates = update + 1
        self.progress.unacknowledged[update] = ids
        self.progress.trained[update] = facts
        self._notify()
        await self._send(Kind.CONSUMED, {"update": update, "group_ids": ids, **facts.header()})

    async def announce(self, policy_version: int, updates: int) -> None:
        """Report that the weights after ``updates`` updates are live as ``policy_version``."""
        self.progress.policy_version = policy_version
        self.progress.announced = (policy_version, updates)
        self._notify()
        await self._send(Kind.VERSION, {"policy_version": policy_version, "updates": updates})

    async def checkpointed(self, updates: int) -> None:
        """Report that everything up to ``updates`` updates is durable here."""
        self.progress.durable_updates = updates
        self._notify()
        await self._send(Kind.CHECKPOINTED, {"updates": updates})

    async def bye(self, reason: str) -> None:
        self._leaving = True
        await self._send(Kind.BYE, {"reason": reason})

    async def acknowledged(self) -> None:
        """Wait until every CONSUMED was acknowledged."""
        while self.progress.unacknowledged:
            await self._changed.wait()

    async def _send(self, kind: Kind, header: dict[str, Any]) -> None:
        try:
            await self._link.send(WireMessage(kind, header))
        except TransportError as error:
            log.warning("%s was not sent (%s); it is repeated after the next connection", kind, error)

    async def _connected(self, welcome: WireMessage | None) -> None:
        self.connected = True
        recorded = int((welcome.header if welcome else {}).get("policy_version", -1))
        if self.recorded_version is None:
            self.recorded_version = recorded
            log.info("connected, the replay stage has recorded version %d", recorded)
        self.assembler.forget_incomplete()
        if self.progress.announced is not None:
            version, updates = self.progress.announced
            await self._send(Kind.VERSION, {"policy_version": version, "updates": updates})

    def _handle(self, message: WireMessage) -> None:
        header = message.header
        try:
            if message.kind is Kind.PLAN:
                self._plan(header)
            elif message.kind is Kind.DELIVERY:
                trajectory = decode_trajectory(message.frames, self._limits)
                self.assembler.deliver(
                    header["group_id"],
                    int(header["index"]),
                    trajectory,
                    header["reward"],
                    header.get("rewards") or {},
                    StoredRollout.of(header.get("replay")),
                )
            elif message.kind is Kind.CANCEL:
                self.assembler.cancel(header["group_ids"])
            elif message.kind is Kind.EVALUATION:
                self.evaluation = header
            elif message.kind is Kind.ACK:
                self.progress.unacknowledged.pop(int(header["update"]), None)
                self.progress.trained.pop(int(header["update"]), None)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, WireError | TrainingError):
                raise
            raise WireError(
                f"{message.kind} from the replay stage is invalid: {type(error).__name__}: {error}"
            ) from error

    def _plan(self, header: Mapping[str, Any]) -> None:
        plan, update = decode_plan(header), int(header["update"])
        if plan.n_rollout != self._groups.n_rollout:
            raise TrainingError(
                f"expected groups of groups.n_rollout={self._groups.n_rollout} trajectories, got {plan.n_rollout} in "
                f"{plan.group_id}: learner and replay stage must read the same run file"
            )
        if update < self.progress.updates:
            log.warning("%s is planned for update %d, which is already done: ignored", plan.group_id, update)
            return
        self.assembler.plan(plan, update)

    def _notify(self) -> None:
        self._link.describe(self.hello())
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
