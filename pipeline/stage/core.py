"""The replay stage as one pure state machine: events in, rows and messages out. It owns no task, socket, file or clock.

*consumes* messages of actors and learner, scores and the time; *produces* (:meth:`StageCore.collect`) the rows that
one transaction must write and the messages that may be sent once it is durable. *waits for*: nothing. The caller keeps
this order: apply events, :meth:`StageCore.plan`, :meth:`StageCore.collect`, commit, send.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pipeline.config import RunConfig
from pipeline.config.stage import StageConfig
from pipeline.errors import ConfigurationError, ImpossibleClaim, WireError
from pipeline.replay.replay import Replay
from pipeline.schema import SCHEMA_VERSION
from pipeline.schema.counters import Count
from pipeline.schema.orders import whole
from pipeline.stage.dispatch import Dispatch
from pipeline.stage.engine_watch import EngineWatch
from pipeline.stage.evaluation_rollouts import EvaluationRollouts
from pipeline.stage.evaluation_schedule import Evaluations
from pipeline.stage.group_records import Clock, GroupRecords, SharedState
from pipeline.stage.groups import Groups, ZeroVarianceFilter
from pipeline.stage.ingest import Ingest, ScoreNow
from pipeline.stage.learner_control import LearnerControl
from pipeline.stage.leases import Leases, OrderDispatch
from pipeline.stage.replay_groups import ReplayGroups
from pipeline.stage.staleness import StalenessLedger, StalenessRule
from pipeline.store.effects import Effect, Score, Send
from pipeline.store.journal import Changes, Journal, PayloadRefCounts
from pipeline.store.ledger import FAILURES
from pipeline.store.records import CancelReason, Facts, GroupRecord, GroupState, Slot
from pipeline.store.replay_records import PoolEntry
from pipeline.store.snapshot import Snapshot
from pipeline.tasks.sampler import TaskSampler
from pipeline.tasks.source import TaskSplit
from pipeline.tasks.splits import Seeds, decode_splits
from pipeline.transport.messages import CREDIT_BYTES, Kind, WireMessage

log = logging.getLogger(__name__)

SLOTS_FACTOR_MAX = 4
"""An actor may offer so many times ``actor.concurrency`` slots: its run file may be an older one."""
COMPLAINT_SECONDS = 1.0
"""Shortest time between two lines of the log about wrong messages."""
RETAIN_GROUPS = 20_000
"""Newest groups whose rows stay in the store, for ``afterplay show``. Rows of older ones that are trained, cancelled or
evaluated, and covered by a checkpoint, become totals of the ledger."""
ROLL_UP_GROUPS = 256
"""Groups whose rows are rolled up in one transaction, which takes some ten milliseconds."""


class StageCore:
    """All rules of docs/PROTOCOL.md on the side of the replay stage.

    ``score_now`` scores without waiting (no user functions); None sends :class:`Score` effects instead.
    ``sources``: the train splits of environments with ``tasks_from``, ``held_out`` those that are evaluated; the core
    reads a row when its task is ordered.
    Raises :class:`ConfigurationError` when the snapshot is that of other data, or has what cannot be delivered.
    """

    def __init__(
        self,
        config: RunConfig,
        snapshot: Snapshot | None = None,
        *,
        now: float = 0.0,
        wall: float = 0.0,
        score_now: ScoreNow | None = None,
        sources: Mapping[str, TaskSplit] | None = None,
        held_out: Mapping[str, TaskSplit] | None = None,
    ) -> None:
        snapshot = snapshot or Snapshot()
        _check_limits(config.stage, snapshot)
        meta = snapshot.meta
        rule = StalenessRule(config.staleness.max, config.groups.groups_per_step, config.run.total_steps)
        clock, journal = Clock(now, wall), Journal(snapshot.counters, meta.get(FAILURES))
        self.config, self.journal, self._clock = config, journal, clock
        self.staleness = StalenessLedger(
            rule, meta.get("consumed", 0), meta.get("live"), meta.get("policy_version", -1)
        )
        self.records = GroupRecords(snapshot.groups, meta.get("next_group", 0), journal, clock, snapshot.covered)
        """Groups in memory, by number."""
        self.payloads = PayloadRefCounts(journal)
        """Payloads that are still needed."""
        self.payloads.restore(snapshot.groups.values(), snapshot.entries, snapshot.stored_groups)
        shared = SharedState(config, journal, clock, self.staleness, self.records, self.payloads)
        self.sampler = TaskSampler(config.trained_environments, config.run.seed, meta.get("sampler"), sources)
        self.replay = Replay(
            config,
            entries=snapshot.entries,
            groups=snapshot.stored_groups,
            tasks=snapshot.tasks,
            state=meta.get("replay"),
            updates=meta.get("replay_updates"),
            sizes=self.sampler.sizes,
        )
        self.replays = ReplayGroups(shared, self.replay, self.sampler)
        rollouts = EvaluationRollouts(shared)
        self.evaluations = Evaluations(shared, rollouts, meta, held_out or {})
        zero_variance = ZeroVarianceFilter(shared, meta.get("refilled"))
        self.groups = Groups(shared, self.replays, zero_variance, rollouts, snapshot.next_row_id)
        self.leases = Leases(shared, self.groups)
        self.engine_watch = EngineWatch(shared, self.leases)
        self.ingest = Ingest(shared, self.groups, self.leases, score_now)
        self.dispatch = Dispatch(shared, self.groups, self.replays, self.evaluations.holds_back, meta)
        self.control = LearnerControl(shared, self.dispatch, meta)
        self._order_dispatch = OrderDispatch(shared, self.leases, self.groups, self.replays, self.evaluations)
        self._splits: dict[str, dict[str, Seeds]] | None = None
        self._complaint_after = float("-inf")
        self._complaints_left_out = 0
        self._restore_staleness()
        self.groups.restore()
        self.leases.restore()
        self._reconcile(meta)
        if snapshot.transactions_lost:
            self.groups.cancel_unplaced()
            journal.meta("transactions_lost", 0)
        self._rolled_below = snapshot.rolled_below
        self._first_needed = (-1, -1), 0
        """Durable updates and number of covered groups, and the first group whose rows a learner may need that goes
        back from there."""

    @property
    def policy_version(self) -> int:
        """Newest published version; -1 before the first."""
        return self.staleness.policy_version

    @property
    def finished(self) -> bool:
        """True if the run has made all its updates."""
        return self.staleness.finished

    def set_time(self, now: float, wall: float) -> None:
        """Monotonic and Unix seconds for the events that follow."""
        self._clock.now, self._clock.wall = now, wall

    def peer_up(self, peer: str, hello: Mapping[str, Any]) -> None:
        """A HELLO. Wrong ones are answered REFUSED with the reason."""
        try:
            role = hello.get("role")
            if hello.get("schema_version") != SCHEMA_VERSION:
                raise WireError(
                    f"expected schema version {SCHEMA_VERSION}, got {hello.get('schema_version')!r}: "
                    "run the same Afterplay everywhere"
                )
            if role == "actor":
                self._actor_up(peer, hello)
            elif role == "learner":
                self._learner_up(peer, hello)
            else:
                raise WireError(f"expected role actor or learner, got {role!r}")
        except (WireError, KeyError, TypeError, ValueError) as error:
            known = isinstance(error, WireError)
            reason = str(error) if known else f"invalid HELLO: {type(error).__name__}: {error}"
            self._refuse(peer, Count.PEERS_REFUSED, error, {"reason": reason, "greeting": hello.get("greeting")})

    def peer_down(self, peer: str, *, left: bool) -> None:
        """A peer is silent, or ``left`` on purpose."""
        if not left:
            self.journal.count(Count.PEERS_SILENT_LEARNER if peer == self.dispatch.peer else Count.PEERS_SILENT_ACTOR)
        self.leases.down(peer, left=left)
        self.dispatch.down(peer)

    def corrupt(self, peer: str, reason: str) -> None:
        """Count and log an invalid message from ``peer``."""
        self._complain(f"{peer} sent an invalid message: {reason[:1000]}")
        self.journal.count(Count.MESSAGES_CORRUPT)

    def message(self, peer: str, message: WireMessage) -> None:
        """Any other message. One that cannot be understood is answered REFUSED; nothing else changes."""
        header = message.header
        try:
            if peer == self.dispatch.peer:
                self.control.message(peer, message)
            elif message.kind is Kind.TRAJECTORY and peer in self.leases.actors:
                self.ingest.accept(peer, header.get("trajectory_id"), message.frames)
            elif message.kind is Kind.SLOTS and peer in self.leases.actors:
                self.leases.actors[peer].slots = self._slots(header)
            elif message.kind is Kind.ENGINES and peer in self.leases.actors:
                self.engine_watch.seen(peer, header)
            else:
                raise WireError(f"{message.kind.value} from {peer} came before its HELLO")
        except (WireError, KeyError, TypeError, ValueError) as error:
            reason = f"invalid {message.kind.value}: {type(error).__name__}: {error}"
            self._refuse(peer, Count.MESSAGES_REFUSED, error, {"reason": reason})

    def plan(self) -> None:
        """Everything that follows from the events and the time: expiry, cancellations, orders, dispatch."""
        self.leases.tick()
        self.engine_watch.plan()
        if self.groups.paused and self.dispatch.free_covered(0):
            self.journal.shrink()
        while self.groups.given_up:
            group, reason = self.groups.given_up.pop()
            if group.open:
                self._cancel(group, reason)
        self.evaluations.plan(self.control.announced)
        if self.finished:
            for group in [g for g in self.records.values() if g.open]:
                self._cancel(group, CancelReason.FINISHED)
        else:
            self._send_groups()
        ready = self.staleness.ready
        self._order_dispatch.order()
        if self.staleness.ready > ready and not self.finished:  # stored groups that come back whole
            self._send_groups()
        if stopped := self.evaluations.take_stopped():
            self.leases.ended(stopped, cancel="the evaluation ended")
        if self.dispatch.peer is not None and (news := self.evaluations.news()) is not None:
            self.journal.effect(Send(self.dispatch.peer, Kind.EVALUATION, news))

    def _send_groups(self) -> None:
        for group in self.dispatch.send_groups():
            self._cancel(group, CancelReason.LATE)

    def next_deadline(self) -> float | None:
        """Time at which :meth:`plan` should be called even if nothing happens, on the clock of ``now``."""
        backoff = self.groups.backoff.until if self.groups.backoff.holds(self._clock.now) else None
        times = (
            self.leases.next_deadline(), self.evaluations.next_deadline(), self.engine_watch.next_deadline(), backoff
        )  # fmt: skip
        return min((time for time in times if time is not None), default=None)

    def collect(self) -> tuple[Changes, list[Effect]]:
        """Rows to write in one transaction, and what to send after it."""
        self.replays.record()
        self._roll_up()
        return self.journal.collect()

    def _roll_up(self) -> None:
        """Let rows of groups that ended long ago be rolled up, some groups at a time, oldest first. Those of updates
        that an older checkpoint may lack stay: a learner may have to go back to it."""
        due = self.records.next_group - RETAIN_GROUPS
        if due - self._rolled_below < ROLL_UP_GROUPS:
            return
        known = self.dispatch.durable_updates, len(self.records.covered)
        if self._first_needed[0] != known:
            behind = known[0] - self.config.checkpoint.keep * self.config.checkpoint.every
            oldest = min([behind, *self.dispatch.checkpoints])
            needed = (number for number, group in self.records.covered.items() if group.update >= oldest)
            self._first_needed = known, min(needed, default=due)
        below = min(due, min(self.records, default=due), self._first_needed[1])
        if below > self._rolled_below:
            self._rolled_below = min(below, self._rolled_below + ROLL_UP_GROUPS)
            for number in [n for n in self.records.covered if n < self._rolled_below]:
                del self.records.covered[number]
            self.journal.meta("rolled_below", self._rolled_below)

    def _restore_staleness(self) -> None:
        """Groups are assigned to the updates that they had."""
        for group in self.records.values():
            if group.state is GroupState.PLACED:
                assert group.update is not None
                self.staleness.restore_placed(group.group_number, group.update)
            elif group.open:
                ready = group.state is GroupState.READY
                self.staleness.restore(group.group_number, group.admitted_update, ready=ready)

    def _reconcile(self, meta: Mapping[str, Any]) -> None:
        """Groups of an earlier process, whose run file may have been another: cancel what cannot be trained any more,
        and have scored what has no reward yet."""
        config = self.config
        shape = {"n_rollout": config.groups.n_rollout, "groups_per_step": config.groups.groups_per_step}
        if meta.get("shape") not in (None, shape):
            self._reshape(all_groups=meta["shape"]["groups_per_step"] != shape["groups_per_step"])
        if meta.get("shape") != shape:
            self.journal.meta("shape", shape)
        for group in [g for g in self.records.values() if g.open]:
            lacks_greedy = config.advantage.orders_greedy and group.greedy is None
            if group.task.environment not in config.environments:
                self._cancel(group, CancelReason.RECONFIGURED)
            elif lacks_greedy and group.state is GroupState.COLLECTING:
                group.greedy = Slot()
                self.groups.enqueue_slot(group, group.greedy_index)
            elif lacks_greedy:
                self._cancel(group, CancelReason.RECONFIGURED)
        for group in self.records.values():
            for slot in group.all_slots:
                if slot.trajectory is not None and slot.trajectory.reward is None:
                    members = self.groups.unscored(slot.trajectory)
                    self.journal.effect(Score(slot.trajectory, members=members))

    def _reshape(self, *, all_groups: bool) -> None:
        """The run file changed what a batch is: groups of the old kind cannot be trained any more."""
        for group in list(self.records.values()):
            if all_groups or group.n_rollout != self.config.groups.n_rollout:
                if group.open:
                    self._cancel(group, CancelReason.RECONFIGURED)
                elif group.consumed:
                    self.dispatch.forget(group)

    def _actor_up(self, peer: str, hello: Mapping[str, Any]) -> None:
        slots = self._slots(hello)
        holding = [str(i) for i in hello["holding"]]
        self._learn(peer, decode_splits(hello.get("splits") or {}))
        header = {"credit_bytes": CREDIT_BYTES, "policy_version": self.staleness.policy_version}
        self.journal.effect(Send(peer, Kind.WELCOME, {**header, "greeting": hello.get("greeting")}))
        self.leases.up(peer, slots, holding)
        self.engine_watch.up(peer)

    def _slots(self, header: Mapping[str, Any]) -> int:
        return whole(header, "slots", 0, SLOTS_FACTOR_MAX * self.config.actor.concurrency)

    def _learn(self, peer: str, splits: dict[str, dict[str, Seeds]]) -> None:
        """The first actor says which seeds its environments hold out; nothing is drawn before."""
        if self._splits is None:
            self._splits = splits
            self.sampler.learn(splits)
            self.replay.learn(self.sampler)
            self.evaluations.learn(splits)
        elif splits != self._splits:
            raise WireError(
                f"expected the splits of environments that the first actor has, got others from {peer}: every actor "
                "needs the same environment packages"
            )

    def _learner_up(self, peer: str, hello: Mapping[str, Any]) -> None:
        if self.dispatch.peer not in (None, peer):
            raise WireError(f"a learner is connected already under the name {self.dispatch.peer!r}: stop it first")
        self.control.up(peer, hello)
        if self.config.evaluation.on and self.dispatch.peer == peer:
            self.journal.effect(Send(peer, Kind.EVALUATION, self.evaluations.header()))

    def _refuse(self, peer: str, count: Count, error: Exception, answer: dict[str, Any]) -> None:
        """Nothing else of the message has an effect."""
        self._complain(f"refused {peer}: {answer['reason'][:1000]}")
        self.journal.count(count)
        self.journal.count(Count.MESSAGES_IMPOSSIBLE, int(isinstance(error, ImpossibleClaim)))
        self.journal.effect(Send(peer, Kind.REFUSED, answer))

    def _complain(self, text: str) -> None:
        """Log, at a bounded rate: any peer can cause this as often as it likes."""
        if self._clock.now < self._complaint_after:
            self._complaints_left_out += 1
            return
        more = f" ({self._complaints_left_out} more since the last line)" if self._complaints_left_out else ""
        log.warning("%s%s", text, more)
        self._complaint_after, self._complaints_left_out = self._clock.now + COMPLAINT_SECONDS, 0

    def _cancel(self, group: GroupRecord, reason: CancelReason) -> None:
        self.leases.ended(self.groups.cancel(group, reason), cancel=f"its group was cancelled: {reason.value}")
        self.dispatch.cancelled(group)


def _check_limits(limits: StageConfig, snapshot: Snapshot) -> None:
    """Raises :class:`ConfigurationError` where the run file lowered a limit below what the store has: the learner would
    wait for a group of which one trajectory is never delivered."""
    groups = snapshot.groups.values()
    held: list[Facts | PoolEntry] = [*snapshot.entries]
    held += [slot.trajectory.facts for group in groups for slot in group.all_slots if slot.trajectory is not None]
    held += [replay.entry for group in groups for replay in group.replays]
    held += [member for stored in snapshot.stored_groups for member in stored.members]
    for key, limit, largest in (
        ("message_bytes_max", limits.message_bytes_max, max((one.n_bytes for one in held), default=0)),
        ("tokens_max", limits.tokens_max, max((one.n_tokens for one in held), default=0)),
    ):
        if largest > limit:
            raise ConfigurationError(
                f"stage.{key}: expected at least {largest}, the size of a stored trajectory, got {limit}: it could not "
                "be delivered to the learner. Raise it"
            )
