"""Rows about replays in the update: how far off-policy they are, how many there are, what the guard did."""

from __future__ import annotations

from grafana import experience as e
from grafana import promql as q
from grafana import thresholds as limits
from grafana.promql import metric, rate
from grafana.queries import by_label, largest, p50_p95
from grafana.specs import PanelSpec, Query, RowSpec
from grafana.thresholds import WINDOW

TOKEN = 'level="token"'


def _ratio(stat: str, reduce: str) -> Query:
    selector = metric("learner_source_importance_ratio", f'stat="{stat}"')
    return Query(f"{reduce} by (source) ({selector})", f"{{{{source}}}} {stat}")


OFF_POLICY = RowSpec(
    "How off-policy the replays are",
    (
        PanelSpec(
            "Effective sample size by source",
            "percentunit",
            (
                Query(q.ess("token", e.REPLAY), f"replay, {WINDOW} window"),
                Query(q.ess("token", e.FRESH), f"fresh, {WINDOW} window"),
                Query(f"min by (source) ({metric('learner_source_ess_ratio')})", "{{source}}, last batch"),
            ),
            "replays below fresh tokens and above the line. 0 for the last batch means that it had none.",
            "replay younger trajectories (replay.max_age, window) or switch replay.ess_guard on.",
            limit=limits.REPLAY_ESS,
            runbook="ReplayEssLow",
        ),
        PanelSpec(
            "Importance ratio of replayed tokens",
            "none",
            (Query(q.buckets("learner_importance_ratio", TOKEN, e.REPLAY)),),
            "a band around 1, wider than that of fresh tokens; above 1 more than below, as successes are replayed.",
            "weight beyond 1 + loss.off_clip_high is clipped and teaches nothing: replay younger trajectories.",
            "heatmap",
            runbook="ReplayEssLow",
        ),
        PanelSpec(
            "Importance ratio of fresh tokens",
            "none",
            (Query(q.buckets("learner_importance_ratio", TOKEN, e.FRESH)),),
            "one narrow band around 1: what replays are compared with.",
            "as wide as that of replays: staleness or the learning rate, not replay, is the trouble.",
            "heatmap",
            runbook="RatioHeavyTail",
        ),
        PanelSpec(
            "Importance ratio of the last batch by source",
            "none",
            (_ratio("mean", "max"), _ratio("min", "min"), _ratio("max", "max")),
            "fresh mean near 1; replay mean somewhat above 1. A source without tokens shows 0.",
            "a replay mean far above 1: the policy is sure of these already, and they can be left out.",
            log_scale=True,
        ),
        PanelSpec(
            "KL(μ‖π) of the last batch by source",
            "none",
            (Query(f"max by (source, estimator) ({metric('learner_source_kl_nats')})", "{{source}}, {{estimator}}"),),
            "fresh below 0.05 nat; replay more, and growing with its age.",
            "a climb of the replay lines comes before their ESS falls: lower replay.max_age.",
            runbook="ReplayEssLow",
        ),
        PanelSpec(
            "Policy loss of the last batch by source",
            "none",
            (
                largest("source", "learner_source_loss"),
                Query(f"max by (policy) ({metric('learner_policy_loss')})", "{{policy}}-policy form"),
            ),
            "around 0; that of replays is mostly negative, as they are successes.",
            "a replay loss far larger than the fresh one decides the step: lower replay.task_ratio.",
        ),
        PanelSpec(
            "Clipped tokens of the last batch by source",
            "percentunit",
            (largest("source", "learner_clip_ratio"),),
            "a few percent of either source's own tokens; replays have the wider clip (loss.off_clip_high).",
            "most replayed tokens clipped: they cost time and teach nothing; see ESS.",
        ),
        PanelSpec(
            "Age of replayed trajectories",
            "none",
            (Query(q.buckets("learner_replay_age_versions")),),
            "spread between staleness.max and replay.max_age (versions).",
            "piled up at the top: the pool is not renewed; see what enters and leaves it.",
            "heatmap",
            runbook="ReplayEssLow",
        ),
        PanelSpec(
            "Age of replays and of the pool",
            "none",
            (
                *p50_p95("learner_replay_age_versions", legend=" replayed"),
                Query(e.oldest_age(), "oldest stored"),
            ),
            "versions; the oldest grows until the pool is full. Above 64 the replayed lines stay at 64.",
            "replays as old as the pool: set replay.max_age, or replay.window for the latest only.",
        ),
    ),
)

