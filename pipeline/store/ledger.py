"""The accounts of a run: every order, trajectory and group in exactly one state, readable while the stage runs."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from pipeline.errors import StoreError
from pipeline.store import tables

ORDER_ENDS = ("delivered", "failed", "aborted", "expired", "cancelled")
GROUP_OPEN = ("playing", "ready", "placed")


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counts since the start of the run, over all restarts.

    ``orders``: ``issued``, :data:`ORDER_ENDS`, ``in_flight``. ``trajectories``: ``received``, ``trained``, ``held``,
    ``baseline`` (greedy rollouts), ``evaluated`` (held-out tasks), ``rolled_back`` and ``dropped.<reason>``.
    ``groups``: ``planned``, ``trained``, ``uninformative`` (left out of their update), ``rolled_back``, ``rescued``,
    ``cancelled.<reason>`` and ``playing``, ``ready``, ``placed``, ``evaluating``; of groups with equal rewards
    ``equal_kept``, ``equal_dropped``, ``equal_refilled``. ``pool``: ``saved``, ``imported``, ``left.<reason>``,
    ``held``. ``replays``: ``planned``, ``trained``, ``rolled_back``, ``choice_failed``. ``tasks``: ``retired``,
    ``returned``. ``evaluations``: ``begun``, ``complete``, ``timed_out``, ``abandoned``, ``skipped``, and of held-out
    tasks ``tasks_planned``, ``tasks_ended``, ``tasks_cancelled``.
    """

    orders: Mapping[str, int] = field(default_factory=dict)
    trajectories: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    pool: Mapping[str, int] = field(default_factory=dict)
    replays: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, int] = field(default_factory=dict)
    evaluations: Mapping[str, int] = field(default_factory=dict)
    updates: int = 0
    policy_version: int = -1
    rows: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The same, counted from the rows of the store."""

    def audit(self) -> list[str]:
        """Every sum that does not add up, in words; empty when all do."""
        o, t, g, p = self.orders, self.trajectories, self.groups, self.pool
        ended = t.get("trained", 0) + t.get("baseline", 0) + t.get("evaluated", 0) + _sum(t, "dropped.")
        e = self.evaluations
        cancelled = _sum(g, "cancelled.")
        sums = [
            ("orders issued", o.get("issued", 0), sum(o.get(k, 0) for k in ORDER_ENDS) + o.get("in_flight", 0)),
            ("trajectories received", t.get("received", 0), t.get("held", 0) + ended),
            (
                "groups planned",
                g.get("planned", 0),
                g.get("trained", 0) + g.get("uninformative", 0) + cancelled + sum(g.get(k, 0) for k in GROUP_OPEN),
            ),
            (
                "held-out tasks planned",
                e.get("tasks_planned", 0),
                e.get("tasks_ended", 0) + e.get("tasks_cancelled", 0) + g.get("evaluating", 0),
            ),
            ("pool entries", p.get("saved", 0) + p.get("imported", 0), p.get("held", 0) + _sum(p, "left.")),
        ]
        wrong = [
            f"{what}: {total}, but their states add up to {parts}" for what, total, parts in sums if total != parts
        ]
        return wrong + self._audit_rows()

    def _audit_rows(self) -> list[str]:
        if not self.rows:
            return []
        pairs = [("orders", k, self.orders.get(k, 0), self.rows["orders"].get(k, 0)) for k in ORDER_ENDS]
        pairs.append(("orders", "in_flight", self.orders.get("in_flight", 0), self.rows["orders"].get("leased", 0)))
        for k in ("trained", "held", "baseline", "evaluated"):
            pairs.append(("trajectories", k, self.trajectories.get(k, 0), self.rows["trajectories"].get(k, 0)))
        for k in ("dropped.failed", "dropped.aborted", "dropped.unscored", "dropped.replaced", "dropped.uninformative"):
            pairs.append(("trajectories", k, self.trajectories.get(k, 0), self.rows["trajectories"].get(k, 0)))
        pairs.append(("replays", "trained", self.replays.get("trained", 0), self.rows["replays"].get("trained", 0)))
        pairs.append(("pool", "imported", self.pool.get("imported", 0), self.rows["trajectories"].get("imported", 0)))
        pairs.append(("pool", "without a payload", 0, self.rows["pool"].get("bare", 0)))
        for k in ("trained", "uninformative"):
            pairs.append(("groups", k, self.groups.get(k, 0), self.rows["groups"].get(k, 0)))
        ended = self.evaluations.get("tasks_ended", 0)
        pairs.append(("groups", "evaluated", ended, self.rows["groups"].get("evaluated", 0)))
        return [f"{what} {state}: counted {a}, rows {b}" for what, state, a, b in pairs if a != b]


def read_ledger(path: Path, *, rows: bool = False) -> Ledger:
    """The accounts in the store at ``path``; ``rows`` also counts them from the rows (slower on long runs).

    Opens the file read-only, in one transaction. Raises :class:`StoreError` when there is none or it is not ours.
    """
    if not tables.STORE.exists(path):
        raise StoreError(f"there is no replay store at {path}: has the run been started?")
    try:
        connection = tables.STORE.connect(path, read_only=True)
    except sqlite3.Error as error:
        raise StoreError(f"the replay store {path} could not be read: {error}") from error
    try:
        connection.execute("BEGIN")
        counters = dict(connection.execute("SELECT name, value FROM counters"))
        meta = {key: orjson.loads(value) for key, value in connection.execute("SELECT key, value FROM meta")}
        groups = dict(connection.execute("SELECT state, count(*) FROM groups WHERE kept = 1 GROUP BY state"))
        held = connection.execute("SELECT count(*) FROM pool").fetchone()[0]
        counted = _count_rows(connection) if rows else {}
    except sqlite3.Error as error:
        raise StoreError(f"the replay store {path} could not be read: {error}") from error
    finally:
        connection.close()
    open_groups = {k: groups.get(k, 0) for k in (*GROUP_OPEN, "evaluating")}
    return build_ledger(counters, open_groups, meta, counted, pool_held=held)


def build_ledger(
    counters: Mapping[str, int],
    open_groups: Mapping[str, int],
    meta: Mapping[str, int],
    rows: Mapping[str, Mapping[str, int]] | None = None,
    pool_held: int = 0,
) -> Ledger:
    """From counters named ``orders.issued`` and the like."""
    return Ledger(
        orders=_under(counters, "orders."),
        trajectories=_under(counters, "trajectories."),
        groups={**_under(counters, "groups."), **open_groups},
        pool={**_under(counters, "pool."), "held": pool_held},
        replays=_under(counters, "replays."),
        tasks=_under(counters, "tasks."),
        evaluations=_under(counters, "evaluations."),
        updates=meta.get("consumed", 0),
        policy_version=meta.get("policy_version", -1),
        rows=rows or {},
    )


def _count_rows(connection: sqlite3.Connection) -> dict[str, dict[str, int]]:
    def one(query: str) -> int:
        return int(connection.execute(query).fetchone()[0])

    state = "CASE WHEN state = 'dropped' THEN 'dropped.' || reason ELSE state END"
    return {
        "orders": dict(connection.execute("SELECT state, count(*) FROM orders GROUP BY state")),
        "groups": dict(connection.execute("SELECT state, count(*) FROM groups GROUP BY state")),
        "trajectories": dict(connection.execute(f"SELECT {state}, count(*) FROM trajectories GROUP BY 1")),
        "replays": {"trained": one("SELECT count(*) FROM group_replays WHERE chosen = 1")},
        "pool": {"bare": one("SELECT count(*) FROM pool WHERE seq NOT IN (SELECT seq FROM payloads)")},
    }


def _under(counters: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): value for name, value in counters.items() if name.startswith(prefix)}


def _sum(counts: Mapping[str, int], prefix: str) -> int:
    return sum(value for name, value in counts.items() if name.startswith(prefix))
