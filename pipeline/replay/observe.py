"""From the core's counters and observations to Prometheus. Totals go on over restarts: they are those of the ledger."""

from __future__ import annotations

import time

from pipeline.metrics.base import HistogramChild
from pipeline.metrics.replay import ReplayMetrics
from pipeline.replay.core import StageCore
from pipeline.replay.records import CancelReason, Drop

_TERMINAL = {
    "trajectories.trained": "trained",
    f"trajectories.dropped.{Drop.FAILED}": "error",
    f"trajectories.dropped.{Drop.ABORTED}": "aborted",
    f"trajectories.dropped.{Drop.UNSCORED}": "unscored",
    f"trajectories.dropped.{Drop.CANCELLED}": "cancelled",
    **{
        f"trajectories.dropped.{drop}": "refused"
        for drop in (Drop.DUPLICATE, Drop.EXPIRED, Drop.ENDED, Drop.UNKNOWN, Drop.CORRUPT, Drop.SCHEMA)
    },
}
_DROPPED = {f"trajectories.dropped.{drop}": drop.value for drop in (Drop.DUPLICATE, Drop.CORRUPT, Drop.SCHEMA)}
_GROUPS = {
    "groups.trained": "trained",
    "groups.rolled_back": "rolled_back",
    **{f"groups.cancelled.{reason}": "cancelled" for reason in CancelReason},
}
_ORDERS = {
    "orders.delivered": "completed",
    "orders.failed": "error",
    "orders.aborted": "aborted",
    "orders.expired": "expired",
    "orders.cancelled": "cancelled",
}


class Observer:
    """Call :meth:`update` after every round."""

    def __init__(self, metrics: ReplayMetrics) -> None:
        self._m = metrics
        self._seen: dict[str, int] = {}
        self._oldest_at = 0.0

    def update(self, core: StageCore) -> None:
        """Publish what changed since the last call."""
        for name, value in core.journal.counters.items():
            change = value - self._seen.get(name, 0)
            if change:
                # a rollback lowers "trained": what is trained again is counted again, as rolled_back says
                self._seen[name] = value
                if change > 0:
                    self._count(name, change)
        self._histograms(core)
        self._gauges(core)

    def _count(self, name: str, change: int) -> None:
        m = self._m
        if name in _TERMINAL:
            m.terminal_trajectories_total.labels(state=_TERMINAL[name]).inc(change)
        if name in _DROPPED:
            m.dropped_trajectories_total.labels(reason=_DROPPED[name]).inc(change)
        if name in _GROUPS:
            m.groups_total.labels(outcome=_GROUPS[name]).inc(change)
        elif name in _ORDERS:
            m.orders_total.labels(outcome=_ORDERS[name]).inc(change)
        elif name == "orders.issued":
            m.orders_issued_total.inc(change)
        elif name == "trajectories.sent":
            m.sampled_trajectories_total.inc(change)
        elif name == "trajectories.stale":
            m.dropped_trajectories_total.labels(reason="stale").inc(change)
        elif name.startswith("peers.silent."):
            m.peers_dropped_total.labels(peer=name.removeprefix("peers.silent.")).inc(change)
        elif name.startswith("inserted."):
            m.inserted_trajectories_total.labels(env=name.removeprefix("inserted.")).inc(change)

    def _histograms(self, core: StageCore) -> None:
        m = self._m
        targets: dict[str, HistogramChild] = {
            "insert_staleness": m.staleness_versions.labels(at="insert"),
            "sample_staleness": m.staleness_versions.labels(at="sample"),
            "sample_wait": m.sample_wait_seconds.labels(),
            "sample_age": m.item_age_seconds.labels(),
            "item_samples": m.item_samples.labels(),
            "sampled_tokens": m.audit_tokens.labels(population="sampled"),
            "sampled_duration": m.audit_duration_seconds.labels(population="sampled"),
            "sampled_reward": m.audit_reward.labels(population="sampled"),
            "trained_tokens": m.audit_tokens.labels(population="trained"),
            "trained_duration": m.audit_duration_seconds.labels(population="trained"),
            "trained_reward": m.audit_reward.labels(population="trained"),
        }
        for name, values in core.journal.take_observations().items():
            if name in targets:
                targets[name].observe_many(values)

    def _gauges(self, core: StageCore) -> None:
        m, counters, batches = self._m, core.journal.counters, core.batches
        m.trajectories.set(counters["trajectories.held"])
        m.memory_bytes.set(counters["payload.bytes"])
        m.orders_inflight.set(core.leases.in_flight)
        m.groups_ready.set(batches.ready + len(batches.placed) - len(core.learner.sent))
        m.groups_open.set(batches.open - batches.ready - len(batches.placed))
        n_rollout = core.config.groups.n_rollout
        m.admission_capacity_trajectories.set(batches.capacity() * n_rollout)
        m.capacity_trajectories.set((batches.rule.bound + 1) * batches.rule.groups_per_step * n_rollout)
        m.connected_peers.labels(peer="actor").set(core.leases.connected)
        m.connected_peers.labels(peer="learner").set(int(core.learner.peer is not None))
        if time.monotonic() - self._oldest_at >= 1.0:
            self._oldest_at = time.monotonic()
            oldest = core.oldest_version
            m.oldest_policy_version.set(oldest if oldest is not None else max(0, core.policy_version))
