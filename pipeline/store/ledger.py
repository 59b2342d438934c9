"""Counters of a run and their audit: every order, trajectory and group is in exactly one state."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.schema.counters import FAILED, SUCCEEDED
from pipeline.store.queries import meta, reading

ORDER_ENDS = ("delivered", "failed", "aborted", "expired", "cancelled")

GROUP_OPEN = ("collecting", "ready", "placed")

ACCOUNTS = ("orders", "trajectories", "groups", "pool", "stored_groups", "replays", "tasks", "evaluations")
"""Parts of the ledger: first parts of the names of :class:`Count`."""

COUNTED_ROWS = (
    *(f"orders.{state}" for state in (*ORDER_ENDS, "in_flight")),
    *(f"trajectories.{state}" for state in ("trained", "held", "baseline", "evaluated")),
    *(f"trajectories.dropped.{reason}" for reason in ("failed", "aborted", "unscored", "zero_variance")),
    *("groups.trained", "groups.zero_variance", "evaluations.tasks_ended", "replays.trained", "pool.imported"),
)
"""Counters that rows can be compared with."""

POOLS = ("pool", "stored_groups")

_ROWS = """
SELECT CASE state WHEN 'leased' THEN 'orders.in_flight' ELSE 'orders.' || state END, count(*) FROM orders GROUP BY 1
UNION ALL SELECT 'groups.' || state, count(*) FROM groups GROUP BY 1
UNION ALL SELECT CASE state WHEN 'dropped' THEN 'trajectories.dropped.' || reason WHEN 'imported' THEN 'pool.imported'
    ELSE 'trajectories.' || state END, count(*) FROM trajectories GROUP BY 1
UNION ALL SELECT 'replays.trained', count(*) FROM group_replays WHERE chosen = 1
UNION ALL SELECT iif(name = 'trajectories.imported', 'pool.imported', name), value FROM rolled_up
UNION ALL SELECT 'evaluations.tasks_ended', count(*) FROM groups WHERE state = 'evaluated'
UNION ALL SELECT 'evaluations.tasks_ended', value FROM rolled_up WHERE name = 'groups.evaluated'
UNION ALL SELECT 'pool', count(*) FROM pool WHERE row_id NOT IN (SELECT row_id FROM payloads)
UNION ALL SELECT 'stored_groups', count(*) FROM stored_groups, json_each(members) m
    WHERE m.value NOT IN (SELECT row_id FROM payloads)"""
"""Rows by the counter that counts them, and rows of the pools that lack a payload."""

FAILURES = "failures"
"""Key of the store's facts: the newest message of each counter of failures."""


@dataclass(slots=True)
class EnvironmentOutcomes:
    """Rollouts of one environment that ended, evaluated ones included."""

    succeeded: int = 0
    causes: dict[str, int] = field(default_factory=dict)
    """Failed rollouts by cause, ``boundary: kind``."""
    messages: dict[str, str] = field(default_factory=dict)
    """The newest message by cause, with the line of the user's code."""

    @property
    def failed(self) -> int:
        return sum(self.causes.values())

    @property
    def commonest(self) -> str:
        """The most frequent cause; empty where none failed."""
        return max(self.causes, key=lambda cause: self.causes[cause], default="")

    def describe(self, environment: str) -> str:
        """``environment maze: 12 of 64 rollouts failed, most often with environment step: ValueError (9 times); the
        newest: no such move (maze.py, line 12, in step)``. For one with failures."""
        n = self.succeeded + self.failed
        share = f"{self.failed} of {n}" if self.succeeded else f"all {n}"
        often = f" ({self.causes[self.commonest]} times)" if len(self.causes) > 1 else ""
        message = self.messages.get(self.commonest)
        newest = f"; the newest: {message}" if message else ""
        return f"environment {environment}: {share} rollouts failed, most often with {self.commonest}{often}{newest}"


