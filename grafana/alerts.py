"""Alert rules, made from the same expressions and limits as the panels. Each has a heading in docs/RUNBOOK.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import yaml

from grafana import promql as q
from grafana import thresholds as limits
from grafana.promql import metric

RUNBOOK = "docs/RUNBOOK.md"
CORRUPT = 'reason=~"corrupt|schema"'


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    expr: str
    for_: str
    severity: Literal["warning", "critical"]
    summary: str


def _above(expr: str, limit: limits.Limit, severity: Literal["warning", "critical"] = "warning") -> str:
    value = limit.critical if severity == "critical" else limit.warning
    return f"({expr}) {'>' if limit.bad == 'above' else '<'} {value:g}"


def _increase(name: str, window: str, matcher: str = "") -> str:
    selector = metric(name, matcher, panel=False) if matcher else metric(name, panel=False)
    return f"increase({selector}[{window}])"


ALERTS: tuple[Alert, ...] = (
    Alert("TargetDown", "up == 0", "1m", "critical", "{{ $labels.job }} {{ $labels.instance }} does not answer."),
    Alert("LearnerMissing", "absent(afterplay_learner_steps_total)", "2m", "critical", "No learner is being scraped."),
    Alert(
        "LearnerStalled",
        f"sum({_increase('learner_steps_total', '5m')}) == 0 "
        f"and sum({_increase('replay_inserted_trajectories_total', '5m')}) > 0",
        "2m",
        "critical",
        "Trajectories arrive but the learner has made no step for five minutes.",
    ),
    Alert(
        "LoopStuck",
        _above(q.heartbeat_age(panel=False), limits.HEARTBEAT_AGE_SECONDS, "critical"),
        "1m",
        "critical",
        "{{ $labels.job }} {{ $labels.instance }}: no main-loop iteration for {{ $value | humanizeDuration }}.",
    ),
    Alert(
        "NonFinite",
        f"{_increase('learner_nonfinite_steps_total', '5m')} > 0",
        "0m",
        "critical",
        "The learner skipped steps for a non-finite {{ $labels.where }}.",
    ),
    Alert(
        "LowESS",
        _above(q.ess("token", panel=False), limits.ESS),
        "5m",
        "warning",
        "Effective sample size is {{ $value | humanizePercentage }}.",
    ),
    Alert(
        "ESSCollapse",
        _above(q.ess("token", panel=False), limits.ESS, "critical"),
        "2m",
        "critical",
        "Effective sample size is {{ $value | humanizePercentage }}.",
    ),
    Alert(
        "RatioBias",
        f"abs({q.ratio_mean(panel=False)} - {limits.RATIO_MEAN.center:g}) > {limits.RATIO_MEAN.tolerance:g}",
        "5m",
        "warning",
        'The mean importance ratio is {{ printf "%.3g" $value }} away from 1.',
    ),
    Alert(
        "RatioHeavyTail",
        _above(q.ratio_tail(panel=False), limits.RATIO_TAIL),
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of the tokens have a ratio outside (0.5, 2].",
    ),
    Alert(
        "EngineMismatch",
        _above(q.engine_mismatch(panel=False), limits.ENGINE_MISMATCH_P99_NATS),
        "5m",
        "warning",
        'Engine and learner disagree by {{ printf "%.3g" $value }} nat (p99) on the same weights.',
    ),
    Alert(
        "StalenessHigh",
        _above(q.quantile(0.95, "learner_staleness_versions", panel=False), limits.STALENESS_P95_VERSIONS),
        "5m",
        "warning",
        "95 % of trained trajectories are up to {{ $value | humanize }} versions old.",
    ),
    Alert(
        "PolicyLagHigh",
        _above(q.policy_lag(panel=False), limits.POLICY_LAG_VERSIONS),
        "2m",
        "warning",
        "The slowest actor is {{ $value | humanize }} versions behind the learner.",
    ),
    Alert(
        "LearnerStarved",
        _above(q.idle_share(panel=False), limits.LEARNER_IDLE_SHARE),
        "10m",
        "warning",
        "The learner waits for data {{ $value | humanizePercentage }} of the time.",
    ),
    Alert(
        "ReplayNearlyFull",
        _above(q.replay_fill(panel=False), limits.REPLAY_FILL),
        "10m",
        "warning",
        "The replay stage is {{ $value | humanizePercentage }} full.",
    ),
    Alert(
        "ReplayDropsStale",
        _above(q.stale_drop_share(panel=False), limits.STALE_DROP_SHARE),
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of the trajectories are dropped as stale.",
    ),
    Alert(
        "ReplayCorrupt",
        f"sum by (reason) ({_increase('replay_dropped_trajectories_total', '5m', CORRUPT)}) > 0",
        "0m",
        "critical",
        "The replay stage refused trajectories: {{ $labels.reason }}.",
    ),
    Alert(
        "ActorBackpressure",
        _above(q.actor_blocked_share(panel=False), limits.ACTOR_BLOCKED_SHARE),
        "5m",
        "warning",
        "{{ $labels.instance }} spends {{ $value | humanizePercentage }} of its time blocked on the replay stage.",
    ),
    Alert(
        "ActorErrors",
        _above(q.actor_error_share(panel=False), limits.ACTOR_ERROR_SHARE),
        "5m",
        "warning",
        "{{ $value | humanizePercentage }} of the trajectories end in an error.",
    ),
    Alert(
        "WeightUpdateFailing",
        _above(f"sum({_increase('learner_weight_publish_failures_total', '10m')})", limits.WEIGHT_UPDATE_FAILURES),
        "0m",
        "warning",
        "{{ $value | humanize }} weight updates failed in ten minutes.",
    ),
    Alert(
        "CheckpointStale",
        _above(
            f"time() - ({metric('learner_checkpoint_timestamp_seconds', panel=False)} > 0)",
            limits.CHECKPOINT_AGE_SECONDS,
        ),
        "5m",
        "warning",
        "The last checkpoint is {{ $value | humanizeDuration }} old.",
    ),
)


def alerts_yaml() -> str:
    """The rule file. Generated: change ``grafana/alerts.py`` or ``grafana/thresholds.py``, then regenerate."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.for_,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "runbook": f"{RUNBOOK}#{alert.name.lower()}"},
        }
        for alert in ALERTS
    ]
    head = "# Generated by `python -m grafana.generate` from grafana/alerts.py and grafana/thresholds.py.\n"
    document = {"groups": [{"name": "afterplay", "interval": "15s", "rules": rules}]}
    return head + yaml.safe_dump(document, sort_keys=False, width=140, allow_unicode=True)
