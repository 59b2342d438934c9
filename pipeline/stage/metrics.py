"""Maps the core's counters, observations and state to the replay stage's metrics.

Totals survive restarts, because they come from the journal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Final

from pipeline.metrics.base import Declaration
from pipeline.metrics.replay import DIFFICULTIES, POPULATIONS, ReplayMetrics
from pipeline.runtime.progress import AdaptiveLimit
from pipeline.schema.counters import INSERTED, Count
from pipeline.stage.core import StageCore

M = ReplayMetrics
_METRICS: Final = {count.value: count.metrics for count in Count}
_OBSERVATIONS: Final[dict[str, tuple[Declaration[Any], tuple[str, ...]]]] = {
    "insert_staleness": (M.staleness_versions, ("insert",)),
    "sample_staleness": (M.staleness_versions, ("sample",)),
    "sample_wait": (M.sample_wait_seconds, ()),
    "sample_age": (M.item_age_seconds, ()),
    "item_samples": (M.item_samples, ()),
    **{
        f"{population}_{name}": (metric, (population,))
        for population in POPULATIONS
        for name, metric in (
            ("tokens", M.audit_tokens),
            ("duration", M.audit_duration_seconds),
            ("reward", M.audit_reward),
            ("age", M.audit_age_versions),
        )
    },
}


def _metrics(counter: str) -> tuple[tuple[str, ...], ...]:
    """Metrics that a counter of the journal raises, each with the value of its label."""
    if counter.startswith(INSERTED):
        return ((M.inserted_trajectories_total.name, counter.removeprefix(INSERTED)),)
    return _METRICS.get(counter, ())


def _capacity(rule: Any) -> int:
    """Groups that the staleness bound admits in all."""
    return int((rule.bound + 1) * rule.groups_per_step)


def _filled(core: StageCore) -> bool:
    """True if trajectories enter the pool."""
    return core.config.replay.enabled and core.config.replay.mode != "groups"


_GAUGES: Final[tuple[tuple[Any, ...], ...]] = (
    (M.trajectories, lambda core: core.journal.counters[Count.TRAJECTORIES_HELD]),
    (M.memory_bytes, lambda core: core.journal.counters[Count.PAYLOAD_BYTES]),
    (M.orders_inflight, lambda core: core.leases.in_flight),
    (M.groups_ready, lambda core: core.batches.ready + len(core.batches.placed) - len(core.dispatch.sent)),
    (M.groups_open, lambda core: core.batches.open - core.batches.ready - len(core.batches.placed)),
    (M.admission_capacity_trajectories, lambda core: core.batches.capacity() * core.config.groups.n_rollout),
    (M.capacity_trajectories, lambda core: _capacity(core.batches.rule) * core.config.groups.n_rollout),
    (M.connected_peers, lambda core: core.leases.connected, "actor"),
    (M.connected_peers, lambda core: int(core.dispatch.peer is not None), "learner"),
    (M.experience_pool_entries, lambda core: len(core.experience)),
    (M.stored_groups, lambda core: len(core.experience.groups)),
    (M.experience_pool_bytes, lambda core: core.experience.bytes),
    (M.experience_pool_capacity, lambda core: _filled(core) and core.config.replay.capacity),
    (M.experience_pool_capacity_bytes, lambda core: core.config.replay.enabled * core.config.replay.capacity_bytes),
    (M.retired_tasks, lambda core: core.experience.retired),
    (M.planned_share_ratio, lambda core: core.experience.share),
    (M.guard_factor_ratio, lambda core: core.experience.factor),
    (M.share_ratio, lambda core: core.replays.last_share),
)
"""A gauge, how the core is asked for it, the value of the gauge's label."""


RUN_PATIENCE = 5.0
"""Shortest time without a usable rollout or an update that is worth an alert, as a multiple of
``supervisor.progress_seconds_max``: 10 minutes."""
START_PATIENCE = 30.0
"""The same until the first, an hour: engines load, kernels are compiled."""


class Observer:
    """Publishes changes of the core as metrics; call :meth:`update` after every round."""

    def __init__(self, metrics: ReplayMetrics) -> None:
        self._m = metrics
        self._seen: dict[str, int] = {}
        self._oldest_at = 0.0
        self._evaluation = -1
        self._moved: tuple[int, ...] = ()
        self._moved_at = time.monotonic()
        self._limit: AdaptiveLimit | None = None
        metrics.progress_age_seconds.set_function(lambda: time.monotonic() - self._moved_at)
        metrics.progress_limit_seconds.set(math.inf)

    def update(self, core: StageCore) -> None:
        """Publish what changed since the last call."""
        for name, value in core.journal.counters.items():
            change = value - self._seen.get(name, 0)
            if change:
                # a rollback lowers "trained": what is trained again is counted again, as rolled_back says
                self._seen[name] = value
                for metric, *labels in _metrics(name) if change > 0 else ():
                    getattr(M, metric).record(self._m, labels, change)
        for name, values in core.journal.take_observations().items():
            if name in _OBSERVATIONS:
                observed, of = _OBSERVATIONS[name]
                observed.record(self._m, of, values)
        self._progress(core, time.monotonic())
        for gauge, read, *values in _GAUGES:
            gauge.record(self._m, values, read(core))
        if time.monotonic() - self._oldest_at >= 1.0:
            self._oldest_at = time.monotonic()
            oldest = core.oldest_version
            self._m.oldest_policy_version.set(oldest if oldest is not None else max(0, core.policy_version))
            self._difficulty(core)
        last = core.evaluations.last
        if last is not None and last["evaluation"] != self._evaluation:
            self._evaluation = last["evaluation"]
            self._evaluated(last)

    def _progress(self, core: StageCore, now: float) -> None:
        """Publish the time of the last progress of the run, and how long it may take until the next."""
        if self._limit is None:
            longest = max(section.max_seconds for section in core.config.environments.values())
            least = core.config.supervisor.progress_seconds_max
            self._limit = AdaptiveLimit(max(RUN_PATIENCE * least, 2 * longest), START_PATIENCE * least)
            self._m.progress_limit_seconds.set(self._limit.seconds)
        moved = (core.outcomes.successes, core.batches.consumed, core.policy_version)
        if moved == self._moved:
            return
        if self._moved:
            self._limit.record(now - self._moved_at)
        self._moved, self._moved_at = moved, now
        self._m.progress_limit_seconds.set(math.inf if core.finished else self._limit.seconds)

    def _evaluated(self, result: Mapping[str, Any]) -> None:
        m, split = self._m, result["split"]
        m.evaluation_updates.set(result["updates"])
        m.evaluation_policy_version.set(result["policy_version"])
        for env, scores in result["environments"].items():
            if scores["score"] is not None:
                m.evaluation_score.labels(env=env, split=split).set(scores["score"])
            for k, value in scores["pass_at"].items():
                if value is not None:
                    m.evaluation_pass_ratio.labels(env=env, split=split, k=k).set(value)
            counts = {
                "scored": scores["rollouts"],
                **{name: scores[name] for name in ("truncated", "failed", "missing")},
            }
            for outcome, n in counts.items():
                m.evaluation_rollouts.labels(env=env, split=split, outcome=outcome).set(n)

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
