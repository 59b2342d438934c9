"""Read-only queries on a store, also while a stage writes it: filtered lists of trajectories, payloads, the pool.

Lists are filtered and sorted by SQLite on metadata; no payload is read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from pipeline.config.tasks import TRAIN
from pipeline.errors import StoreError
from pipeline.schema.record_file import Frames
from pipeline.store import tables
from pipeline.store.archive import ArchivedTrajectory

_POOLED = """
SELECT p.entropy, p.success_rate, p.uses, t.reward, d.header, d.token_ids, d.logprobs, d.spans
FROM pool p JOIN trajectories t USING (row_id) JOIN payloads d USING (row_id) ORDER BY p.saved"""

_ROLLOUTS = """
SELECT t.received_at, t.n_sampled, CASE WHEN t.state != 'baseline' THEN t.reward END
FROM trajectories t LEFT JOIN groups g USING (group_number)
WHERE t.group_number >= 0 AND t.state != 'evaluated' AND coalesce(g.state, '') NOT IN ('evaluating', 'evaluated')
ORDER BY t.received_at"""


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """One read-only transaction on the store at ``path``: nothing that a stage writes meanwhile is seen.

    Raises :class:`StoreError` when there is no store, or it is not ours, damaged, or of another version.
    """
    if not tables.STORE.exists(path):
        raise StoreError(f"there is no replay store at {path}: has the run been started?")
    try:
        connection = tables.STORE.connect(path, read_only=True)
        try:
            connection.execute("BEGIN")
            tables.check_tables(connection, path)
            yield connection
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise StoreError(f"the replay store {path} could not be read: {error}") from error


def origin(connection: sqlite3.Connection) -> str:
    """A name for the history of this store: two stores never share it, a restarted one keeps it."""
    return str(meta(connection).get("store", ""))


def meta(connection: sqlite3.Connection) -> dict[str, Any]:
    return {key: orjson.loads(value) for key, value in connection.execute("SELECT key, value FROM meta")}


def pooled(connection: sqlite3.Connection) -> Iterator[ArchivedTrajectory]:
    """Every trajectory of the pool, oldest first."""
    name = origin(connection)
    for entropy, success_rate, uses, reward, *frames in connection.execute(_POOLED):
        marks = {"entropy": entropy, "success_rate": success_rate, "uses": uses, "reward": reward, "origin": name}
        yield ArchivedTrajectory(marks, tuple(frames))


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout for training that the stage received, whatever became of it."""

    received_at: float
    n_sampled: int
    reward: float | None
    """None: it has none (it failed, or is not scored yet), or it is a greedy baseline."""


def rollouts(path: Path) -> list[Rollout]:
    """All rollouts for training of the store at ``path``, in the order in which they came. Imported trajectories and
    rollouts of evaluations are not among them. Raises :class:`StoreError`, also where the oldest are gone."""
    with reading(path) as connection:
        if below := meta(connection).get("rolled_below"):
            raise StoreError(
                f"expected the rollouts of all groups in {path}, got none of the first {below:,}: the store keeps "
                "those of the newest 20,000 groups, so the tokens that a longer run has generated are not known"
            )
        return [Rollout(*row) for row in connection.execute(_ROLLOUTS)]


_GROUPS = """
SELECT g.group_number, g.state != 'cancelled', sum(max(o.ended_at - o.issued_at, 0))
FROM groups g LEFT JOIN orders o ON o.group_number = g.group_number AND o.ended_at IS NOT NULL
WHERE g.state IN ('trained', 'zero_variance') AND g.update_number BETWEEN :first AND :last
    OR g.state = 'cancelled' AND g.reason = 'zero_variance' AND g.ended_at BETWEEN :since AND :until
GROUP BY g.group_number, o.slot ORDER BY g.group_number, o.slot"""
_BUSY = """
SELECT coalesce(sum(min(coalesce(ended_at, :until), :until) - max(issued_at, :since)), 0)
FROM orders WHERE issued_at < :until AND coalesce(ended_at, :until) > :since"""


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """A group that has ended, by the seconds that actors took for it."""

    seconds: tuple[float, ...]
    """Time of each slot, from the first order to the end of the last. Empty: a stored group that came back whole."""
    trained: bool = True
    """An update was made from it, with its rollouts or without; False: another group took its place."""


