"""From the core's counters and observations to Prometheus. Totals go on over restarts: they are those of the ledger."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pipeline.metrics.base import HistogramChild
from pipeline.metrics.replay import DIFFICULTIES, EQUAL_GROUPS, EVALUATIONS, GUARD, LEFT, POPULATIONS, ReplayMetrics
from pipeline.stage.core import StageCore
from pipeline.store.records import CancelReason, Drop

_TERMINAL = {
    "trajectories.trained": "trained",
    "trajectories.baseline": "baseline",
    "trajectories.evaluated": "evaluated",
    f"trajectories.dropped.{Drop.FAILED}": "error",
    f"trajectories.dropped.{Drop.ABORTED}": "aborted",
    f"trajectories.dropped.{Drop.UNSCORED}": "unscored",
    f"trajectories.dropped.{Drop.CANCELLED}": "cancelled",
    f"trajectories.dropped.{Drop.REPLACED}": "dropped",
    f"trajectories.dropped.{Drop.UNINFORMATIVE}": "uninformative",
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
    "groups.uninformative": "uninformative",
    f"groups.cancelled.{CancelReason.UNINFORMATIVE}": "uninformative",
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
        self._evaluation = -1
        m = metrics
        self._plain = {
            "orders.issued": m.orders_issued_total,
            "trajectories.sent": m.sampled_trajectories_total,
            "pool.saved": m.experience_saved_total.labels(origin="rollout"),
            "pool.imported": m.experience_saved_total.labels(origin="import"),
            **{f"pool.left.{reason}": m.experience_left_total.labels(reason=reason) for reason in LEFT},
            **{f"guard.{way}": m.guard_actions_total.labels(direction=way) for way in GUARD},
            "replays.trained": m.replays_trained_total,
            "replays.choice_failed": m.choice_failures_total,
            "groups.rescued": m.rescued_groups_total,
            **{f"evaluations.{how}": m.evaluations_total.labels(outcome=how) for how in EVALUATIONS},
            **{f"groups.equal_{action}": m.equal_groups_total.labels(action=action) for action in EQUAL_GROUPS},
        }
        """Counters whose metric counts the same."""

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
        last = core.evaluations.last
        if last is not None and last["evaluation"] != self._evaluation:
            self._evaluation = last["evaluation"]
            self._evaluated(last)

    def _count(self, name: str, change: int) -> None:
        m = self._m
        if (plain := self._plain.get(name)) is not None:
            plain.inc(change)
        if name in _TERMINAL:
            m.terminal_trajectories_total.labels(state=_TERMINAL[name]).inc(change)
        if name in _DROPPED:
            m.dropped_trajectories_total.labels(reason=_DROPPED[name]).inc(change)
        if name in _GROUPS:
            m.groups_total.labels(outcome=_GROUPS[name]).inc(change)
        elif name in _ORDERS:
            m.orders_total.labels(outcome=_ORDERS[name]).inc(change)
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
        }
        for population in POPULATIONS:
            targets[f"{population}_tokens"] = m.audit_tokens.labels(population=population)
            targets[f"{population}_duration"] = m.audit_duration_seconds.labels(population=population)
            targets[f"{population}_reward"] = m.audit_reward.labels(population=population)
            targets[f"{population}_age"] = m.audit_age_versions.labels(population=population)
        for name, values in core.journal.take_observations().items():
            if name in targets:
                targets[name].observe_many(values)

    def _gauges(self, core: StageCore) -> None:
        m, counters, batches = self._m, core.journal.counters, core.batches
        m.trajectories.set(counters["trajectories.held"])
        m.memory_bytes.set(counters["payload.bytes"])
        m.orders_inflight.set(core.leases.in_flight)
        m.groups_ready.set(batches.ready + len(batches.placed) - len(core.dispatch.sent))
        m.groups_open.set(batches.open - batches.ready - len(batches.placed))
        n_rollout = core.config.groups.n_rollout
        m.admission_capacity_trajectories.set(batches.capacity() * n_rollout)
        m.capacity_trajectories.set((batches.rule.bound + 1) * batches.rule.groups_per_step * n_rollout)
        m.connected_peers.labels(peer="actor").set(core.leases.connected)
        m.connected_peers.labels(peer="learner").set(int(core.dispatch.peer is not None))
        self._pool_gauges(core)
        if time.monotonic() - self._oldest_at >= 1.0:
            self._oldest_at = time.monotonic()
            oldest = core.oldest_version
            m.oldest_policy_version.set(oldest if oldest is not None else max(0, core.policy_version))
            self._difficulty(core)

    def _evaluated(self, result: Mapping[str, Any]) -> None:
        m, split = self._m, result["split"]
        m.evaluation_updates.set(result["updates"])
        m.evaluation_policy_version.set(result["policy_version"])
        for env, told in result["environments"].items():
            if told["score"] is not None:
                m.evaluation_score.labels(env=env, split=split).set(told["score"])
            for k, value in told["pass_at"].items():
                if value is not None:
                    m.evaluation_pass_ratio.labels(env=env, split=split, k=k).set(value)
            counts = {"scored": told["rollouts"], **{name: told[name] for name in ("truncated", "failed", "missing")}}
            for outcome, n in counts.items():
                m.evaluation_rollouts.labels(env=env, split=split, outcome=outcome).set(n)

    def _pool_gauges(self, core: StageCore) -> None:
        m, experience, replay = self._m, core.experience, core.config.replay
        m.experience_pool_entries.set(len(experience))
        m.experience_pool_bytes.set(experience.bytes)
        m.experience_pool_capacity.set(replay.capacity if replay.enabled else 0)
        m.retired_tasks.set(experience.retired)
        m.planned_share_ratio.set(experience.share)
        m.guard_factor_ratio.set(experience.factor)
        m.share_ratio.set(core.replays.last_share)

    def _difficulty(self, core: StageCore) -> None:
        experience, n = core.experience, core.config.groups.n_rollout
        counts = dict.fromkeys(DIFFICULTIES, 0)
        for successes, tasks in experience.buckets().items():
            counts["hard" if 3 * successes < n else "easy" if 3 * successes > 2 * n else "medium"] += tasks
        counts["solved"] = experience.retired
        counts["unseen"] = max(0, len(experience.tasks) - sum(counts.values()))
        for bucket, tasks in counts.items():
            self._m.difficulty_tasks.labels(bucket=bucket).set(tasks)
        oldest = experience.oldest_version
        self._m.experience_oldest_version.set(oldest if oldest is not None else max(0, core.policy_version))
