"""Maps the core's counters, observations and state to the replay stage's metrics.

Totals survive restarts, because they come from the journal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pipeline.lessons.service import LessonMetrics
from pipeline.runtime.metrics import (
    AGE,
    LAG,
    LAT,
    LONG,
    REW,
    SAMPLES,
    TOK,
    CollectorRegistry,
    counter,
    gauge,
    histogram,
    latest,
)
from pipeline.runtime.progress import AdaptiveLimit
from pipeline.schema.counters import FALLEN, INSERTED, Count
from pipeline.scorer.verdict import REASONS
from pipeline.stage.core import StageCore
from pipeline.tasks.source import TASK_ROWS
from pipeline.transport.messages import MessageFault

DIFFICULTIES = ("unseen", "hard", "medium", "easy", "solved")

POPULATIONS = ("sampled", "stored", "trained", "replayed", "zero_variance")

_POPULATIONS = (
    "; population = sampled (all rollouts), stored, trained (fresh), replayed or zero_variance (left out because all "
    "rewards of the group were equal)."
)


class ReplayMetrics(LessonMetrics):
    """Contents, service, ledger, scores, replay pool, audit, evaluation and lessons of the replay stage."""

    prefix = "afterplay_replay_"

    def __init__(
        self,
        registry: CollectorRegistry,
        environments: Sequence[str] = (),
        score_functions: Sequence[str] = ("environment",),
        pass_at: Sequence[int] = (1,),
        split: str = "eval",
    ) -> None:
        super().__init__(
            registry,
            environments=environments,
            score_functions=score_functions,
            pass_at=tuple(map(str, pass_at)),
            split=(split,),
        )

    trajectories = gauge("Trajectories that wait for their score, group or update.")
    capacity_trajectories = gauge("Bound on waiting trajectories: (staleness.max + 1) x groups_per_step x n_rollout.")
    memory_bytes = gauge("Payload bytes in the store, replay pool included.")
    disk_used_bytes = gauge("Bytes of the run directory.")
    disk_budget_bytes = gauge("run.disk_bytes_max; 0: no bound.")
    inserted_trajectories_total = counter("Trajectories accepted.", env="environments")
    sampled_trajectories_total = counter("Trajectories sent to the learner, repeats included.")
    dropped_trajectories_total = counter(
        "Trajectories dropped or refused; reason = stale (staleness.late: drop), duplicate, corrupt, schema or "
        "unpublished (of a policy version that no learner of this run can have published).",
        reason=Count.labels,
    )
    oldest_policy_version = gauge("Oldest policy version that sampled a waiting trajectory.")
    task_rows = gauge(
        "Rows of tasks_from when it was opened; kind = used, filtered, bad (skipped), held_out (in another split "
        "too) or unused (in no split, or over the limit).",
        env="environments",
        kind=TASK_ROWS,
    )

    staleness_versions = histogram(
        "Learner version minus behaviour version; at = insert (arrival) or sample (sent to the learner).",
        LAG,
        at=("insert", "sample"),
    )
    item_age_seconds = histogram("Time from arrival to being sent to the learner.", AGE)
    item_samples = histogram("Times one trajectory was sent to the learner.", SAMPLES)
    sample_wait_seconds = histogram("Time the learner waited for a group.", LAT)

    progress_age_seconds = gauge(
        "Seconds since a rollout last succeeded, an update was trained or a version was published."
    )
    progress_limit_seconds = gauge(
        "Seconds that the run may take between two of these; follows the time between them. Inf once it has finished."
    )

    rpc_duration_seconds = histogram(
        "Time of one commit of arrivals; op = insert; result = ok.", LAT, op=("insert",), result=("ok",)
    )
    connected_peers = gauge("Connected peers; peer = actor or learner.", peer=("actor", "learner"))
    invalid_messages_total = counter(
        "Invalid messages; fault = handshake (no key, or an unknown one), bytes (no message), limit (too large), hello "
        "(not said, or wrong) or identity (another's name).",
        fault=tuple(MessageFault),
    )
    peers_dropped_total = counter("Peers that fell silent; peer = actor or learner.", peer=Count.labels)

    terminal_trajectories_total = counter("Trajectories by terminal state.", state=Count.labels)
    groups_total = counter("Groups by outcome.", outcome=Count.labels)
    zero_variance_groups_total = counter(
        "Finished groups whose rewards were all equal; action = kept (trained), dropped or refilled.",
        action=Count.labels,
    )
    orders_issued_total = counter("Orders sent to actors.")
    orders_total = counter("Orders by outcome.", outcome=Count.labels)
    orders_inflight = gauge("Orders that actors hold.")
    groups_open = gauge("Groups that wait for a trajectory or a score.")
    groups_ready = gauge("Complete groups that were not sent to the learner.")
    admission_capacity_trajectories = gauge("Trajectories that the staleness bound admits now.")

    score_duration_seconds = histogram("Time of one score function.", LAT, function="score_functions")
    score_failures_total = counter(
        "Score functions that gave no number; reason = raised, timeout, crashed, missing, type, nonfinite, or of a "
        "server unavailable, refused, protocol.",
        function="score_functions",
        reason=REASONS,
    )
    score_retries_total = counter("Repeated requests to a judge or reward model.", function="score_functions")
    score_value = histogram("Value of one score function, unweighted.", REW, function="score_functions")

    difficulty_tasks = gauge(
        "Known tasks by the success rate of their fresh rollouts; bucket = unseen, hard (below a third), medium, easy "
        "(above two thirds) or solved (retired).",
        bucket=DIFFICULTIES,
    )
    retired_tasks = gauge("Solved tasks, sampled for retests only.")
    pool_entries = gauge("Trajectories in the replay pool.")
    pool_bytes = gauge("Payload bytes of the replay pool and of stored groups.")
    pool_capacity = gauge("Trajectories that the replay pool may hold; 0 where none enters it.")
    pool_capacity_bytes = gauge("Payload bytes that the replay pool and stored groups may hold; 0 without replay.")
    pool_oldest_version = gauge("Oldest policy version in the replay pool.")
    pool_saved_total = counter(
        "Trajectories that entered the replay pool; origin = rollout or import.", origin=Count.labels
    )
    pool_evicted_total = counter(
        "Trajectories that left the replay pool; reason = full (its task), capacity or bytes (the pool), "
        "retired or age.",
        reason=Count.labels,
    )
    stored_groups = gauge("Groups that may come back whole (replay.mode: groups).")
    stored_groups_saved_total = counter("Trained groups that were stored to come back whole.")
    stored_groups_evicted_total = counter(
        "Stored groups that left; reason = capacity or bytes (too many), uses (replayed as often as it may), age, "
        "retired or reconfigured.",
        reason=Count.labels,
    )

    planned_share_ratio = gauge("Planned share of replay groups: task_ratio times the factor of the ESS guard.")
    guard_factor_ratio = gauge("Factor of the ESS guard on task_ratio; 0 to 1.")
    guard_actions_total = counter(
        "Changes of the factor of the ESS guard; direction = shrink or recover.", direction=Count.labels
    )
    replays_trained_total = counter("Stored trajectories trained again.")
    choice_failures_total = counter("Groups whose candidates the learner could not score.")

    audit_tokens = histogram("Sampled tokens of a trajectory" + _POPULATIONS, TOK, population=POPULATIONS)
    audit_duration_seconds = histogram("Wall time of an episode" + _POPULATIONS, LONG, population=POPULATIONS)
    audit_reward = histogram("Reward of a trajectory" + _POPULATIONS, REW, population=POPULATIONS)
    audit_age_versions = histogram(
        "Versions since its oldest token was sampled" + _POPULATIONS, LAG, population=POPULATIONS
    )

    evaluation_score = latest(
        "Score of the last evaluation: mean over tasks of the mean reward of their rollouts.",
        env="environments",
        split="split",
    )
    evaluation_pass_ratio = latest(
        "pass@k of the last evaluation: probability that one of k rollouts succeeds.",
        env="environments",
        split="split",
        k="pass_at",
    )
    evaluation_rollouts = gauge(
        "Rollouts of the last evaluation; outcome = scored, truncated (scored too), failed (attempts) or missing.",
        env="environments",
        split="split",
        outcome=("scored", "truncated", "failed", "missing"),
    )
    evaluation_updates = gauge("Updates in the weights of the last evaluation.")
    evaluation_policy_version = gauge("Policy version of the last evaluation.")
    evaluations_total = counter(
        "Evaluations by outcome; outcome = complete, timed_out, abandoned or skipped (another was in progress).",
        outcome=Count.labels,
    )


M = ReplayMetrics

_METRICS: Final = {count.value: count.metrics for count in Count}


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
    (M.groups_ready, lambda core: core.staleness.ready + len(core.staleness.placed) - len(core.dispatch.sent)),
    (M.groups_open, lambda core: core.staleness.open - core.staleness.ready - len(core.staleness.placed)),
    (M.admission_capacity_trajectories, lambda core: core.staleness.capacity() * core.config.groups.n_rollout),
    (M.capacity_trajectories, lambda core: _capacity(core.staleness.rule) * core.config.groups.n_rollout),
    (M.connected_peers, lambda core: core.leases.connected, "actor"),
    (M.connected_peers, lambda core: int(core.dispatch.peer is not None), "learner"),
    (M.pool_entries, lambda core: len(core.replay.pool)),
    (M.stored_groups, lambda core: len(core.replay.groups)),
    (M.pool_bytes, lambda core: core.replay.bytes),
    (M.pool_capacity, lambda core: _filled(core) and core.config.replay.capacity),
    (M.pool_capacity_bytes, lambda core: core.config.replay.enabled * core.config.replay.capacity_bytes),
    (M.retired_tasks, lambda core: len(core.replay.difficulty.retired)),
    (M.planned_share_ratio, lambda core: core.replay.share),
    (M.guard_factor_ratio, lambda core: core.replay.factor),
)
"""A gauge, how the core is asked for it, the value of the gauge's label."""

