"""Stat panels of first rows that more than one dashboard shows. Each has the limit of an alert."""

from __future__ import annotations

from grafana import experience as e
from grafana import promql as q
from grafana import thresholds as limits
from grafana.promql import metric
from grafana.specs import PanelSpec, alert_stat

ESS = alert_stat(
    "ESS",
    "percentunit",
    q.ess("token"),
    limits.ESS,
    "LowESS",
    "above 0.5; 1.0 is exactly on-policy.",
    "the policy has moved far from the one that sampled: lower the learning rate or staleness.max.",
    1,
)

RATIO_MEAN = alert_stat(
    "Mean ratio π/μ",
    "none",
    q.ratio_mean(),
    limits.RATIO_MEAN,
    "RatioBias",
    "within 0.1 of 1.",
    "look at engine mismatch first (dtype, chat template), then at staleness.",
    3,
)

STALENESS = alert_stat(
    "Staleness p95",
    "none",
    q.quantile(0.95, "learner_staleness_versions"),
    limits.STALENESS_P95_VERSIONS,
    "StalenessHigh",
    "at most staleness.max versions (histogram buckets round up).",
    "actors are too slow for the learner or a restart brought back old groups.",
    1,
)

IDLE = alert_stat(
    "Learner idle",
    "percentunit",
    f"max({q.idle_share()})",
    limits.LEARNER_IDLE_SHARE,
    "LearnerStarved",
    "below 50 %; higher while engines start.",
    "generation is the bottleneck: add engines or actors, or raise actor.concurrency.",
    0,
)

MISMATCH = alert_stat(
    "Engine mismatch p99",
    "none",
    q.engine_mismatch(),
    limits.ENGINE_MISMATCH_P99_NATS,
    "EngineMismatch",
    "under 0.5 nat with a bfloat16 engine, under 1e-4 with float32 (lag 0; the last 5 minutes that had any).",
    "engine and learner compute different models: compare dtype, weights, template and rope settings.",
    3,
)

ACTOR_ERRORS = alert_stat(
    "Actor errors",
    "percentunit",
    q.actor_error_share(),
    limits.ACTOR_ERROR_SHARE,
    "ActorErrors",
    "0 %; a few while an engine restarts.",
    "read the failure reasons in the actor's log; a plug-in or an engine is failing.",
    1,
)

BLOCKED = alert_stat(
    "Actors blocked",
    "percentunit",
    f"max({q.actor_blocked_share()})",
    limits.ACTOR_BLOCKED_SHARE,
    "ActorBackpressure",
    "0 %: of the time of the actor that waits longest.",
    "the replay stage is slower than the actors: its disk, or transport.credit_bytes too small.",
    0,
)

LENGTH_BIAS = alert_stat(
    "Trained over sampled length",
    "none",
    e.length_bias(),
    limits.SELECTION_BIAS,
    "SelectionBias",
    "within 0.25 of 1: what is trained is as long as what is played.",
    "long (or short) episodes are lost on the way: errors, stale drops or time limits.",
    2,
)

LESSON_SEARCHES = alert_stat(
    "Lesson searches failed",
    "percentunit",
    e.lesson_search_failures(),
    limits.LESSON_SEARCH_FAILURES,
    "LessonSearchFailing",
    "0 %. No data where lessons.enabled is false.",
    "the stage or the lesson service answers too late or with errors; episodes are played without lessons.",
    1,
)


def heartbeat(role: str = "") -> PanelSpec:
    """Of one role, or of all."""
    return alert_stat(
        "Oldest heartbeat",
        "s",
        f"max({q.heartbeat_age(role)})",
        limits.HEARTBEAT_AGE_SECONDS,
        "LoopStuck",
        "a few seconds, at most one learner step.",
        "a main loop is stuck: /healthz of that process says what it waits for.",
        0,
    )


def targets_down(role: str = "") -> PanelSpec:
    """Of one role, or of all."""
    up = metric("up", *q.job(role))
    return alert_stat(
        "Targets down",
        "short",
        f"count({up}) - sum({up})",
        limits.TARGETS_DOWN,
        "TargetDown",
        "0.",
        "see which process is gone and why in its log; the supervisor restarts it.",
        0,
    )
