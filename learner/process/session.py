"""Session with the replay stage: the learner's side of the protocol (docs/PROTOCOL.md) over a link.

*consumes* PLAN, DELIVERY, CANCEL, ACK and EVALUATION, in a task of its own: messages arrive while the trainer computes;
*produces* HELLO on every connection, the numbered log of CONSUMED, VERSION and CHECKPOINTED, each repeated until it is
acknowledged, and BYE; *waits for* nothing but the link. It holds at most the ``credit_groups`` groups that it grants,
in a :class:`GroupAssembler`, a pure state machine without sockets or clocks.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio

from learner.data.rows import Group, StoredRollout, Trained
from pipeline.config.stage import GroupsConfig
from pipeline.errors import TrainingError, TransportClosed, TransportError, WireError
from pipeline.schema import SCHEMA_VERSION, GroupPlan, Trajectory
from pipeline.schema.codec import Limits, decode_trajectory
from pipeline.schema.orders import decode_request, whole
from pipeline.transport.link import Link
from pipeline.transport.messages import EventKind, Kind, WireMessage
from pipeline.transport.outbox import ControlLog

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """Groups and trajectories that an update has, and needs."""

    update: int
    complete: int
    """Groups that hold all of their trajectories."""
    needed: int
    trajectories: int
    """Trajectories held for the update, those of complete groups included."""


@dataclass(slots=True)
class _PlannedGroup:
    plan: GroupPlan
    update: int
    members: dict[int, Trajectory] = field(default_factory=dict)
    stored_rollouts: dict[str, StoredRollout] = field(default_factory=dict)
    in_training: bool = False

    @property
    def complete(self) -> bool:
        return len(self.members) == self.plan.delivered

    def planned(self, index: int) -> str | None:
        """The id that the plan names for this index; None: any fresh trajectory."""
        pool = self.plan.candidates or self.plan.replay_ids
        return None if index < self.plan.n_fresh else pool[index - self.plan.n_fresh]


class GroupAssembler:
    """Collects the groups of coming updates."""

    def __init__(self, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._groups: dict[str, _PlannedGroup] = {}

    def plan(self, plan: GroupPlan, update: int) -> None:
        """Add a planned group of ``update``. A repeated plan changes nothing but its update, which the stage decides.

        Raises :class:`TrainingError` when another plan is known under the same id, or the update has its groups
        already.
        """
        group = self._groups.get(plan.group_id)
        if group is not None:
            if group.plan.n_rollout != plan.n_rollout or group.plan.task.task_id != plan.task.task_id:
                raise TrainingError(f"expected one plan under the id {plan.group_id}, got {group.plan} and then {plan}")
            if not group.in_training:
                group.update = update
            return
        if len(self._of(update)) >= self._groups_per_step:
            raise TrainingError(
                f"expected {self._groups_per_step} groups for update {update}, got one more ({plan.group_id}): "
                "learner and replay stage must read the same run file"
            )
        self._groups[plan.group_id] = _PlannedGroup(plan, update)

    def deliver(
        self,
        group_id: str,
        index: int,
        trajectory: Trajectory,
        reward: float | None,
        rewards: Mapping[str, float | None],
        stored: StoredRollout | None = None,
    ) -> bool:
        """One scored trajectory of a planned group. True when it completes the group. ``reward`` is what counts, for
        replayed ones the stored one.

        A trajectory that is held already, or whose group is not awaited, is ignored.
        Raises :class:`TrainingError` for a trajectory that cannot be trained, or a second one of the same index.
        """
        group = self._groups.get(group_id)
        if group is None:
            return False
        name = trajectory.trajectory_id
        held = {t.trajectory_id: i for i, t in group.members.items()}
        if name in held:
            return False
        if not 0 <= index < group.plan.delivered:
            raise TrainingError(
                f"expected an index in 0..{group.plan.delivered - 1} for {name} of {group_id}, got {index}"
            )
        if index in group.members:
            other = group.members[index].trajectory_id
            raise TrainingError(f"expected one trajectory at index {index} of {group_id}, got {other} and then {name}")
        if (expected := group.planned(index)) is not None and expected != name:
            raise TrainingError(f"expected the stored {expected} at index {index} of {group_id}, got {name}")
        if reward is None or not trajectory.usable:
            raise TrainingError(
                f"expected a scored, finished trajectory with sampled tokens, got {name} "
                f"(status {trajectory.status}, reward {reward}, {trajectory.n_sampled} sampled tokens)"
            )
        group.members[index] = trajectory.scored(reward, rewards)
        if group.planned(index) is not None:
            group.stored_rollouts[name] = stored or StoredRollout()
        return group.complete

    def cancel(self, group_ids: Iterable[str]) -> None:
        """Forget groups that will not be completed. A group that is in training already stays."""
        for group_id in group_ids:
            group = self._groups.get(group_id)
            if group is not None and not group.in_training:
                del self._groups[group_id]

    def keep(self, group_ids: Iterable[str]) -> None:
        """Drop all groups but these and those in training: after a reconnection the stage says which it counts as held,
        and sends the others again or has cancelled them."""
        kept = set(group_ids)
        self._groups = {
            name: group
            for name, group in self._groups.items()
            if group.in_training or (group.complete and name in kept)
        }

    def ready(self, update: int) -> bool:
        """True where all groups of ``update`` are complete."""
        groups = self._of(update)
        return len(groups) == self._groups_per_step and all(g.complete for g in groups)

    def progress(self, update: int) -> Progress:
        groups = self._of(update)
        return Progress(
            update, sum(g.complete for g in groups), self._groups_per_step, sum(len(g.members) for g in groups)
        )

    def take(self, update: int) -> tuple[Group, ...]:
        """The groups that ``update`` is made from, ordered by id so that the order of arrival changes nothing; those
        that the stage left out (equal rewards) are not among them. All stay in ``holding`` until ``consumed``.

        Raises :class:`TrainingError` when the update is not ready.
        """
        groups = self.peek(update)
        for group in self._of(update):
            group.in_training = True
        return groups

    def peek(self, update: int) -> tuple[Group, ...]:
        """The groups that :meth:`take` would return now; nothing changes. Raises :class:`TrainingError` as that
        does."""
        if not self.ready(update):
            raise TrainingError(f"expected all groups of update {update}, got {self.progress(update)}")
        return self.complete(update)

    def complete(self, update: int) -> tuple[Group, ...]:
        """The groups of ``update`` that are complete, as :meth:`take` returns them."""
        groups = sorted((g for g in self._of(update) if g.complete), key=lambda g: g.plan.group_id)
        return tuple(
            Group(g.plan, tuple(g.members[i] for i in range(g.plan.delivered)), dict(g.stored_rollouts))
            for g in groups
            if not g.plan.left_out
        )

    def consumed(self, update: int) -> list[str]:
        """Forget the groups of a trained update; their ids."""
        done = sorted(name for name, group in self._groups.items() if group.update == update)
        for name in done:
            del self._groups[name]
        return done

    def holding(self) -> list[str]:
        """Ids of groups that need not be sent again: complete, or in training."""
        return sorted(name for name, group in self._groups.items() if group.complete)

    def _of(self, update: int) -> list[_PlannedGroup]:
        return [group for group in self._groups.values() if group.update == update]


@dataclass(slots=True)
class LearnerProgress:
    """Progress of the learner that the stage has acknowledged, or of the checkpoint that it resumes from; HELLO states
    it, and the log continues from there."""

    updates: int = 0
    policy_version: int = -1
    """Version restored; -1 without a checkpoint."""
    durable_updates: int = 0
    unacknowledged: dict[int, list[str]] = field(default_factory=dict)
    """Consumed group ids by update, of the checkpoint: not acknowledged when it was made."""
    announced: tuple[int, int] | None = None
    """Policy version and updates of the newest VERSION of this process."""
    trained: dict[int, Trained] = field(default_factory=dict)
    """Facts that CONSUMED carried of those updates beside the ids; missing where it had none."""

    def apply(self, message: WireMessage) -> None:
        """The stage has applied a message of the log."""
        header = message.header
        if message.kind is Kind.CONSUMED:
            self.updates = header["update"] + 1
        elif message.kind is Kind.VERSION:
            self.announced = header["policy_version"], header["updates"]
        else:
            self.durable_updates = header["updates"]


class LearnerSession:
    """Connection state, assembled groups, and the messages of the learner."""

    def __init__(
        self, link: Link, groups: GroupsConfig, credit_groups: int, progress: LearnerProgress, limits: Limits
    ) -> None:
        self.progress = progress
        self.updates = progress.updates
        """Updates that the optimizer has made."""
        self.assembler = GroupAssembler(groups.groups_per_step)
        self.session = uuid.uuid4().hex
        self.epoch = 0
        """Number of this process among all learners of the run, from the first WELCOME on."""
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
        self._log = ControlLog()
        self._trained: dict[int, Trained] = {}
        """Facts of the updates in the log."""
        self._sending = anyio.Lock()
        self._link.describe(self.hello)

    def hello(self) -> dict[str, Any]:
        """Header of HELLO."""
        progress = self.progress
        consumed = [group for groups in self._consumed().values() for group in groups]
        return {
            "role": "learner",
            "name": "learner",
            "schema_version": SCHEMA_VERSION,
            "session": self.session,
            "epoch": self.epoch,
            "number": self._log.acknowledged,
            "updates": progress.updates,
            "announced": progress.announced,
            "durable_updates": progress.durable_updates,
            "credit_groups": self._credit_groups,
            "holding": [*self.assembler.holding(), *consumed],
            "consumed": [[update, ids] for update, ids in sorted(progress.unacknowledged.items())],
            "trained": [[update, facts.header()] for update, facts in sorted(progress.trained.items())],
        }

    def unacknowledged(self) -> tuple[dict[int, list[str]], dict[int, Trained]]:
        """Group ids and facts of the updates that the stage may not have recorded, for a checkpoint."""
        progress = self.progress
        return {**progress.unacknowledged, **self._consumed()}, {**progress.trained, **self._trained}

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
            elif event.message is not None and event.message.kind is Kind.ACK:
                await self._acknowledged(event.message.header)
            elif event.message is not None:
                self._handle(event.message)
            self._notify()

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
            elif message.kind is Kind.REFUSED and not header.get("final") and "greeting" not in header:
                raise TrainingError(
                    f"the replay stage refused what this learner told ({header.get('reason')}): it must start again "
                    "from its checkpoint"
                )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, WireError | TrainingError):
                raise
            raise WireError(
                f"{message.kind} from the replay stage is invalid: {type(error).__name__}: {error}"
            ) from error

    def _plan(self, header: Mapping[str, Any]) -> None:
        plan, update = decode_request(GroupPlan, header), int(header["update"])
        if plan.n_rollout != self._groups.n_rollout:
            raise TrainingError(
                f"expected groups of groups.n_rollout={self._groups.n_rollout} trajectories, got {plan.n_rollout} in "
                f"{plan.group_id}: learner and replay stage must read the same run file"
            )
        if update < self.updates:
            log.warning("%s is planned for update %d, which is already done: ignored", plan.group_id, update)
            return
        self.assembler.plan(plan, update)

    async def welcome(self) -> int:
        """Wait for the first WELCOME; the newest policy version that the stage has recorded (-1: none)."""
        while self.recorded_version is None:
            await self._changed.wait()
        return self.recorded_version

    async def ready(self, update: int) -> tuple[Group, ...]:
        """Wait for the groups of ``update``; they are in training from then on."""
        await self.peek(update)
        groups = self.assembler.take(update)
        self._notify()
        return groups

    async def peek(self, update: int) -> tuple[Group, ...]:
        """Wait for the groups of ``update`` without taking them: :meth:`ready` returns the same if nothing changes
        until then."""
        while not self.assembler.ready(update):
            await self._changed.wait()
        return self.assembler.peek(update)

    async def consumed(self, update: int, trained: Trained | None = None) -> None:
        """Report that the optimizer has made ``update``."""
        ids, facts = self.assembler.consumed(update), trained or Trained()
        self.updates = update + 1
        self._trained[update] = facts
        await self._tell(Kind.CONSUMED, {"update": update, "group_ids": ids, **facts.header()})

    async def _tell(self, kind: Kind, header: Mapping[str, Any]) -> None:
        self._log.append(kind, header)
        self._notify()
        await self._flush()

    async def _flush(self) -> None:
        """Send what waits in the log, in order."""
        async with self._sending:
            while (taken := self._log.take()) is not None:
                await self._send(taken[1])

    async def _send(self, message: WireMessage) -> None:
        try:
            await self._link.send(message)
        except TransportError as error:
            log.warning("%s was not sent (%s); it is repeated after the next connection", message.kind, error)

    async def changed(self) -> None:
        """Wait for any message."""
        await self._changed.wait()

    async def announce(self, policy_version: int, updates: int) -> None:
        """Report that the weights after ``updates`` updates are live as ``policy_version``."""
        await self._tell(Kind.VERSION, {"policy_version": policy_version, "updates": updates})

    async def checkpointed(self, updates: int) -> None:
        """Report that everything up to ``updates`` updates is durable here."""
        await self._tell(Kind.CHECKPOINTED, {"updates": updates})

    async def bye(self, reason: str) -> None:
        self._leaving = True
        await self._send(WireMessage(Kind.BYE, {"reason": reason}))

    async def acknowledged(self) -> None:
        """Wait until the stage has applied the whole log."""
        while len(self._log):
            await self._changed.wait()

    def _consumed(self) -> dict[int, list[str]]:
        """Group ids by update, of the log."""
        headers = [message.header for message in self._log.messages if message.kind is Kind.CONSUMED]
        return {header["update"]: header["group_ids"] for header in headers}

    async def _connected(self, welcome: WireMessage | None) -> None:
        header = welcome.header if welcome else {}
        self.connected, self.epoch = True, whole(header, "epoch")
        recorded = whole(header, "policy_version", -1)
        if self.recorded_version is None:
            self.recorded_version = recorded
            log.info("connected as learner process %d, the replay stage has recorded version %d", self.epoch, recorded)
        self.progress.unacknowledged, self.progress.trained = {}, {}
        self.assembler.keep(header.get("holding", ()))
        await self._resume(whole(header, "number"))

    async def _acknowledged(self, header: Mapping[str, Any]) -> None:
        number = whole(header, "number")
        if header.get("missing"):
            await self._resume(number)
        else:
            self._applied(number)

    def _applied(self, number: int) -> None:
        for message in self._log.acknowledge_through(number):
            self.progress.apply(message)
            if message.kind is Kind.CONSUMED:
                self._trained.pop(message.header["update"], None)

    async def _resume(self, number: int) -> None:
        """The stage has applied the log up to ``number``: send what follows."""
        if number < self._log.acknowledged:
            self._link.reconnect(f"the replay stage went back from message {self._log.acknowledged} to {number}")
            return
        self._applied(number)
        self._log.repeat()
        await self._flush()

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
