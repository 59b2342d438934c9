"""Records of groups, orders and trajectories, each in one named state; the policy version of each update."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from pipeline.schema import GroupPlan, Task, Trajectory
from pipeline.schema.record_file import Buffer, n_bytes
from pipeline.schema.trajectory import NO_VERSION
from pipeline.store.replay_records import Candidate, PoolEntry

_ORDER_ID = re.compile(r"g(\d{6,18})\.(\d{1,9})\.(\d{1,9})")
_GROUP_ID = re.compile(r"g(\d{6,18})")


class GroupState(StrEnum):
    COLLECTING = "collecting"
    """Some rollouts are missing or not scored."""
    READY = "ready"
    """Complete and scored; no update chosen yet."""
    PLACED = "placed"
    """Promised to one update; sent, or to be sent, to the learner."""
    TRAINED = "trained"
    """Terminal: an update was made from it."""
    CANCELLED = "cancelled"
    """Terminal; ``reason`` says why."""
    ZERO_VARIANCE = "zero_variance"
    """Terminal: its rewards were all equal, and its update was made without it (``groups.zero_variance: drop``)."""
    EVALUATING = "evaluating"
    """Its task is held out: its rollouts are for an evaluation and it is in no batch."""
    EVALUATED = "evaluated"
    """Terminal: an evaluation has what there is of it. ``reason`` says why rollouts are missing, if they are."""


class OrderState(StrEnum):
    LEASED = "leased"
    """In flight: an actor has it."""
    DELIVERED = "delivered"
    """Terminal: its trajectory is stored."""
    FAILED = "failed"
    """Terminal: the rollout failed, or its trajectory could not be understood."""
    ABORTED = "aborted"
    """Terminal: the actor ended it on purpose."""
    EXPIRED = "expired"
    """Terminal: no answer in time, or its actor has gone."""
    CANCELLED = "cancelled"
    """Terminal: its group was cancelled."""


class TrajectoryState(StrEnum):
    HELD = "held"
    """Stored; waits for its score, its group or its update."""
    TRAINED = "trained"
    """Terminal: an update was made from it."""
    DROPPED = "dropped"
    """Terminal: ``reason`` is one of :class:`Drop`."""
    BASELINE = "baseline"
    """Terminal: a greedy rollout that was scored. Its reward is what its group is compared with; it is never trained
    and its payload is not kept."""
    EVALUATED = "evaluated"
    """Terminal: a rollout of a held-out task that was scored. Its payload is not kept."""
    IMPORTED = "imported"
    """Came from a file instead of an order: it lives in the pool only."""


class Drop(StrEnum):
    """Reason for which a trajectory that arrived is not trained."""

    DUPLICATE = "duplicate"
    """The trajectory was already stored."""
    FAILED = "failed"
    """The rollout failed (status error), or nothing to train was sampled in it."""
    ABORTED = "aborted"
    UNSCORED = "unscored"
    """No reward could be computed."""
    CANCELLED = "cancelled"
    """Its group was cancelled (before or after it arrived)."""
    EXPIRED = "expired"
    """The order had expired before the trajectory arrived."""
    ENDED = "ended"
    """Its group ended before the last checkpoint and is forgotten."""
    UNKNOWN = "unknown"
    """No such order was ever issued here, or it is another actor's."""
    CORRUPT = "corrupt"
    """The bytes are not a valid trajectory, or not the ordered one."""
    SCHEMA = "schema"
    """Its values break the data model, or it has another schema version."""
    UNPUBLISHED = "unpublished"
    """Some of its tokens have a policy version that the learner cannot have published."""
    ZERO_VARIANCE = "zero_variance"
    """All rewards of its group were equal (``groups.zero_variance``)."""


class CancelReason(StrEnum):
    """Reason for which a group is not trained."""

    ATTEMPTS = "attempts"
    """One of its slots failed ``groups.attempts_max`` times."""
    LATE = "late"
    """Over the staleness bound, with ``staleness.late: drop``."""
    FINISHED = "finished"
    """The run has made all its updates."""
    RECONFIGURED = "reconfigured"
    """The run file changed group size, batch size or environments while the group was open."""
    UNTRAINED = "untrained"
    """The learner made its update without it."""
    ZERO_VARIANCE = "zero_variance"
    """Its rewards were all equal, and a new group replaces it (``groups.zero_variance: refill``)."""
    RESTORED = "restored"
    """The store is an older copy, and an update that it does not know may have been made from the group."""
    LOST = "lost"
    """Its update is in no weights any more: the checkpoint that covered it is damaged. Its rollouts are not kept."""


