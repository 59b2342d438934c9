"""The replay stage as one pure state machine: events in, rows and messages out. It owns no task, socket, file or clock.

*consumes* what actors and learner say, scores and the time; *produces* (:meth:`StageCore.collect`) the rows that one
transaction must write and the messages that may be sent once it is durable. *waits for*: nothing. Whoever runs it
keeps this order: apply events, :meth:`StageCore.plan`, :meth:`StageCore.collect`, commit, send.

What the groups of an earlier process are worth to this one, whose run file may be another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.config import RunConfig
from pipeline.errors import WireError
from pipeline.experience.experience import Experience
from pipeline.schema import SCHEMA_VERSION
from pipeline.scorer.verdict import Verdict
from pipeline.stage.dispatch import Dispatch
from pipeline.stage.evaluation import Evaluations
from pipeline.stage.groups import Groups, ZeroVarianceFilter
from pipeline.stage.ingest import Ingest, ScoreNow
from pipeline.stage.leases import Leases, OrderDispatch
from pipeline.stage.replay_groups import ReplayGroups
from pipeline.stage.staleness import StalenessLedger, StalenessRule
from pipeline.stage.state import StageState, log
from pipeline.stage.update_report import UpdateReport
from pipeline.store.journal import Changes, Effect, Journal, Score, Send
from pipeline.store.payloads import PayloadRefCounts
from pipeline.store.records import CancelReason, GroupRecord, GroupState, Slot, TrajectoryRecord
from pipeline.store.snapshot import Snapshot
from pipeline.tasks.sampler import TaskSampler
from pipeline.tasks.source import TaskSplit
from pipeline.tasks.splits import Seeds, decode_splits
from pipeline.transport.protocol import Kind, Limits, WireMessage

Cancel = Callable[[GroupRecord, CancelReason], None]


def restore_batches(state: StageState) -> None:
    """Groups take the places in updates that they had."""
    for group in state.groups.values():
        if group.state is GroupState.PLACED:
            assert group.update is not None
            state.batches.restore_placed(group.number, group.update)
        elif group.open:
            state.batches.restore(group.number, group.admitted_update, ready=group.state is GroupState.READY)


def reconcile(state: StageState, meta: Mapping[str, Any], groups: Groups, learner: Dispatch, cancel: Cancel) -> None:
    """Cancel what cannot be trained any more, and have scored what has no reward yet."""
    config = state.config
    shape = {"n_rollout": config.groups.n_rollout, "groups_per_step": config.groups.groups_per_step}
    if meta.get("shape") not in (None, shape):
        _reshape(state, learner, cancel, all_groups=meta["shape"]["groups_per_step"] != shape["groups_per_step"])
    if meta.get("shape") != shape:
        state.journal.meta("shape", shape)
    for group in [g for g in state.groups.values() if g.open]:
        without = config.advantage.orders_greedy and group.greedy is None
        if group.task.environment not in config.environments:
            cancel(group, CancelReason.RECONFIGURED)
        elif without and group.state is GroupState.PLAYING:
            group.greedy = Slot()
            groups.want(group, group.greedy_index)
        elif without:
            cancel(group, CancelReason.RECONFIGURED)
    for group in state.groups.values():
        for slot in group.places:
            if slot.trajectory is not None and slot.trajectory.reward is None:
                state.journal.effect(Score(slot.trajectory, members=groups.unscored(slot.trajectory)))


def _reshape(state: StageState, learner: Dispatch, cancel: Cancel, *, all_groups: bool) -> None:
    """The run file changed what a batch is: groups of the old kind cannot be trained any more."""
    for group in list(state.groups.values()):
        if all_groups or group.n_rollout != state.config.groups.n_rollout:
            if group.open:
                cancel(group, CancelReason.RECONFIGURED)
            elif group.consumed:
                learner.forget(group)


class StageCore:
    """All rules of docs/PROTOCOL.md on the side of the replay stage.

    ``score_now`` scores without waiting (no user functions); None sends :class:`Score` effects instead.
    ``sources``: the train splits of environments with ``tasks_from``, ``held_out`` those that are evaluated; the core
    reads a row when its task is ordered.
    Raises :class:`ConfigurationError` when the snapshot is that of other data.
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
        meta = snapshot.meta
        rule = StalenessRule(config.staleness.max, config.groups.groups_per_step, config.run.total_steps)
        batches = StalenessLedger(rule, meta.get("consumed", 0), meta.get("live"))
        journal = Journal(snapshot.counters)
        self._s = StageState(
            config=config,
            batches=batches,
            journal=journal,
            payloads=PayloadRefCounts(journal),
            groups=snapshot.groups,
            next_group=meta.get("next_group", 0),
            next_seq=snapshot.next_seq,
            policy_version=meta.get("policy_version", -1),
            now=now,
            wall=wall,
        )
        self.sampler = TaskSampler(config.trained_environments, config.run.seed, meta.get("sampler"), sources)
        self.experience = Experience(
            config,
            entries=snapshot.entries,
            tasks=snapshot.tasks,
            state=meta.get("experience"),
            sizes=self.sampler.sizes,
        )
        self._s.payloads.restore(snapshot.groups.values(), snapshot.entries)
        self.replays = ReplayGroups(self._s, self.experience, self.sampler)
        self.evaluations = Evaluations(self._s, meta, held_out or {})
        self.groups = Groups(
            self._s, self.replays, ZeroVarianceFilter(self._s, meta.get("refilled")), self.evaluations.playing
        )
        self.leases = Leases(self._s, self.groups)
        self.arrivals = Ingest(self._s, self.groups, self.leases, _limits(config), score_now)
        self.learner = Dispatch(self._s, self.groups, self.replays, meta)
        self.learner.holds_back = self.evaluations.holds_back
        self._ordering = OrderDispatch(self._s, self.leases, self.groups, self.replays, self.evaluations)
        self._splits: dict[str, dict[str, Seeds]] | None = None
        restore_batches(self._s)
        self.groups.restore()
        self.leases.restore()
        reconcile(self._s, meta, self.groups, self.learner, self._cancel)

    @property
    def config(self) -> RunConfig:
        return self._s.config

    @property
    def batches(self) -> StalenessLedger:
        return self._s.batches

    @property
    def journal(self) -> Journal:
        return self._s.journal

    @property
    def policy_version(self) -> int:
        return self._s.policy_version

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version that sampled a trajectory still held for training."""
        return self._s.oldest_version

    @property
    def payloads(self) -> PayloadRefCounts:
        """Payloads that are still needed."""
        return self._s.payloads

    @property
    def records(self) -> Mapping[int, GroupRecord]:
        """Groups in memory, by number."""
        return self._s.groups

    @property
    def finished(self) -> bool:
        """Whether the run has made all its updates."""
        return self._s.batches.finished

    def set_time(self, now: float, wall: float) -> None:
        """Monotonic and Unix seconds for the events that follow."""
        self._s.now, self._s.wall = now, wall

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
            reason = str(error) if known else f"HELLO is not understood: {type(error).__name__}: {error}"
            log.warning("refused %s: %s", peer, reason)
            self.journal.count("peers.refused")
            self.journal.effect(Send(peer, Kind.REFUSED, {"reason": reason}))

    def peer_down(self, peer: str, *, left: bool) -> None:
        """A peer is silent, or ``left`` on purpose."""
        if not left:
            self.journal.count(f"peers.silent.{'learner' if peer == self.learner.peer else 'actor'}")
        self.leases.down(peer, left=left)
        self.learner.down(peer)

    def message(self, peer: str, message: WireMessage) -> None:
        """Any other message. One that cannot be understood is answered REFUSED; nothing else changes."""
        header = message.header
        try:
            if peer == self.learner.peer:
                self._learner_message(message)
            elif message.kind is Kind.TRAJECTORY and peer in self.leases.actors:
                self.arrivals.accept(peer, header.get("trajectory_id"), message.frames)
            else:
                raise WireError(f"{message.kind.value} was not expected from {peer}: say HELLO first")
        except (WireError, KeyError, TypeError, ValueError) as error:
            reason = f"{message.kind.value} is not understood: {type(error).__name__}: {error}"
            log.warning("%s: %s", peer, reason)
            self.journal.count("messages.refused")
            self.journal.effect(Send(peer, Kind.REFUSED, {"reason": reason}))

    def corrupt(self, peer: str, reason: str) -> None:
        """Bytes from ``peer`` that are no message at all."""
        log.warning("%s sent what is no message: %s", peer, reason)
        self.journal.count("messages.corrupt")

    def scored(self, record: TrajectoryRecord, verdict: Verdict) -> None:
        """The scorer answered."""
        self.arrivals.scored(record, verdict)

    def plan(self) -> None:
        """Everything that follows from the events and the time: expiry, cancellations, orders, dispatch."""
        s = self._s
        self.leases.tick()
        self._give_up()
        s.stopped += self.evaluations.plan()
        if self.finished:
            for group in [g for g in s.groups.values() if g.open]:
                self._cancel(group, CancelReason.FINISHED)
        else:
            for group in self.learner.dispatch():
                self._cancel(group, CancelReason.LATE)
        self._ordering.order()
        if s.stopped:
            stopped, s.stopped = s.stopped, []
            self.leases.ended(stopped, cancel="the evaluation ended")
        if self.learner.peer is not None and (news := self.evaluations.news()) is not None:
            self.journal.effect(Send(self.learner.peer, Kind.EVALUATION, news))

    def next_deadline(self) -> float | None:
        """When :meth:`plan` should be called even if nothing happens, on the clock of ``now``."""
        brake = self.groups.brake.until if self.groups.brake.holds(self._s.now) else None
        times = (self.leases.next_deadline(), self.evaluations.next_deadline(), brake)
        return min((time for time in times if time is not None), default=None)

    def collect(self) -> tuple[Changes, list[Effect]]:
        """Rows to write in one transaction, and what to send after it."""
        self.replays.record()
        return self.journal.collect()

    def _actor_up(self, peer: str, hello: Mapping[str, Any]) -> None:
        slots, holding = int(hello["slots"]), [str(i) for i in hello["holding"]]
        if slots < 1:
            raise WireError(f"expected slots of at least 1, got {slots}")
        self._learn(peer, decode_splits(hello.get("splits") or {}))
        header = {"credit_bytes": self._s.config.transport.credit_bytes, "policy_version": self._s.policy_version}
        self.journal.effect(Send(peer, Kind.WELCOME, header))
        self.leases.up(peer, slots, holding)

    def _learn(self, peer: str, splits: dict[str, dict[str, Seeds]]) -> None:
        """The first actor says which seeds its environments hold out; nothing is drawn before."""
        if self._splits is None:
            self._splits = splits
            self.sampler.learn(splits)
            self.evaluations.learn(splits)
        elif splits != self._splits:
            raise WireError(
                f"expected the splits of environments that the first actor has, got others from {peer}: every actor "
                "needs the same environment packages"
            )

    def _learner_up(self, peer: str, hello: Mapping[str, Any]) -> None:
        if self.learner.peer not in (None, peer):
            raise WireError(f"a learner is connected already under the name {self.learner.peer!r}: stop it first")
        self.learner.up(peer, hello)
        if self.evaluations.on:
            self.journal.effect(Send(peer, Kind.EVALUATION, self.evaluations.header()))

    def _learner_message(self, message: WireMessage) -> None:
        header = message.header
        match message.kind:
            case Kind.CONSUMED:
                self.learner.consumed(int(header["update"]), header["group_ids"], UpdateReport.read(header))
            case Kind.VERSION:
                self.learner.version(int(header["policy_version"]), int(header["updates"]))
            case Kind.CHECKPOINTED:
                self.learner.checkpointed(int(header["updates"]))
            case _:
                raise WireError(f"{message.kind.value} was not expected from the learner")

    def _give_up(self) -> None:
        while self.groups.given_up:
            group = self.groups.given_up.pop()
            if group.open:
                self._cancel(group, CancelReason.ATTEMPTS)

    def _cancel(self, group: GroupRecord, reason: CancelReason) -> None:
        self.leases.ended(self.groups.cancel(group, reason), cancel=f"its group was cancelled: {reason.value}")
        self.learner.cancelled(group)


def _limits(config: RunConfig) -> Limits:
    t = config.transport
    return Limits(t.header_bytes_max, t.message_bytes_max, t.frames_max, t.tokens_max, t.queue_messages_max)
