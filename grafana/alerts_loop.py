"""Alerts about the loop: processes, the update, staleness, flow, weights."""

from __future__ import annotations

from grafana import promql as q
from grafana import thresholds as limits
from grafana.promql import metric
from grafana.rules import Alert, beyond, off_band


def _increase(name: str) -> str:
    return f"increase({metric(name, panel=False)}[{limits.WINDOW}])"


LOOP_ALERTS: tuple[Alert, ...] = (
    Alert("TargetDown", "up == 0", "1m", "critical", "{{ $labels.job }} {{ $labels.instance }} does not answer."),
    Alert("LearnerMissing", "absent(afterplay_learner_steps_total)", "2m", "critical", "No learner is being scraped."),
    Alert(
        "LearnerStalled",
        f"sum({_increase('learner_steps_total')}) == 0 and sum({_increase('replay_inserted_trajectories_total')}) > 0",
        "2m",
        "critical",
        "Trajectories arrive but the learner has made no step for five minutes.",
    ),
    Alert(
        "LoopStuck",
        beyond(q.heartbeat_age(panel=False), limits.HEARTBEAT_AGE_SECONDS, "critical"),
        "1m",
        "critical",
        "{{ $labels.job }} {{ $labels.instance }}: no main-loop iteration for {{ $value | humanizeDuration }}.",
    ),
    Alert(
        "NonFinite",
        beyond(q.nonfinite_steps(panel=False), limits.NONFINITE_STEPS, "critical"),
        "0m",
        "critical",
        "The learner skipped steps for a non-finite {{ $labels.where }}.",
    ),
    Alert(
        "LowESS",
        beyond(q.ess("token", panel=False), limits.ESS),
        "5m",
        "warning",
        "Effective sample size is {{ $value | humanizePercentage }}.",
    ),
    Alert(
        "ESSCollapse",
        beyond(q.ess("token", panel=False), limits.ESS, "critical"),
        "2m",
        "critical",
        "Effective sample size is {{ $value | humanizePercentage }}.",
    ),
    Alert(
        "RatioBias",
        off_band(q.ratio_mean(panel=False), limits.RATIO_MEAN),
        "5m",
        "warning",
        'The mean importance ratio is {{ printf "%.3g" $value }} away from 1.',
    ),
    Alert(
        "RatioHeavyTail",
        beyond(q.ratio_tail(panel=False), limits.RATIO_TAIL),
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of the tokens have a ratio outside (0.5, 2].",
    ),
    Alert(
        "EngineMismatch",
        beyond(q.engine_mismatch(panel=False), limits.ENGINE_MISMATCH_P99_NATS),
        "5m",
        "warning",
        'Engine and learner disagree by {{ printf "%.3g" $value }} nat (p99) on the same weights.',
    ),
    Alert(
        "StalenessHigh",
        beyond(q.quantile(0.95, "learner_staleness_versions", panel=False), limits.STALENESS_P95_VERSIONS),
        "5m",
        "warning",
        "95 % of trained trajectories are up to {{ $value | humanize }} versions old.",
    ),
    Alert(
        "PolicyLagHigh",
        beyond(q.policy_lag(panel=False), limits.POLICY_LAG_VERSIONS),
        "2m",
        "warning",
        "The slowest actor is {{ $value | humanize }} versions behind the learner.",
    ),
    Alert(
        "LearnerStarved",
        beyond(q.idle_share(panel=False), limits.LEARNER_IDLE_SHARE),
        "10m",
        "warning",
        "The learner waits for data {{ $value | humanizePercentage }} of the time.",
    ),
    Alert(
        "ReplayNearlyFull",
        beyond(q.replay_fill(panel=False), limits.REPLAY_FILL),
        "10m",
        "warning",
        "The replay stage is {{ $value | humanizePercentage }} full.",
    ),
    Alert(
        "ReplayDropsStale",
        beyond(q.stale_drop_share(panel=False), limits.STALE_DROP_SHARE),
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of the trajectories are dropped as stale.",
    ),
    Alert(
        "ReplayCorrupt",
        beyond(f"sum by (reason) ({q.corrupt_drops(panel=False)})", limits.CORRUPT_DROPS, "critical"),
        "0m",
        "critical",
        "The replay stage refused trajectories: {{ $labels.reason }}.",
    ),
    Alert(
        "GroupsTeachNothing",
        beyond(q.equal_groups(panel=False), limits.EQUAL_GROUPS),
        "15m",
        "warning",
        "All rewards are equal in {{ $value | humanizePercentage }} of the groups: they teach nothing.",
    ),
    Alert(
        "ActorBackpressure",
        beyond(q.actor_blocked_share(panel=False), limits.ACTOR_BLOCKED_SHARE),
        "5m",
        "warning",
        "{{ $labels.instance }} spends {{ $value | humanizePercentage }} of its time blocked on the replay stage.",
    ),
    Alert(
        "ActorErrors",
        beyond(q.actor_error_share(panel=False), limits.ACTOR_ERROR_SHARE),
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of the trajectories end in an error.",
    ),
    Alert(
        "WeightUpdateFailing",
        beyond(q.weight_update_failures(panel=False), limits.WEIGHT_UPDATE_FAILURES),
        "0m",
        "warning",
        "{{ $value | humanize }} weight updates failed in ten minutes.",
    ),
    Alert(
        "CheckpointStale",
        beyond(q.checkpoint_age(panel=False), limits.CHECKPOINT_AGE_SECONDS),
        "5m",
        "warning",
        "The last checkpoint is {{ $value | humanizeDuration }} old.",
    ),
)