class OrderKey(NamedTuple):
    """An order, and the trajectory that answers it: ``g000012.3.0`` is group 12, slot 3, first order of the slot."""

    group: int
    slot: int
    serial: int

    @property
    def text(self) -> str:
        return f"{group_id(self.group)}.{self.slot}.{self.serial}"

    @classmethod
    def parse(cls, text: object) -> OrderKey | None:
        """None for anything that is not an order id."""
        match = _ORDER_ID.fullmatch(text) if isinstance(text, str) else None
        key = cls(*map(int, match.groups())) if match else None
        return key if key is not None and key.text == text else None


def group_id(number: int) -> str:
    return f"g{number:06d}"


def parse_group_id(text: object) -> int | None:
    match = _GROUP_ID.fullmatch(text) if isinstance(text, str) else None
    return int(match.group(1)) if match else None


@dataclass(slots=True)
class OrderRecord:
    """One lease."""

    key: OrderKey
    actor: str
    attempt: int
    policy_version: int
    issued_at: float
    """Unix seconds."""
    state: OrderState = OrderState.LEASED
    reason: str = ""
    failure: bool = False
    """True if it used up one of the slot's attempts."""
    ended_at: float | None = None
    deadline: float = 0.0
    """Clock of the running process, seconds; not stored."""


@dataclass(slots=True, frozen=True)
class Facts:
    """Metadata of a trajectory: everything the stage needs without its arrays."""

    status: str
    n_turns: int
    n_tokens: int
    n_sampled: int
    version_min: int
    version_max: int
    duration_seconds: float
    actor: str
    n_bytes: int
    failure: Mapping[str, str] | None = None
    entropy: float | None = None
    """``-mean(log mu)`` over sampled tokens, nats: an unbiased estimate of the mean entropy of the distributions that
    they were drawn from. None: not recorded, or not finite."""
    replayable: bool = True
    """False where it may not enter the replay pool: its training prompt is not that of the rollout, or its
    log-probabilities were not recorded."""


@dataclass(slots=True)
class TrajectoryRecord:
    """One trajectory that was stored."""

    row_id: int
    """Order of arrival; key of the payload in the store."""
    key: OrderKey
    facts: Facts
    received_at: float
    """Unix seconds."""
    state: TrajectoryState = TrajectoryState.HELD
    reason: str = ""
    reward: float | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    samples: int = 0
    """Times it was sent to a learner."""
    age_insert: int = 0
    """Versions that its oldest token was behind the newest published one when it came."""
    saved: int | None = None
    """Number of its save into the replay pool, or of the save of its whole group; None: never saved. It may have left
    since."""

    def pool_entry(self, task: Task, trajectory_id: str | None = None) -> PoolEntry:
        """A trajectory that has its reward, as replay may store it. ``trajectory_id`` of one that answers no order."""
        facts = self.facts
        assert self.reward is not None, self
        return PoolEntry(
            self.row_id, trajectory_id or self.key.text, task, -1, self.reward, facts.n_turns, facts.n_tokens,
            facts.n_sampled, facts.n_bytes, facts.version_min, facts.version_max, facts.duration_seconds, facts.entropy,
            replayable=facts.replayable,
        )  # fmt: skip


@dataclass(slots=True)
class Slot:
    """One fresh rollout of a group: at most one order out, at most one trajectory in."""

    serial: int = 0
    """Orders issued for it so far."""
    failures: int = 0
    leased: bool = False
    trajectory: TrajectoryRecord | None = None


