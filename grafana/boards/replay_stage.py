"""The dashboard of the replay stage: fill, back-pressure, drops, service, scores."""

from __future__ import annotations

from grafana import promql as q
from grafana import thresholds as limits
from grafana.boards import stats
from grafana.boards.flow import REPLAY
from grafana.boards.process import processes
from grafana.promql import metric, rate
from grafana.queries import by_label, p50_p95
from grafana.specs import BoardSpec, PanelSpec, Query, RowSpec, alert_stat
from grafana.thresholds import WINDOW

GLANCE = RowSpec(
    "At a glance",
    (
        alert_stat(
            "Fill",
            "percentunit",
            f"max({q.replay_fill()})",
            limits.REPLAY_FILL,
            "ReplayNearlyFull",
            "below 95 % in the fullest stage.",
            "checkpoint more often: trajectories are kept until a checkpoint covers them.",
            0,
        ),
        alert_stat(
            "Dropped as stale",
            "percentunit",
            q.stale_drop_share(),
            limits.STALE_DROP_SHARE,
            "ReplayDropsStale",
            "0 % of what arrives, apart from restarts.",
            "episodes last longer than staleness.max steps: raise the bound or play shorter ones.",
            1,
        ),
        alert_stat(
            "Refused as corrupt",
            "short",
            f"sum({q.corrupt_drops()})",
            limits.CORRUPT_DROPS,
            "ReplayCorrupt",
            f"0 in {WINDOW}.",
            "two versions of Afterplay talk to each other; the log names the peer.",
            0,
        ),
        stats.BLOCKED,
        stats.LENGTH_BIAS,
        stats.heartbeat("replay"),
        stats.targets_down("replay"),
    ),
)

CONTENTS = RowSpec(
    "Contents",
    (
        PanelSpec(
            "Payload bytes",
            "bytes",
            (Query(metric("replay_memory_bytes"), "{{instance}}"),),
            "a few batches, and the experience pool where replay is on.",
            "grows without bound: the learner has stopped checkpointing.",
            stacked=True,
            runbook="ReplayNearlyFull",
        ),
        PanelSpec(
            "Groups",
            "short",
            (
                Query(f"sum({metric('replay_groups_open')})", "open"),
                Query(f"sum({metric('replay_groups_ready')})", "ready for the learner"),
            ),
            "ready near 0 when the learner is fast, up to staleness.max batches when actors are.",
            "open for long and none ready: rollouts fail or a score function hangs.",
            runbook="LearnerStalled",
        ),
        PanelSpec(
            "Age of the oldest trajectory held",
            "none",
            (
                Query(
                    f"max({metric('learner_policy_version')}) - min({metric('replay_oldest_policy_version')})",
                    "versions",
                ),
            ),
            "staleness.max and what one checkpoint interval adds; the pool's trajectories are not counted.",
            "grows: a group never completes, or checkpoints fail.",
            runbook="CheckpointStale",
        ),
        PanelSpec(
            "Staleness on arrival",
            "none",
            (Query(q.buckets("replay_staleness_versions", 'at="insert"')),),
            "at or below staleness.max versions.",
            "late groups after a restart; a lasting tail means that episodes outlive several steps.",
            "heatmap",
            runbook="ReplayDropsStale",
        ),
        PanelSpec(
            "Staleness when handed over",
            "none",
            (Query(q.buckets("replay_staleness_versions", 'at="sample"')),),
            "as on arrival, or one more.",
            "far above arrival: trajectories wait for the learner, or for the rest of their group.",
            "heatmap",
            runbook="StalenessHigh",
        ),
        PanelSpec(
            "Wait between arrival and hand-over",
            "s",
            p50_p95("replay_item_age_seconds"),
            "about a learner step.",
            "p95 far above p50: slow members hold their groups back.",
        ),
    ),
)

SERVICE = RowSpec(
    "Service",
    (
        PanelSpec(
            "Orders",
            "cps",
            (
                Query(f"sum({rate('replay_orders_issued_total')})", "issued"),
                by_label("outcome", "replay_orders_total"),
            ),
            "issued and completed together.",
            "expired: an actor was lost or an episode took too long. error: see the actors' errors.",
            runbook="ActorErrors",
        ),
        PanelSpec(
            "Handed to the learner",
            "cps",
            (
                Query(f"sum({rate('replay_inserted_trajectories_total', q.ENVIRONMENT)})", "arrived"),
                Query(f"sum({rate('replay_sampled_trajectories_total')})", "handed over"),
            ),
            "the same rates, replays on top of what arrives.",
            "handed over far below arrived: groups do not complete, or the learner is slow.",
            runbook="LearnerStalled",
        ),
        PanelSpec(
            "Times a trajectory was handed over",
            "none",
            (Query(q.buckets("replay_item_samples")),),
            "1; more for stored ones that are replayed, and after a learner's restart.",
            "many times without replay: the learner restarts again and again.",
            "heatmap",
        ),
        PanelSpec(
            "Time the learner waited for a batch",
            "s",
            p50_p95("replay_sample_wait_seconds"),
            "near 0 when the learner is the bottleneck.",
            "long: generation is the bottleneck; add engines or actors.",
            runbook="LearnerStarved",
        ),
        PanelSpec(
            "Commit of arrivals",
            "s",
            (Query(q.quantile(0.95, "replay_rpc_duration_seconds", 'op="insert"', by="instance"), "p95 {{instance}}"),),
            "some milliseconds: one transaction for all that arrived meanwhile.",
            "slow disk: replay.synchronous: NORMAL, another disk, or replay.memory_only.",
            runbook="ActorBackpressure",
        ),
        PanelSpec(
            "Peers that fell silent",
            "short",
            (Query(f"sum by (peer) (increase({metric('replay_peers_dropped_total')}[{WINDOW}]))", "{{peer}}"),),
            f"0 (within {WINDOW}); 1 when a process was restarted.",
            "again and again: a process that hangs (LoopStuck) or a network that loses connections.",
            runbook="LoopStuck",
        ),
        PanelSpec(
            "Duration of a score",
            "s",
            (Query(q.buckets("replay_score_duration_seconds")),),
            "far below an episode. Empty without reward functions in the run file.",
            "slow: groups wait for their scores; make the function faster.",
            "heatmap",
        ),
        PanelSpec(
            "Scores that failed",
            "cps",
            (Query(f"sum by (function, reason) ({rate('replay_score_failures_total')})", "{{function}} {{reason}}"),),
            "0.",
            "its trajectories are unscored and its groups never complete: the stage's log has the message.",
            stacked=True,
            runbook="LearnerStalled",
        ),
    ),
)

REPLAY_STAGE = BoardSpec(
    "Afterplay / Replay stage", "afterplay-replay", (GLANCE, REPLAY, CONTENTS, SERVICE, processes("replay"))
)
