"""Metrics of the replay stage, set by ``pipeline.stage`` and the memory service."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.metrics.base import (
    AGE,
    LAG,
    LAT,
    LONG,
    REW,
    SAMPLES,
    TOK,
    CollectorRegistry,
    MetricSet,
    counter,
    gauge,
    histogram,
)

DROPS = ("stale", "capacity", "duplicate", "corrupt", "schema")
OPERATIONS = ("insert", "sample", "ack", "stats")
PEERS = ("actor", "learner")
TERMINAL_STATES = ("trained", "error", "aborted", "unscored", "cancelled", "refused", "dropped", "baseline",
                   "evaluated", "uninformative")  # fmt: skip
GROUP_OUTCOMES = ("trained", "cancelled", "rolled_back", "dropped", "uninformative")
EQUAL_GROUPS = ("kept", "dropped", "refilled")
ORDER_OUTCOMES = ("completed", "error", "aborted", "expired", "cancelled")
DIFFICULTIES = ("unseen", "hard", "medium", "easy", "solved")
POPULATIONS = ("sampled", "stored", "trained", "replayed", "uninformative")
SAVED_FROM = ("rollout", "import")
LEFT = ("full", "capacity", "retired", "age")
GUARD = ("shrink", "recover")
SCORE_FAILURES = ("raised", "timeout", "crashed", "missing", "type", "nonfinite", "unavailable", "refused", "protocol")
TASK_ROWS = ("used", "filtered", "bad", "held_out", "unused")
EVALUATIONS = ("complete", "timed_out", "abandoned", "skipped")
EVALUATED_ROLLOUTS = ("scored", "truncated", "failed", "missing")
LESSON_SEARCHES = ("found", "none", "error", "dropped")
LESSON_GROUPS = ("written", "nothing", "timeout", "error", "dropped")
_POPULATIONS = (
    "; population = sampled (all rollouts), stored, trained (fresh), replayed or uninformative (left out "
    "because the rewards of its group were equal)."
)


class ReplayMetrics(MetricSet):
    """Contents, service, accounts, scores, experience pool, audit, evaluation and lessons of the replay stage."""

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

    trajectories = gauge("Trajectories held.")
    capacity_trajectories = gauge("Configured capacity.")
    memory_bytes = gauge("Payload bytes held.")
    inserted_trajectories_total = counter("Trajectories accepted.", env="environments")
    sampled_trajectories_total = counter("Trajectories handed to a learner (repeats counted).")
    dropped_trajectories_total = counter(
        "Trajectories not kept or evicted; reason = stale, capacity, duplicate, corrupt or schema.", reason=DROPS
    )
    oldest_policy_version = gauge("Smallest behaviour version still held.")
    task_rows = gauge(
        "Rows of tasks_from when it was opened; kind = used, filtered, bad (skipped), held_out (asked in another "
        "split too) or unused (in no split, or over the limit).",
        env="environments",
        kind=TASK_ROWS,
    )

    staleness_versions = histogram(
        "Learner version minus behaviour version; at = insert or sample.", LAG, at=("insert", "sample")
    )
    item_age_seconds = histogram("Time from insertion to sampling.", AGE)
    item_samples = histogram("Times one trajectory was sampled before it left.", SAMPLES)
    sample_wait_seconds = histogram("Time a sample request waited for enough data.", LAT)
    share_ratio = gauge("Replayed tokens among trained response tokens of the last update; 0 to 1.")

    rpc_duration_seconds = histogram(
        "Service time; op = insert, sample, ack or stats; result = ok or error.",
        LAT,
        op=OPERATIONS,
        result=("ok", "error"),
    )
    connected_peers = gauge("Live peers; peer = actor or learner.", peer=PEERS)
    peers_dropped_total = counter("Peers that fell silent; peer = actor or learner.", peer=PEERS)

    terminal_trajectories_total = counter("Trajectories by the state they ended in.", state=TERMINAL_STATES)
    groups_total = counter("Groups by how they ended.", outcome=GROUP_OUTCOMES)
    equal_groups_total = counter(
        "Finished groups whose rewards were all equal; action = kept (trained), dropped or refilled.",
        action=EQUAL_GROUPS,
    )
    orders_issued_total = counter("Orders given to actors.")
    orders_total = counter("Orders by how they ended.", outcome=ORDER_OUTCOMES)
    orders_inflight = gauge("Orders that actors hold.")
    groups_open = gauge("Groups that still wait for a trajectory or a score.")
    groups_ready = gauge("Complete groups that the learner has not taken.")
    admission_capacity_trajectories = gauge("Trajectories that the staleness bound still admits.")

    score_duration_seconds = histogram("Time of one score function.", LAT, function="score_functions")
    score_failures_total = counter(
        "Parts of a reward that gave no number; reason = raised, timeout, crashed, missing, type, nonfinite, or of a "
        "server unavailable, refused, protocol.",
        function="score_functions",
        reason=SCORE_FAILURES,
    )
    score_retries_total = counter("Requests to a judge or reward model tried again.", function="score_functions")
    score_value = histogram("Parts of rewards as they were given, unweighted.", REW, function="score_functions")

    difficulty_tasks = gauge(
        "Tasks known to the pool by the success rate of their latest group; bucket = unseen, hard (below a third), "
        "medium, easy (above two thirds) or solved (retired).",
        bucket=DIFFICULTIES,
    )
    retired_tasks = gauge("Tasks drawn only for retests, because all their rollouts succeeded.")
    experience_pool_entries = gauge("Trajectories in the experience pool.")
    experience_pool_bytes = gauge("Payload bytes of the experience pool.")
    experience_pool_capacity = gauge("Most trajectories it may hold.")
    experience_oldest_version = gauge("Smallest behaviour version in the experience pool.")
    experience_saved_total = counter(
        "Trajectories that entered the experience pool; origin = rollout or import.", origin=SAVED_FROM
    )
    experience_left_total = counter(
        "Trajectories that left the experience pool; reason = full (of one task), capacity, retired or age.",
        reason=LEFT,
    )

    planned_share_ratio = gauge("Groups planned with replays, of all: task_ratio times the guard's factor.")
    guard_factor_ratio = gauge("What the guard of the effective sample size leaves of task_ratio; 0 to 1.")
    guard_actions_total = counter("Changes of that factor; direction = shrink, recover.", direction=GUARD)
    replays_trained_total = counter("Stored trajectories trained again.")
    rescued_groups_total = counter("Groups that failed altogether and were given a stored success.")
    choice_failures_total = counter("Groups whose replays the learner could not choose with the current policy.")

    audit_tokens = histogram("Sampled tokens of a trajectory" + _POPULATIONS, TOK, population=POPULATIONS)
    audit_duration_seconds = histogram("Wall time of an episode" + _POPULATIONS, LONG, population=POPULATIONS)
    audit_reward = histogram("Reward of a trajectory" + _POPULATIONS, REW, population=POPULATIONS)
    audit_age_versions = histogram(
        "Versions since its oldest token was sampled" + _POPULATIONS, LAG, population=POPULATIONS
    )

    evaluation_score = gauge(
        "Mean reward of the last evaluation: of tasks, each the mean of its rollouts.",
        env="environments",
        split="split",
    )
    evaluation_pass_ratio = gauge(
        "pass@k of the last evaluation: the chance that one of k rollouts of a held-out task succeeds.",
        env="environments",
        split="split",
        k="pass_at",
    )
    evaluation_rollouts = gauge(
        "Rollouts of the last evaluation; outcome = scored, truncated (scored too), failed (tries) or missing.",
        env="environments",
        split="split",
        outcome=EVALUATED_ROLLOUTS,
    )
    evaluation_updates = gauge("Updates in the weights that were evaluated last.")
    evaluation_policy_version = gauge("Policy version of the weights that were evaluated last.")
    evaluations_total = counter(
        "Evaluations by how they ended; outcome = complete, timed_out, abandoned or skipped (another was in progress).",
        outcome=EVALUATIONS,
    )

    lessons = gauge("Lessons in the memory.")
    lessons_written_total = counter("New lessons, repetitions left out.")
    lesson_groups_total = counter(
        "Finished groups that lessons were asked of; outcome = written, nothing, timeout, error or dropped.",
        outcome=LESSON_GROUPS,
    )
    lesson_searches_total = counter(
        "Searches of actors; outcome = found, none, error or dropped (too many waited).", outcome=LESSON_SEARCHES
    )
    lesson_search_duration_seconds = histogram("From a question of an actor to its answer.", LAT)