SHARE = RowSpec(
    "How much is replayed, and what the guard does",
    (
        PanelSpec(
            "Share of replays",
            "percentunit",
            (
                Query(f"avg({metric('replay_planned_share_ratio')})", "groups planned"),
                Query(f"max({metric('learner_replay_token_ratio')})", "tokens of the last batch"),
                Query(f"avg({metric('replay_share_ratio')})", "tokens of the last update, as the stage counts"),
                Query(f"max({metric('learner_off_policy_token_ratio')})", "tokens with the off-policy loss"),
            ),
            "groups at replay.task_ratio after the start; tokens about k / n_rollout of that.",
            "tokens at 0 with groups planned: the pool has nothing valid. Off-policy above replayed: guided rows.",
            limit=limits.REPLAYED_TOKENS,
            runbook="ReplayDominates",
        ),
        PanelSpec(
            "What the guard leaves",
            "percentunit",
            (
                Query(e.share_kept(), "share, worst stage"),
                Query(f"max({metric('replay_guard_factor_ratio')})", "share, best stage"),
                Query(f"min({metric('learner_guard_learning_rate_ratio')})", "learning rate of the last step"),
            ),
            "100 %. A step with low ESS is shortened at once; the share shrinks fast and recovers slowly.",
            "a learning rate below 100 % all the time: the whole batch is off-policy, see the overview.",
            limit=limits.REPLAY_SHARE_KEPT,
            runbook="ReplayShareCollapsed",
        ),
        PanelSpec(
            "Guard actions",
            "short",
            (
                Query(
                    f"sum by (direction) (increase({metric('replay_guard_actions_total')}[{WINDOW}]))", "{{direction}}"
                ),
            ),
            f"none, or a few shrinks followed by many small recoveries (within {WINDOW}).",
            "as many shrinks as updates: the floor of the guard cannot be held with this pool.",
            stacked=True,
            runbook="ReplayShareCollapsed",
        ),
        PanelSpec(
            "Trained trajectories by source",
            "cps",
            (
                by_label("source", "learner_trained_trajectories_total", window=WINDOW),
                Query(f"sum({rate('replay_replays_trained_total', window=WINDOW)})", "replays, as the stage counts"),
            ),
            "mostly fresh; both counts of replays agree.",
            "counts that differ for long: a learner that went back, see groups by outcome in the overview.",
        ),
        PanelSpec(
            "Rescued groups",
            "cps",
            (Query(f"sum({rate('replay_rescued_groups_total', window=WINDOW)})", "rescued"),),
            "0 with replay.inject: ratio; with rescue, the groups that failed altogether and had a stored success.",
            "0 with rescue while hard tasks are many: nothing is stored for them, see tasks by difficulty.",
        ),
        PanelSpec(
            "Choice of replays",
            "cps",
            (
                Query(f"sum({rate('learner_scored_candidates_total', window=WINDOW)})", "candidates scored"),
                Query(f"sum({rate('learner_failed_choices_total', window=WINDOW)})", "choices failed, learner"),
                Query(f"sum({rate('replay_choice_failures_total', window=WINDOW)})", "choices failed, stage"),
            ),
            "candidates scored with replay.entropy: current, nothing failed; all 0 with stored.",
            "failed: the learner's log names the reason (often memory in the scoring pass).",
            runbook="ReplayChoiceFailures",
        ),
    ),
)