RUN_PATIENCE = 5.0
"""Shortest time without a usable rollout or an update that is worth an alert, as a multiple of
``supervisor.progress_seconds_max``: 10 minutes."""

START_PATIENCE = 30.0
"""The same until the first, an hour: engines load, kernels are compiled."""


def _known(value: float | None) -> float:
    """NaN, which no panel draws, for a value that is not known."""
    return math.nan if value is None else value


class Observer:
    """Publishes changes of the core as metrics; call :meth:`update` when these are built, and after every round: a
    counter that a scrape finds at 0 after a restart would seem to grow by all that it counts."""

    def __init__(self, metrics: ReplayMetrics) -> None:
        self.metrics = metrics
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
        counters = core.journal.counters
        for name, value in counters.items():
            # a rollback lowers "trained": what is trained again is exported again, by later processes too
            total = value + counters.get(FALLEN + name, 0)
            change = total - self._seen.get(name, 0)
            if change:
                self._seen[name] = total
                for metric, *labels in _metrics(name):
                    getattr(M, metric).record(self.metrics, labels, change)
        for (metric, *labels), values in core.journal.take_observations().items():
            getattr(M, metric).record(self.metrics, labels, values)
        self._progress(core, time.monotonic())
        for declared, read, *values in _GAUGES:
            declared.record(self.metrics, values, read(core))
        if time.monotonic() - self._oldest_at >= 1.0:
            self._oldest_at = time.monotonic()
            oldest = core.records.oldest_version
            self.metrics.oldest_policy_version.set(oldest if oldest is not None else max(0, core.policy_version))
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
            self.metrics.progress_limit_seconds.set(self._limit.seconds)
        moved = (core.groups.outcomes.successes, core.staleness.consumed, core.policy_version)
        if moved == self._moved:
            return
        if self._moved:
            self._limit.record(now - self._moved_at)
        self._moved, self._moved_at = moved, now
        self.metrics.progress_limit_seconds.set(math.inf if core.finished else self._limit.seconds)

    def _evaluated(self, result: Mapping[str, Any]) -> None:
        m, split = self.metrics, result["split"]
        m.evaluation_updates.set(result["updates"])
        m.evaluation_policy_version.set(result["policy_version"])
        for env, scores in result["environments"].items():
            m.evaluation_score.labels(env=env, split=split).set(_known(scores["score"]))
            for k, value in scores["pass_at"].items():
                m.evaluation_pass_ratio.labels(env=env, split=split, k=k).set(_known(value))
            counts = {
                "scored": scores["rollouts"],
                **{name: scores[name] for name in ("truncated", "failed", "missing")},
            }
            for outcome, n in counts.items():
                m.evaluation_rollouts.labels(env=env, split=split, outcome=outcome).set(n)

    def _difficulty(self, core: StageCore) -> None:
        difficulty, n = core.replay.difficulty, core.config.groups.n_rollout
        counts = dict.fromkeys(DIFFICULTIES, 0)
        for successes, tasks in difficulty.buckets.items():
            counts["hard" if 3 * successes < n else "easy" if 3 * successes > 2 * n else "medium"] += tasks
        counts["solved"] = difficulty.solved
        counts["unseen"] = max(0, len(difficulty.records) - sum(counts.values()))
        for bucket, tasks in counts.items():
            self.metrics.difficulty_tasks.labels(bucket=bucket).set(tasks)
        oldest = core.replay.oldest_version
        self.metrics.pool_oldest_version.set(oldest if oldest is not None else max(0, core.policy_version))