@dataclass(slots=True)
class GroupRecord:
    """One group, open or kept until a checkpoint covers its update: ``len(slots)`` fresh rollouts and ``k`` replays."""

    group_number: int
    task: Task
    admitted_update: int
    planned_at: float
    """Unix seconds."""
    slots: list[Slot]
    state: GroupState = GroupState.COLLECTING
    update: int | None = None
    task_index: int | None = None
    """Index of its task in the evaluation that it belongs to; None: it is for training."""
    late: bool = False
    dropped: bool = False
    """Its rewards have zero variance: its trajectories are dropped, and its update is made without it."""
    reason: str = ""
    ended_at: float | None = None
    orders: dict[OrderKey, OrderRecord] = field(default_factory=dict)
    k: int = 0
    """Replayed members that the group is trained with."""
    replays: list[Candidate] = field(default_factory=list)
    """Candidates for these, the stage's own choice first."""
    greedy: Slot | None = None
    """Slot of the greedy rollout, whose reward is the baseline of the group; None: none is ordered."""

    @property
    def evaluation(self) -> bool:
        """True if it belongs to an evaluation. Then ``update`` is the number of updates in the evaluated weights."""
        return self.state in (GroupState.EVALUATING, GroupState.EVALUATED)

    @property
    def group_id(self) -> str:
        return group_id(self.group_number)

    @property
    def n_fresh(self) -> int:
        return len(self.slots)

    @property
    def n_rollout(self) -> int:
        return len(self.slots) + self.k

    @property
    def n_bytes(self) -> int:
        """Bytes of the payloads of its fresh rollouts and its replays."""
        fresh = sum(slot.trajectory.facts.n_bytes for slot in self.slots if slot.trajectory is not None)
        return fresh + sum(replay.entry.n_bytes for replay in self.replays)

    def plan(self) -> GroupPlan:
        """Plan for the learner, with everything that the group holds from the pool."""
        candidates = tuple(replay.entry.trajectory_id for replay in self.replays)
        return GroupPlan(
            self.group_id,
            self.task,
            self.n_rollout,
            self.n_fresh,
            replay_ids=candidates[: self.k],
            candidates=candidates,
            attempt=self.attempt,
            admitted_update=self.admitted_update,
            baseline=self.baseline,
            left_out=self.dropped,
        )

    @property
    def attempt(self) -> int:
        """Number of rollouts that were ordered again."""
        return sum(max(0, slot.serial - 1) for slot in self.slots)

    @property
    def complete(self) -> bool:
        return all(slot.trajectory is not None and slot.trajectory.reward is not None for slot in self.all_slots)

    @property
    def all_slots(self) -> list[Slot]:
        """Every slot that is ordered: the fresh ones and the greedy one."""
        return [*self.slots, self.greedy] if self.greedy is not None else self.slots

    @property
    def greedy_index(self) -> int:
        """Index of the greedy slot: behind all of the group."""
        return self.n_rollout

    def slot(self, index: int) -> Slot:
        """The slot with this index in orders. Raises :class:`IndexError`."""
        if self.greedy is not None and index == self.greedy_index:
            return self.greedy
        return self.slots[index]

    def is_greedy(self, key: OrderKey) -> bool:
        """True if the order is that of the greedy rollout."""
        return self.greedy is not None and key.slot == self.greedy_index

    @property
    def baseline(self) -> float | None:
        """Reward of the greedy rollout, once it is scored."""
        return None if self.greedy is None or self.greedy.trajectory is None else self.greedy.trajectory.reward

    @property
    def consumed(self) -> bool:
        """True if its update was made, with it or without."""
        return self.state in (GroupState.TRAINED, GroupState.ZERO_VARIANCE)

    @property
    def open(self) -> bool:
        return self.state in (GroupState.COLLECTING, GroupState.READY, GroupState.PLACED)


class CoveredGroup(NamedTuple):
    """A group whose update a checkpoint covers: what is known of it without its rows."""

    update: int
    dropped: bool
    n_fresh: int
    k: int


class TrainedVersions:
    """``version(update)`` is kept where it is not one more than that of the update before.

    >>> versions = TrainedVersions()
    >>> [versions.note(update, version) for update, version in ((0, 1), (1, 2), (2, 7), (3, 8))]
    [True, False, True, False]
    >>> versions.state(), versions.at(1), versions.at(3)
    ([[0, 1], [2, 7]], 2, 8)
    """

    def __init__(self, state: Iterable[Sequence[int]] | None = None) -> None:
        self._points = [(int(update), int(version)) for update, version in state or ()]

    def note(self, update: int, version: int) -> bool:
        """``update`` was trained from the weights of ``version``; what is known of later updates is forgotten, they
        will be made again. Returns whether :meth:`state` changed."""
        before = list(self._points)
        del self._points[bisect.bisect_left(self._points, (update,)) :]
        if self.at(update) != version:
            self._points.append((update, version))
        return self._points != before

    def at(self, update: int) -> int | None:
        """The version that an update was trained from; None for one before the first that was noted. Of an update that
        was not noted it is the version it would have without a break."""
        i = bisect.bisect_right(self._points, update, key=lambda point: point[0])
        if i == 0:
            return None
        first, version = self._points[i - 1]
        return version + update - first

    def state(self) -> list[list[int]]:
        """JSON that :meth:`__init__` takes back."""
        return [list(point) for point in self._points]


def facts_of(trajectory: Trajectory, frames: Sequence[Buffer]) -> Facts:
    """Metadata of a trajectory and its payload frames."""
    version_min, version_max = trajectory.version_range() or (NO_VERSION, NO_VERSION)
    logprobs = np.frombuffer(frames[2], dtype="<f4")
    mean = float(np.add.reduce(logprobs, dtype=np.float64)) / len(logprobs) if len(logprobs) else math.nan
    return Facts(
        status=trajectory.status.value,
        n_turns=len(trajectory.turns),
        n_tokens=n_bytes(frames[1]) // 4,
        n_sampled=n_bytes(frames[2]) // 4,
        version_min=version_min,
        version_max=version_max,
        duration_seconds=trajectory.timings.duration_seconds,
        actor=trajectory.actor_id,
        n_bytes=sum(map(n_bytes, frames)),
        failure=asdict(trajectory.failure) if trajectory.failure else None,
        entropy=-mean if trajectory.recorded and math.isfinite(mean) else None,
        replayable=trajectory.recorded and (trajectory.lessons is None or trajectory.lessons.keep),
    )
