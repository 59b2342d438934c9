"""Counters of a run, and the metrics of the replay stage that each of them raises."""

from __future__ import annotations

from enum import StrEnum

_ENDED, _BAD = "terminal_trajectories_total", "dropped_trajectories_total"


class Count(StrEnum):
    """The counters of a run. Their values are names in the store, grouped by the part before the first dot. Each may
    have metrics: the name of :class:`~pipeline.stage.metrics.ReplayMetrics` and the value of its label."""

    def __new__(cls, name: str, *metrics: tuple[str, ...]) -> Count:
        count = str.__new__(cls, name)
        count._value_, count.metrics = name, metrics
        return count

    metrics: tuple[tuple[str, ...], ...]

    ORDERS_ISSUED = "orders.issued", ("orders_issued_total",)
    ORDERS_IN_FLIGHT = "orders.in_flight"
    """Issued and in none of the next five states."""
    ORDERS_DELIVERED = "orders.delivered", ("orders_total", "completed")
    ORDERS_FAILED = "orders.failed", ("orders_total", "error")
    ORDERS_ABORTED = "orders.aborted", ("orders_total", "aborted")
    ORDERS_EXPIRED = "orders.expired", ("orders_total", "expired")
    ORDERS_CANCELLED = "orders.cancelled", ("orders_total", "cancelled")

    TRAJECTORIES_RECEIVED = "trajectories.received"
    TRAJECTORIES_HELD = "trajectories.held"
    TRAJECTORIES_TRAINED = "trajectories.trained", (_ENDED, "trained")
    TRAJECTORIES_BASELINE = "trajectories.baseline", (_ENDED, "baseline")
    """Greedy rollouts that were scored."""
    TRAJECTORIES_EVALUATED = "trajectories.evaluated", (_ENDED, "evaluated")
    """Scored rollouts of held-out tasks."""
    TRAJECTORIES_ROLLED_BACK = "trajectories.rolled_back"
    TRAJECTORIES_SENT = "trajectories.sent", ("sampled_trajectories_total",)
    TRAJECTORIES_LATE = "trajectories.late"
    TRAJECTORIES_STALE = "trajectories.stale", (_BAD, "stale")
    """Late, and not trained for it (``staleness.late: drop``)."""
    TRAJECTORIES_DROPPED_DUPLICATE = "trajectories.dropped.duplicate", (_ENDED, "refused"), (_BAD, "duplicate")
    TRAJECTORIES_DROPPED_FAILED = "trajectories.dropped.failed", (_ENDED, "error")
    TRAJECTORIES_DROPPED_ABORTED = "trajectories.dropped.aborted", (_ENDED, "aborted")
    TRAJECTORIES_DROPPED_UNSCORED = "trajectories.dropped.unscored", (_ENDED, "unscored")
    TRAJECTORIES_DROPPED_CANCELLED = "trajectories.dropped.cancelled", (_ENDED, "cancelled")
    TRAJECTORIES_DROPPED_EXPIRED = "trajectories.dropped.expired", (_ENDED, "refused")
    TRAJECTORIES_DROPPED_ENDED = "trajectories.dropped.ended", (_ENDED, "refused")
    TRAJECTORIES_DROPPED_UNKNOWN = "trajectories.dropped.unknown", (_ENDED, "refused")
    TRAJECTORIES_DROPPED_CORRUPT = "trajectories.dropped.corrupt", (_ENDED, "refused"), (_BAD, "corrupt")
    TRAJECTORIES_DROPPED_SCHEMA = "trajectories.dropped.schema", (_ENDED, "refused"), (_BAD, "schema")
    TRAJECTORIES_DROPPED_UNPUBLISHED = "trajectories.dropped.unpublished", (_ENDED, "refused"), (_BAD, "unpublished")
    TRAJECTORIES_DROPPED_ZERO_VARIANCE = "trajectories.dropped.zero_variance", (_ENDED, "zero_variance")
    PAYLOAD_BYTES = "payload.bytes"

    GROUPS_PLANNED = "groups.planned"
    GROUPS_TRAINED = "groups.trained", ("groups_total", "trained")
    GROUPS_ZERO_VARIANCE = "groups.zero_variance", ("groups_total", "zero_variance")
    """Dropped from their update."""
    GROUPS_ROLLED_BACK = "groups.rolled_back", ("groups_total", "rolled_back")
    GROUPS_LATE = "groups.late"
    GROUPS_ZERO_VARIANCE_KEPT = "groups.zero_variance_kept", ("zero_variance_groups_total", "kept")
    GROUPS_ZERO_VARIANCE_DROPPED = "groups.zero_variance_dropped", ("zero_variance_groups_total", "dropped")
    GROUPS_ZERO_VARIANCE_REFILLED = "groups.zero_variance_refilled", ("zero_variance_groups_total", "refilled")
    """These three: groups with zero variance of rewards."""
    GROUPS_CANCELLED_ATTEMPTS = "groups.cancelled.attempts", ("groups_total", "cancelled")
    GROUPS_CANCELLED_LATE = "groups.cancelled.late", ("groups_total", "cancelled")
    GROUPS_CANCELLED_FINISHED = "groups.cancelled.finished", ("groups_total", "cancelled")
    GROUPS_CANCELLED_RECONFIGURED = "groups.cancelled.reconfigured", ("groups_total", "cancelled")
    GROUPS_CANCELLED_UNTRAINED = "groups.cancelled.untrained", ("groups_total", "cancelled")
    GROUPS_CANCELLED_ZERO_VARIANCE = "groups.cancelled.zero_variance", ("groups_total", "zero_variance")
    GROUPS_CANCELLED_RESTORED = "groups.cancelled.restored", ("groups_total", "cancelled")
    GROUPS_CANCELLED_LOST = "groups.cancelled.lost", ("groups_total", "cancelled")

    POOL_SAVED = "pool.saved", ("pool_saved_total", "rollout")
    POOL_IMPORTED = "pool.imported", ("pool_saved_total", "import")
    POOL_EVICTED_FULL = "pool.evicted.full", ("pool_evicted_total", "full")
    POOL_EVICTED_CAPACITY = "pool.evicted.capacity", ("pool_evicted_total", "capacity")
    POOL_EVICTED_BYTES = "pool.evicted.bytes", ("pool_evicted_total", "bytes")
    POOL_EVICTED_RETIRED = "pool.evicted.retired", ("pool_evicted_total", "retired")
    POOL_EVICTED_AGE = "pool.evicted.age", ("pool_evicted_total", "age")
    STORED_GROUPS_SAVED = "stored_groups.saved", ("stored_groups_saved_total",)
    STORED_GROUPS_EVICTED_CAPACITY = "stored_groups.evicted.capacity", ("stored_groups_evicted_total", "capacity")
    STORED_GROUPS_EVICTED_BYTES = "stored_groups.evicted.bytes", ("stored_groups_evicted_total", "bytes")
    STORED_GROUPS_EVICTED_USES = "stored_groups.evicted.uses", ("stored_groups_evicted_total", "uses")
    STORED_GROUPS_EVICTED_AGE = "stored_groups.evicted.age", ("stored_groups_evicted_total", "age")
    STORED_GROUPS_EVICTED_RETIRED = "stored_groups.evicted.retired", ("stored_groups_evicted_total", "retired")
    STORED_GROUPS_EVICTED_RECONFIGURED = (
        "stored_groups.evicted.reconfigured",
        ("stored_groups_evicted_total", "reconfigured"),
    )
    REPLAYS_PLANNED = "replays.planned"
    REPLAYS_TRAINED = "replays.trained", ("replays_trained_total",)
    REPLAYS_ROLLED_BACK = "replays.rolled_back"
    REPLAYS_CHOICE_FAILED = "replays.choice_failed", ("choice_failures_total",)
    TASKS_RETIRED = "tasks.retired"
    TASKS_RETURNED = "tasks.returned"
    GUARD_SHRINK = "guard.shrink", ("guard_actions_total", "shrink")
    GUARD_RECOVER = "guard.recover", ("guard_actions_total", "recover")

    EVALUATIONS_BEGUN = "evaluations.begun"
    EVALUATIONS_COMPLETE = "evaluations.complete", ("evaluations_total", "complete")
    EVALUATIONS_TIMED_OUT = "evaluations.timed_out", ("evaluations_total", "timed_out")
    EVALUATIONS_ABANDONED = "evaluations.abandoned", ("evaluations_total", "abandoned")
    EVALUATIONS_SKIPPED = "evaluations.skipped", ("evaluations_total", "skipped")
    EVALUATIONS_TASKS_PLANNED = "evaluations.tasks_planned"
    EVALUATIONS_TASKS_ENDED = "evaluations.tasks_ended"
    EVALUATIONS_TASKS_CANCELLED = "evaluations.tasks_cancelled"

    PEERS_REFUSED = "peers.refused"
    PEERS_SILENT_ACTOR = "peers.silent.actor", ("peers_dropped_total", "actor")
    PEERS_SILENT_LEARNER = "peers.silent.learner", ("peers_dropped_total", "learner")
    MESSAGES_REFUSED = "messages.refused"
    MESSAGES_IMPOSSIBLE = "messages.impossible"
    """HELLOs and messages with a claim that cannot be true; also in one of the two counters of refusals."""
    MESSAGES_CORRUPT = "messages.corrupt"
    LEARNER_CONSUMED_UNKNOWN = "learner.consumed_unknown"
    LEARNER_REPLAYED_UNKNOWN = "learner.replayed_unknown"

    @classmethod
    def labels(cls, metric: str) -> tuple[str, ...]:
        """Values of the label of ``metric``."""
        return tuple(
            dict.fromkeys(label for count in cls for name, *of in count.metrics if name == metric for label in of)
        )


FALLEN = "fallen."
"""Prefix of counters by counter that has metrics: how far it fell in all when groups were rolled back."""
INSERTED = "inserted."
"""Prefix of counters by environment: trajectories that were stored (:meth:`Journal.inserted`)."""
SUCCEEDED, FAILED = "succeeded.", "failed."
"""Prefixes of counters by environment: rollouts with a reward, and failed ones with their cause
(``failed.ENVIRONMENT/CAUSE``)."""