def order_times(path: Path, updates: Span, times: Sequence[tuple[float, float]]) -> tuple[list[GroupTimes], float]:
    """Groups of ``updates``, and those that were replaced for equal rewards meanwhile, and the seconds that all orders
    were out. ``times``: from and until which Unix times the run was alive. Raises :class:`StoreError`."""
    values = {"first": updates.low, "last": updates.high, "since": times[0][0], "until": times[-1][1]}
    found: dict[int, tuple[bool, list[float]]] = {}
    with reading(path) as connection:
        for number, trained, seconds in connection.execute(_GROUPS, values):
            slots = found.setdefault(number, (bool(trained), []))[1]
            slots += [] if seconds is None else [seconds]
        busy = [connection.execute(_BUSY, {"since": a, "until": b}).fetchone()[0] for a, b in times]
    return [GroupTimes(tuple(s), trained) for trained, s in found.values() if s or trained], float(sum(busy))


_ORDERS = """
SELECT t.trajectory_id, o.issued_at, CASE WHEN t.state = 'trained' OR t.reason = 'zero_variance' THEN (
    SELECT max(x.received_at) FROM trajectories x
    WHERE x.group_number = g.group_number AND (x.state = 'trained' OR x.reason = 'zero_variance')) END
FROM groups g JOIN trajectories t USING (group_number) JOIN orders o USING (group_number, slot, serial)
WHERE g.update_number = ? AND g.state IN ('trained', 'zero_variance')"""


def orders_of_update(path: Path, update: int) -> dict[str, tuple[float, float | None]]:
    """By id of each trajectory that was ordered for the groups of an update: Unix times at which its order was issued,
    and at which its group was complete (None: without it). Raises :class:`StoreError`."""
    with reading(path) as connection:
        return {name: (issued, complete) for name, issued, complete in connection.execute(_ORDERS, (update,))}


Sort = Literal[
    "newest", "oldest", "step", "reward", "tokens", "turns", "seconds", "entropy", "version", "age", "replays"
]
_ORDER: Mapping[Sort, tuple[str, bool]] = {
    "newest": ("received_at", True),
    "oldest": ("received_at", False),
    "step": ("step", True),
    "reward": ("reward", True),
    "tokens": ("n_sampled", True),
    "turns": ("n_turns", True),
    "seconds": ("duration_seconds", True),
    "entropy": ("entropy", True),
    "version": ("nullif(version_max, -1)", True),
    "age": ("age_insert", True),
    "replays": ("n_replays", True),
}
"""Column, and whether the largest comes first."""
_ROWS = """
WITH replayed AS (
    SELECT r.row_id, count(*) AS n_replays, group_concat(g.update_number + 1) AS steps
    FROM group_replays r JOIN groups g ON g.group_number = r.group_number
    WHERE r.chosen = 1 AND g.state = 'trained' AND g.update_number IS NOT NULL GROUP BY r.row_id
), rows AS (
    SELECT t.row_id, t.trajectory_id, t.group_number, t.state, t.reason, t.status, t.reward, t.rewards, t.n_turns,
        t.n_tokens, t.n_sampled, t.version_min, t.version_max, t.duration_seconds, t.actor, t.received_at, t.failure,
        t.entropy, t.age_insert, t.n_bytes, coalesce(g.task, k.task) AS task,
        CASE WHEN t.state = 'trained' THEN g.update_number + 1 END AS step,
        CASE WHEN t.state = 'evaluated' OR g.state IN ('evaluating', 'evaluated')
            THEN g.update_number END AS evaluation,
        coalesce(x.n_replays, 0) AS n_replays, x.steps
    FROM trajectories t LEFT JOIN groups g ON g.group_number = t.group_number LEFT JOIN pool p ON p.row_id = t.row_id
    LEFT JOIN tasks k ON k.task_id = p.task_id LEFT JOIN replayed x ON x.row_id = t.row_id
)"""
_TASK = "json_extract(CAST(task AS TEXT), '$.{}')"


