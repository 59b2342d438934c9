"""Audit of a run from outside: what its actors and its learner saw (:mod:`pipeline.runtime.witness`) against the store.

:func:`audit` is a pure function of a :class:`Witness` and a :class:`StoredOutcomes`. The weights that count are those
of the last learner process: its own updates, after those of the process whose checkpoint it resumed from.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from pipeline.store.ledger import GROUP_OPEN
from pipeline.store.queries import meta, reading
from pipeline.store.records import CancelReason, Drop, OrderKey, group_id, parse_group_id

EXAMPLES = 3
"""Ids that a problem names."""


@dataclass(frozen=True, slots=True)
class MadeRollout:
    """A trajectory as its actor sent it."""

    usable: bool
    environment: float | None
    """The environment's score."""
    digests: str


@dataclass(frozen=True, slots=True)
class TrainedRollout:
    """A trajectory of an update, as the learner's rows had it."""

    id: str
    replayed: bool
    reward: float | None
    environment: float | None
    digests: str | None
    """None: its rows are not those of its rollout."""
    version_max: int
    tokens: int
    tokens_in_loss: int


@dataclass(frozen=True, slots=True)
class TrainedUpdate:
    """One update of one learner process."""

    update: int
    version: int
    """Version of the weights before it."""
    skipped: bool
    """An optimizer step was not finite: its rows are in no weights, as the run says itself."""
    groups: Mapping[str, Sequence[tuple[TrainedRollout, ...]]]
    """By id: each time that the group was in the batch."""


@dataclass(slots=True)
class LearnerProcess:
    """Record of one learner process, in order."""

    at: int
    """Time at which it resumed."""
    updates: int
    """Updates of the checkpoint that it resumed from; 0: it began with the initial model."""
    version: int
    trained: list[TrainedUpdate] = field(default_factory=list)
    saving: list[tuple[int, int]] = field(default_factory=list)
    """Time and updates of each checkpoint that it began to write."""
    published: list[tuple[int, int, int]] = field(default_factory=list)
    """Time, version and updates."""


