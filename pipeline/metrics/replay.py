"""Metrics of the replay stage and its memory service."""

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
    latest,
)
from pipeline.schema.counters import Count

FAULTS = ("handshake", "bytes", "limit", "hello", "identity")
PEERS = ("actor", "learner")
DIFFICULTIES = ("unseen", "hard", "medium", "easy", "solved")
POPULATIONS = ("sampled", "stored", "trained", "replayed", "uninformative")
SCORE_FAILURES = ("raised", "timeout", "crashed", "missing", "type", "nonfinite", "unavailable", "refused", "protocol")
TASK_ROWS = ("used", "filtered", "bad", "held_out", "unused")
EVALUATED_ROLLOUTS = ("scored", "truncated", "failed", "missing")
LESSON_SEARCHES = ("found", "none", "error", "dropped")
LESSON_GROUPS = ("written", "nothing", "timeout", "error", "dropped")
_POPULATIONS = (
    "; population = sampled (all rollouts), stored, trained (fresh), replayed or uninformative (left out because all "
    "rewards of the group were equal)."
)


class ReplayMetrics(MetricSet):
    """Contents, service, ledger, scores, experience pool, audit, evaluation and lessons of the replay stage."""

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
    memory_bytes = gauge("Payload bytes in the store, experience pool included.")
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
    share_ratio = gauge("Replayed tokens among trained response tokens of the last update; 0 to 1.")

    progress_age_seconds = gauge(
        "Seconds since a rollout last succeeded, an update was trained or a version was published."
    )
    progress_limit_seconds = gauge(
        "Seconds that the run may take between two of these; follows the time between them. Inf once it has finished."
    )

    rpc_duration_seconds = histogram(
        "Time of one commit of arrivals; op = insert; result = ok.", LAT, op=("insert",), result=("ok",)
    )
    connected_peers = gauge("Connected peers; peer = actor or learner.", peer=PEERS)
    invalid_messages_total = counter(
        "Invalid messages; fault = handshake (no key, or an unknown one), bytes (no message), limit (too large), hello "
        "(not said, or wrong) or identity (another's name).",
        fault=FAULTS,
    )
    peers_dropped_total = counter("Peers that fell silent; peer = actor or learner.", peer=Count.labels)

    terminal_trajectories_total = counter("Trajectories by terminal state.", state=Count.labels)
    groups_total = counter("Groups by outcome.", outcome=Count.labels)
    equal_groups_total = counter(
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
        reason=SCORE_FAILURES,
    )
    score_retries_total = counter("Repeated requests to a judge or reward model.", function="score_functions")
    score_value = histogram("Value of one score function, unweighted.", REW, function="score_functions")

    difficulty_tasks = gauge(
        "Known tasks by the success rate of their fresh rollouts; bucket = unseen, hard (below a third), medium, easy "
        "(above two thirds) or solved (retired).",
        bucket=DIFFICULTIES,
    )
    retired_tasks = gauge("Solved tasks, sampled for retests only.")
    experience_pool_entries = gauge("Trajectories in the experience pool.")
    experience_pool_bytes = gauge("Payload bytes of the experience pool and of stored groups.")
    experience_pool_capacity = gauge("Trajectories that the experience pool may hold; 0 where none enters it.")
    experience_pool_capacity_bytes = gauge(
        "Payload bytes that the experience pool and stored groups may hold; 0 without replay."
    )
    experience_oldest_version = gauge("Oldest policy version in the experience pool.")
    experience_saved_total = counter(
        "Trajectories that entered the experience pool; origin = rollout or import.", origin=Count.labels
    )
    experience_left_total = counter(
        "Trajectories that left the experience pool; reason = full (its task), capacity or bytes (the pool), "
        "retired or age.",
        reason=Count.labels,
    )
    stored_groups = gauge("Groups that may come back whole (replay.mode: groups).")
    stored_groups_saved_total = counter("Trained groups that were stored to come back whole.")
    stored_groups_left_total = counter(
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
        outcome=EVALUATED_ROLLOUTS,
    )
    evaluation_updates = gauge("Updates in the weights of the last evaluation.")
    evaluation_policy_version = gauge("Policy version of the last evaluation.")
    evaluations_total = counter(
        "Evaluations by outcome; outcome = complete, timed_out, abandoned or skipped (another was in progress).",
        outcome=Count.labels,
    )

    lessons = gauge("Lessons in the memory.")
    lessons_written_total = counter("New lessons, without repetitions.")
    lesson_groups_total = counter(
        "Finished groups handed to the lesson writer; outcome = written, nothing, timeout, error or dropped.",
        outcome=LESSON_GROUPS,
    )
    lesson_searches_total = counter(
        "Searches of actors; outcome = found, none, error or dropped (queue full).", outcome=LESSON_SEARCHES
    )
    lesson_search_duration_seconds = histogram("Time from the question of an actor to its answer.", LAT)