@dataclass(frozen=True, slots=True)
class Span:
    """Whole numbers from ``low`` to ``high``, both included; None: no bound."""

    low: int | None = None
    high: int | None = None

    def __contains__(self, value: int) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@dataclass(frozen=True, slots=True)
class Filters:
    """Conditions on trajectories; all must hold. Defaults do not filter."""

    trajectory_id: str | None = None
    step: Span | None = None
    """Trained in such an update, fresh or replayed. The first step is 1."""
    evaluation: Span | None = None
    """Rollouts of the evaluation after such a number of updates."""
    split: str | None = None
    """Split of the task: ``train``, or one that is held out."""
    version: Span | None = None
    """A token was sampled by such a policy version."""
    reward_min: float | None = None
    reward_max: float | None = None
    task: str | None = None
    """A part of the task id, or a pattern of the whole with ``*`` and ``?``."""
    environment: str | None = None
    status: str | None = None
    """Status of the episode (``complete``, ``truncated``, ``error``, ``aborted``), or its state here
    (``trained``, ``held``, ``dropped``, ``baseline``, ``evaluated``, ``imported``)."""
    failure: str | None = None
    """A part of the failure (boundary, kind, message, traceback) or of why it was dropped, in any case of letters;
    empty: any failure."""
    replayed: bool = False
    """Trained again from the pool at least once."""
    kept: frozenset[str] | None = None
    """Tokens are in the store, or kept elsewhere of these trajectory ids."""
    among: frozenset[str] | None = None
    """Trajectory ids."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One trajectory as the store knows it."""

    row_id: int
    trajectory_id: str
    group_number: int
    state: str
    reason: str
    status: str
    reward: float | None
    rewards: Mapping[str, float | None]
    n_turns: int
    n_tokens: int
    n_sampled: int
    version_min: int
    """-1: nothing was sampled."""
    version_max: int
    duration_seconds: float
    actor: str
    received_at: float
    failure: Mapping[str, str] | None
    entropy: float | None
    """Mean over sampled tokens, nats: estimated when it came."""
    age: int
    n_bytes: int
    task_id: str
    environment: str
    step: int | None
    """Step of the update that trained it fresh; the first is 1."""
    evaluation: int | None = None
    """Updates in the weights that it evaluates; None: it was made for training."""
    replays: tuple[int, ...] = ()
    """Steps that trained it again."""


def list_store(path: Path, filters: Filters, sort: Sort, reverse: bool, limit: int) -> tuple[list[Listed], int]:
    """The first ``limit`` that fit, and how many fit. Raises :class:`StoreError`."""
    column, largest_first = _ORDER[sort]
    where, values = _conditions(filters)
    down = "DESC" if largest_first != reverse else "ASC"
    with reading(path) as connection:
        connection.create_function("failed_with", 3, _failed_with, deterministic=True)
        (count,) = connection.execute(f"{_ROWS} SELECT count(*) FROM rows {where}", values).fetchone()
        rows = connection.execute(
            f"{_ROWS} SELECT * FROM rows {where} ORDER BY {column} IS NULL, {column} {down}, row_id {down} LIMIT ?",
            (*values, limit),
        )
        return [_listed(row) for row in rows], int(count)


def stored_frames(path: Path, row_ids: Sequence[int]) -> Iterator[tuple[int, Frames]]:
    """Payloads of those that the stage still holds. Raises :class:`StoreError`."""
    with reading(path) as connection:
        for row_id in row_ids:
            row = connection.execute(
                "SELECT header, token_ids, logprobs, spans FROM payloads WHERE row_id = ?", (row_id,)
            ).fetchone()
            if row is not None:
                yield row_id, tuple(row)