def outcomes_of(
    counters: Mapping[str, int], messages: Mapping[str, str] | None = None
) -> dict[str, EnvironmentOutcomes]:
    """By environment, from ``counters`` with the prefixes :data:`SUCCEEDED` and :data:`FAILED`, and ``messages`` of the
    same names."""
    found: defaultdict[str, EnvironmentOutcomes] = defaultdict(EnvironmentOutcomes)
    for name, value in counters.items():
        if name.startswith(SUCCEEDED):
            found[name.removeprefix(SUCCEEDED)].succeeded = value
        elif name.startswith(FAILED):
            environment, _, cause = name.removeprefix(FAILED).partition("/")
            found[environment].causes[cause] = value
            found[environment].messages[cause] = (messages or {}).get(name, "")
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counts since the start of the run, over all restarts.

    Keys are those of :class:`Count` without the part before the first dot: ``orders["issued"]``. Beside them ``groups``
    has how many are open now (:data:`GROUP_OPEN` and ``evaluating``), and ``pool`` how many entries it has (``held``).
    """

    orders: Mapping[str, int] = field(default_factory=dict)
    trajectories: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    pool: Mapping[str, int] = field(default_factory=dict)
    stored_groups: Mapping[str, int] = field(default_factory=dict)
    replays: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, int] = field(default_factory=dict)
    evaluations: Mapping[str, int] = field(default_factory=dict)
    outcomes: Mapping[str, EnvironmentOutcomes] = field(default_factory=dict)
    """Rollouts by environment."""
    updates: int = 0
    policy_version: int = -1
    rows: Mapping[str, int] = field(default_factory=dict)
    """The same, counted from the rows of the store and the totals of those that were rolled up, by name of
    :class:`Count`. Empty: not counted."""

    def audit(self) -> list[str]:
        """Every sum that does not add up, in words; empty when all do."""
        o, t, g, p, s = self.orders, self.trajectories, self.groups, self.pool, self.stored_groups
        ended = t.get("trained", 0) + t.get("baseline", 0) + t.get("evaluated", 0) + _sum(t, "dropped.")
        e = self.evaluations
        cancelled = _sum(g, "cancelled.")
        sums = [
            ("orders issued", o.get("issued", 0), sum(o.get(k, 0) for k in ORDER_ENDS) + o.get("in_flight", 0)),
            ("trajectories received", t.get("received", 0), t.get("held", 0) + ended),
            (
                "groups planned",
                g.get("planned", 0),
                g.get("trained", 0) + g.get("zero_variance", 0) + cancelled + sum(g.get(k, 0) for k in GROUP_OPEN),
            ),
            (
                "held-out tasks planned",
                e.get("tasks_planned", 0),
                e.get("tasks_ended", 0) + e.get("tasks_cancelled", 0) + g.get("evaluating", 0),
            ),
            ("pool entries", p.get("saved", 0) + p.get("imported", 0), p.get("held", 0) + _sum(p, "evicted.")),
            ("stored groups", s.get("saved", 0), s.get("held", 0) + _sum(s, "evicted.")),
        ]
        wrong = [
            f"{what}: {total}, but their states add up to {parts}" for what, total, parts in sums if total != parts
        ]
        return wrong + self._audit_rows()

    def _audit_rows(self) -> list[str]:
        wrong = [f"{n} rows of {table} without a payload" for table in POOLS if (n := self.rows.get(table, 0))]
        for account, state in (name.split(".", 1) for name in COUNTED_ROWS if self.rows):
            counted, rows = getattr(self, account).get(state, 0), self.rows.get(f"{account}.{state}", 0)
            if counted != rows:
                wrong.append(f"{account} {state}: counted {counted}, rows {rows}")
        return wrong


def read_ledger(path: Path, *, rows: bool = False) -> Ledger:
    """The accounts in the store at ``path``; ``rows`` also counts them from the rows (slower on long runs).

    Reads in one transaction. Raises :class:`StoreError` when there is no store or it is not ours.
    """
    with reading(path) as connection:
        counters = dict(connection.execute("SELECT name, value FROM counters"))
        facts = meta(connection)
        groups = dict(connection.execute("SELECT state, count(*) FROM groups WHERE kept = 1 GROUP BY state"))
        sizes = connection.execute("SELECT (SELECT count(*) FROM pool), (SELECT count(*) FROM stored_groups)")
        held, stored = sizes.fetchone()
        counted: Counter[str] = Counter()
        for name, n in connection.execute(_ROWS) if rows else ():
            counted[name] += n
    open_groups = {k: groups.get(k, 0) for k in (*GROUP_OPEN, "evaluating")}
    return build_ledger(counters, open_groups, facts, counted, pool_held=held, groups_held=stored)


def build_ledger(
    counters: Mapping[str, int],
    open_groups: Mapping[str, int],
    meta: Mapping[str, Any],
    rows: Mapping[str, int] | None = None,
    pool_held: int = 0,
    groups_held: int = 0,
) -> Ledger:
    """Ledger of ``counters``, whose names are those of :class:`Count`."""
    now = {"groups": open_groups, "pool": {"held": pool_held}, "stored_groups": {"held": groups_held}}
    return Ledger(
        **{account: {**_under(counters, f"{account}."), **now.get(account, {})} for account in ACCOUNTS},
        outcomes=outcomes_of(counters, meta.get(FAILURES)),
        updates=meta.get("consumed", 0),
        policy_version=meta.get("policy_version", -1),
        rows=rows or {},
    )


def _under(counters: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): value for name, value in counters.items() if name.startswith(prefix)}


def _sum(counts: Mapping[str, int], prefix: str) -> int:
    return sum(value for name, value in counts.items() if name.startswith(prefix))