@dataclass(slots=True)
class Witness:
    """Everything that actors and learner recorded."""

    made: dict[str, list[MadeRollout]] = field(default_factory=lambda: defaultdict(list))
    """By id. An order that came twice may be answered twice; the store takes one of the answers."""
    acknowledged: set[str] = field(default_factory=set)
    learners: list[LearnerProcess] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    """Files with a line that is none."""

    def read(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """The lines of one process."""
        learner: LearnerProcess | None = None
        for line in lines:
            match line["what"]:
                case "made":
                    made = MadeRollout(line["usable"], line["environment"], line["digests"])
                    self.made[line["id"]].append(made)
                case "acknowledged":
                    self.acknowledged.update(line["ids"])
                case "resumed":
                    learner = LearnerProcess(line["at"], line["updates"], line["version"])
                    self.learners.append(learner)
                case "trained":
                    assert learner is not None
                    groups = defaultdict(list)
                    for group in line["groups"]:
                        groups[group["id"]].append(tuple(TrainedRollout(**rollout) for rollout in group["rollouts"]))
                    learner.trained.append(TrainedUpdate(line["update"], line["version"], line["skipped"], groups))
                case "saving":
                    assert learner is not None
                    learner.saving.append((line["at"], line["updates"]))
                case "published":
                    assert learner is not None
                    learner.published.append((line["at"], line["version"], line["updates"]))


def read_witness(folder: Path) -> Witness:
    """All files in ``folder``. A last line without an end was not written."""
    witness = Witness()
    for file in sorted(folder.glob("*.jsonl")):
        try:
            witness.read(orjson.loads(line) for line in file.read_bytes().split(b"\n")[:-1])
        except (orjson.JSONDecodeError, KeyError, TypeError, AssertionError) as error:
            witness.unreadable.append(f"{file.name} ({type(error).__name__}: {error})")
    witness.learners.sort(key=lambda learner: learner.at)
    return witness


@dataclass(frozen=True, slots=True)
class StoredGroupOutcome:
    """State of a group in the store."""

    state: str
    update: int | None
    reason: str = ""
    trained: frozenset[str] = frozenset()
    """Its fresh trajectories that count as trained."""
    replayed: frozenset[str] = frozenset()
    """Trajectories from the pool that it was trained with."""
    dropped: bool = False
    """Its rewards have zero variance and it is not trained."""


@dataclass(frozen=True, slots=True)
class StoredRolloutOutcome:
    """States of an order and its trajectory in the store; None: there is no such row."""

    order: str | None
    trajectory: str | None = None
    reward: float | None = None
    reason: str = ""


@dataclass(slots=True)
class StoredOutcomes:
    """Outcomes of groups and trajectories. :meth:`read` now and then, because rows of old groups are rolled up
    (``RETAIN_GROUPS`` of the stage), and once at the end."""

    groups: dict[int, StoredGroupOutcome] = field(default_factory=dict)
    rollouts: dict[str, StoredRolloutOutcome] = field(default_factory=dict)
    imported: set[str] = field(default_factory=set)
    """Trajectories of the pool that came from a file."""
    updates: int = 0
    rolled_below: int = 0
    """Groups with smaller numbers are rolled up; those that were not read before are not compared."""
    _low: int = 0

    def read(self, path: Path, *, end: bool = False) -> None:
        """Groups that have ended for good since the last time; at the ``end`` all that there are, again. Raises
        :class:`pipeline.errors.StoreError`."""
        with reading(path) as connection:
            facts = meta(connection)
            self.updates, self.rolled_below = facts.get("consumed", 0), facts.get("rolled_below", 0)
            query = "SELECT trajectory_id FROM trajectories WHERE group_number < 0"
            self.imported.update(name for (name,) in connection.execute(query))
            low = 0 if end else self._low
            query = (
                "SELECT group_number, state, update_number, reason, dropped, kept FROM groups WHERE group_number >= ?"
            )
            rows = connection.execute(query, (low,)).fetchall()
            wanted = {n: row for n, *row in rows if end or (not row[-1] and n not in self.groups)}
            if wanted:
                self._read_groups(connection, wanted, min(wanted), max(wanted))
            self._low = min((n for n, *row in rows if row[-1]), default=low)

    def _read_groups(
        self, connection: sqlite3.Connection, wanted: Mapping[int, Sequence[Any]], low: int, high: int
    ) -> None:
        between = "group_number BETWEEN ? AND ?"
        trained, replayed = defaultdict(set), defaultdict(set)
        orders = {
            OrderKey(*key).text: state
            for *key, state in connection.execute(
                f"SELECT group_number, slot, serial, state FROM orders WHERE {between}", (low, high)
            )
            if key[0] in wanted
        }
        self.rollouts |= {name: StoredRolloutOutcome(state) for name, state in orders.items()}
        query = f"SELECT group_number, trajectory_id, state, reward, reason FROM trajectories WHERE {between}"
        for number, name, state, reward, reason in connection.execute(query, (low, high)):
            if number in wanted:
                self.rollouts[name] = StoredRolloutOutcome(orders.get(name), state, reward, reason)
                if state == "trained":
                    trained[number].add(name)
        query = (
            "SELECT r.group_number, t.trajectory_id FROM group_replays r JOIN trajectories t USING (row_id) "
            f"WHERE r.chosen = 1 AND r.{between}"
        )
        for number, name in connection.execute(query, (low, high)):
            replayed[number].add(name)
        for number, (state, update, reason, dropped, _) in wanted.items():
            facts = frozenset(trained[number]), frozenset(replayed[number]), bool(dropped)
            self.groups[number] = StoredGroupOutcome(state, update, reason, *facts)

    def unread(self, number: int | None) -> bool:
        """True for a group that was rolled up before it was read."""
        return number is not None and number < self.rolled_below and number not in self.groups


Problems = defaultdict[str, list[str]]
"""Ids by what is wrong with them."""


def audit(witness: Witness, stored: StoredOutcomes, environment_weight: float | None = None) -> list[str]:
    """Everything that does not agree, in words; empty when all does. ``environment_weight``: factor of the
    environment's score, where nothing else is in a reward."""
    problems = Problems(list)
    for name in witness.unreadable:
        problems["witness files with a line that cannot be read"].append(name)
    _audit_arrivals(witness, stored, environment_weight, problems)
    updates = _updates_of_the_weights(witness.learners, problems)
    _audit_versions(witness.learners, problems)
    _audit_groups(updates, stored, problems)
    first: dict[str, int] = {}
    for update in updates:
        for name, occurrences in update.groups.items():
            for rollout in (rollout for rollouts in occurrences for rollout in rollouts):
                if not rollout.replayed and first.setdefault(rollout.id, update.update) != update.update:
                    problems["trajectories trained in two updates"].append(rollout.id)
                _audit_rollout(rollout, update, witness.made, stored, environment_weight, problems)
            if len(occurrences) > 1:
                problems["groups trained twice in one update"].append(f"{name} in update {update.update}")
    return [
        f"{what}: {len(names)} ({', '.join(names[:EXAMPLES])}{', …' if len(names) > EXAMPLES else ''})"
        for what, names in problems.items()
    ]


def unread_groups(witness: Witness, stored: StoredOutcomes) -> int:
    """Groups of trained updates that were rolled up before they were read, so that they are not compared."""
    names = {name for learner in witness.learners for update in learner.trained for name in update.groups}
    return sum(stored.unread(parse_group_id(name)) for name in names)


def _audit_arrivals(
    witness: Witness, stored: StoredOutcomes, environment_weight: float | None, problems: Problems
) -> None:
    for name in sorted(witness.acknowledged):
        key, outcome, answers = OrderKey.parse(name), stored.rollouts.get(name), witness.made.get(name, ())
        if key is not None and stored.unread(key.group):
            continue
        group = None if key is None else stored.groups.get(key.group)
        if outcome is None or (outcome.order == "delivered" and outcome.trajectory is None):
            problems["trajectories acknowledged and not in the store"].append(name)
        elif outcome.order in ("failed", "aborted"):
            if all(answer.usable for answer in answers):
                problems["trajectories acknowledged that count as failed, and were not"].append(name)
        elif outcome.order != "delivered":
            problems[f"trajectories acknowledged and not in the store, their orders {outcome.order}"].append(name)
        elif outcome.trajectory == "held" and (group is None or group.state not in (*GROUP_OPEN, "evaluating")):
            problems["trajectories acknowledged that wait for groups that have ended"].append(name)
        elif outcome.trajectory == "dropped" and group is not None:
            scored = environment_weight is not None and all(answer.environment is not None for answer in answers)
            unfounded: dict[str, bool] = {
                Drop.FAILED: True,
                Drop.ABORTED: True,
                Drop.UNSCORED: scored,
                Drop.CANCELLED: group.state not in ("cancelled", "evaluated"),
                Drop.ZERO_VARIANCE: not group.dropped and group.reason != CancelReason.ZERO_VARIANCE,
            }
            if unfounded.get(outcome.reason):
                problems[f"trajectories acknowledged and dropped as {outcome.reason}, which they were not"].append(name)
    for name, outcome in stored.rollouts.items():
        if outcome.trajectory is not None and name not in witness.made:
            problems["trajectories in the store that no actor made"].append(name)


def _updates_of_the_weights(learners: Sequence[LearnerProcess], problems: Problems) -> list[TrainedUpdate]:
    """Updates in the weights of the last process."""
    histories: list[list[TrainedUpdate]] = []
    for learner in learners:
        n = learner.updates
        history: list[TrainedUpdate] = []
        if n:
            writers = [
                (at, written)
                for other, written in zip(learners, histories, strict=False)
                for at, updates in other.saving
                if updates == n and at < learner.at
            ]
            history = max(writers, key=lambda writer: writer[0], default=(0, []))[1][:n]
            if len(history) != n:
                problems["checkpoints that were resumed from and that no process wrote"].append(f"of {n} updates")
        if [update.update for update in learner.trained] != list(range(n, n + len(learner.trained))):
            problems["learner processes whose updates do not follow each other"].append(f"from {n} updates on")
        histories.append([*history, *learner.trained])
    return histories[-1] if histories else []


def _audit_versions(learners: Sequence[LearnerProcess], problems: Problems) -> None:
    """A version is one more after each update, never goes back, and always names the same weights."""
    newest: tuple[int, int] = (-1, 0)
    for learner in learners:
        published = [(v, n) for other in learners for at, v, n in other.published if at < learner.at]
        newest = max([newest, *published])
        same = newest == (learner.version, learner.updates)
        if learner.version < newest[0] or (learner.version == newest[0] and not same):
            problems["learners that began with a version that others were published as"].append(f"version {newest[0]}")
        expected = learner.version
        for update in learner.trained:
            if update.version != expected:
                problems["updates from another version than the one before them gave"].append(f"update {update.update}")
            expected = update.version + 1
        for _, version, updates in learner.published:
            if version - learner.version != updates - learner.updates:
                problems["versions published of other weights"].append(f"version {version} of update {updates}")


def _audit_groups(updates: Sequence[TrainedUpdate], stored: StoredOutcomes, problems: Problems) -> None:
    """The learner's last updates may be unknown to the store: the run was stopped."""
    if stored.updates > len(updates):
        problems[f"updates in the store and not in the weights, which have {len(updates)}"].append(f"{stored.updates}")
    where = {name: update.update for update in updates for name in update.groups}
    for update in updates:
        for name, (rollouts, *_) in update.groups.items():
            number = parse_group_id(name)
            if stored.unread(number):
                continue
            group = None if number is None else stored.groups.get(number)
            known = group is not None and group.state == "trained" and group.update == where[name]
            if update.update != where[name]:
                problems["groups trained in two updates"].append(name)
            elif update.update < stored.updates and not known:
                problems["groups trained that the store does not count as trained in that update"].append(name)
            elif group is not None and known:
                fresh = {rollout.id for rollout in rollouts if not rollout.replayed}
                if fresh != group.trained or {r.id for r in rollouts if r.replayed} != group.replayed:
                    problems["groups trained with other trajectories than the store counts"].append(name)
    for number, group in stored.groups.items():
        if group.state == "trained" and group_id(number) not in where:
            problems["groups that the store counts as trained and that are in no update"].append(group_id(number))


def _audit_rollout(
    rollout: TrainedRollout,
    update: TrainedUpdate,
    made: Mapping[str, Sequence[MadeRollout]],
    stored: StoredOutcomes,
    environment_weight: float | None,
    problems: Problems,
) -> None:
    name = rollout.id
    if not rollout.tokens or (rollout.tokens_in_loss != rollout.tokens and not update.skipped):
        problems["trajectories of an update whose tokens were not in its loss"].append(name)
    if rollout.version_max > update.version:
        problems["trajectories with tokens of a version to come"].append(name)
    outcome = stored.rollouts.get(name)
    if outcome is not None and outcome.reward != rollout.reward:
        problems["trajectories trained with another reward than the store has"].append(name)
    if rollout.replayed and name in stored.imported:
        return
    answers = made.get(name, ())
    if not answers:
        problems["trajectories trained that no actor made"].append(name)
        return
    trained = None if rollout.digests is None else set(rollout.digests.split())
    if trained is not None and all(trained != set(answer.digests.split()) for answer in answers):
        problems["trajectories trained with other tokens than their actor sent"].append(name)
    if all(rollout.environment != answer.environment for answer in answers):
        problems["trajectories trained with another score than their environment gave"].append(name)
    score = rollout.environment
    if environment_weight is not None and score is not None and rollout.reward != 0.0 + environment_weight * score:
        problems["trajectories trained with another reward than their score gives"].append(name)