def _conditions(f: Filters) -> tuple[str, list[Any]]:
    parts: list[str] = []
    values: list[Any] = []

    def add(condition: str, *given: Any) -> None:
        parts.append(condition)
        values.extend(given)

    if f.trajectory_id is not None:
        add("trajectory_id = ?", f.trajectory_id)
    if f.step is not None:
        low, high = _bounds(f.step)
        add(
            "(step BETWEEN ? AND ? OR row_id IN (SELECT row_id FROM group_replays JOIN groups USING (group_number) "
            "WHERE chosen = 1 AND state = 'trained' AND update_number + 1 BETWEEN ? AND ?))",
            low, high, low, high,
        )  # fmt: skip
    if f.evaluation is not None:
        add("evaluation BETWEEN ? AND ?", *_bounds(f.evaluation))
    if f.split == TRAIN:
        add("evaluation IS NULL")
    elif f.split is not None:
        # as pipeline.tasks names what is held out: environment/split/number
        add(f"instr({_TASK.format('task_id')}, {_TASK.format('environment')} || '/' || ? || '/') = 1", f.split)
    if f.version is not None:
        low, high = _bounds(f.version)
        add("version_max >= ? AND version_min BETWEEN 0 AND ?", low, high)
    if f.reward_min is not None:
        add("reward >= ?", f.reward_min)
    if f.reward_max is not None:
        add("reward <= ?", f.reward_max)
    if f.task is not None:
        task = _TASK.format("task_id")
        if any(c in f.task for c in "*?"):
            add(f"{task} GLOB ?", f.task.replace("[", "[[]"))
        else:
            add(f"instr({task}, ?) > 0", f.task)
    if f.environment is not None:
        add(f"{_TASK.format('environment')} = ?", f.environment)
    if f.status is not None:
        add("(status = ? OR state = ?)", f.status, f.status)
    if f.failure is not None:
        add("(failure IS NOT NULL OR (state = 'dropped' AND reason IN ('failed', 'unscored', 'aborted')))")
        if f.failure:
            add("failed_with(failure, reason, ?)", f.failure)
    if f.kept is not None:
        add(
            "(trajectory_id IN (SELECT value FROM json_each(?)) OR row_id IN (SELECT row_id FROM payloads))",
            orjson.dumps(sorted(f.kept)).decode(),
        )
    if f.among is not None:
        add("trajectory_id IN (SELECT value FROM json_each(?))", orjson.dumps(sorted(f.among)).decode())
    if f.replayed:
        add("n_replays > 0")
    return (f"WHERE {' AND '.join(parts)}" if parts else ""), values


def _failed_with(failure: bytes | None, reason: str, text: str) -> bool:
    """True if ``text`` is in the parts of a failure, as they are listed, or in the reason. SQLite itself knows neither
    JSON's escapes nor capital letters beyond ASCII."""
    said = (*orjson.loads(failure or b"{}").values(), reason)
    return text.casefold() in ": ".join(map(str, said)).casefold()


def _bounds(span: Span) -> tuple[int, int]:
    return (-1 if span.low is None else span.low), (2**62 if span.high is None else span.high)


def _listed(row: sqlite3.Row | tuple[Any, ...]) -> Listed:
    (row_id, name, group, state, reason, status, reward, rewards, n_turns, n_tokens, n_sampled, low, high, seconds,
     actor, received_at, failure, entropy, age, n_bytes, task, step, evaluation, _, steps) = row  # fmt: skip
    about = orjson.loads(task) if task else {}
    return Listed(
        row_id, name, group, state, reason, status, reward, orjson.loads(rewards), n_turns, n_tokens, n_sampled,
        low, high, seconds, actor, received_at, orjson.loads(failure) if failure else None, entropy, age, n_bytes,
        str(about.get("task_id", "")), str(about.get("environment", "")), step, evaluation,
        tuple(sorted(int(s) for s in steps.split(","))) if steps else (),
    )  # fmt: skip
