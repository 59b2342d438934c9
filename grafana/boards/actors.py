"""The dashboard of the actors: rate, errors, duration, and where their requests go."""

from __future__ import annotations

from dataclasses import replace

from grafana import promql as q
from grafana import thresholds as limits
from grafana.boards import stats
from grafana.boards.flow import ACTORS_BLOCKED
from grafana.boards.process import processes
from grafana.boards.programs import DOOR, TOOLS
from grafana.promql import metric, rate
from grafana.queries import by_label, p50_p95
from grafana.specs import BoardSpec, PanelSpec, Query, RowSpec, alert_stat
from grafana.thresholds import WINDOW

ENV = q.ENVIRONMENT

GLANCE = RowSpec(
    "At a glance",
    (
        stats.ACTOR_ERRORS,
        stats.BLOCKED,
        alert_stat(
            "Version lag",
            "none",
            q.policy_lag(),
            limits.POLICY_LAG_VERSIONS,
            "PolicyLagHigh",
            "0 or 1: versions that the slowest actor is behind the learner.",
            "an engine missed updates: see its log and weight updates failed.",
            0,
        ),
        alert_stat(
            "Weight updates failed",
            "short",
            q.weight_update_failures(),
            limits.WEIGHT_UPDATE_FAILURES,
            "WeightUpdateFailing",
            "0 in ten minutes.",
            "an engine does not take weights: its log says why; the run goes on with the others.",
            0,
        ),
        stats.LESSON_SEARCHES,
        stats.heartbeat("actor"),
        stats.targets_down("actor"),
    ),
)

EPISODES = RowSpec(
    "Episodes",
    (
        PanelSpec(
            "Episodes by outcome",
            "cps",
            (by_label("outcome", "actor_trajectories_total", ENV),),
            "steady; errors near 0.",
            "errors: engine requests that failed, then the actor's log.",
            stacked=True,
            runbook="ActorErrors",
        ),
        PanelSpec(
            "In flight",
            "short",
            (
                Query(f"sum({metric('actor_inflight_episodes')})", "episodes"),
                Query(f"sum({metric('actor_inflight_requests')})", "generation requests"),
            ),
            "episodes near actors x actor.concurrency; the rest of them waits for environments.",
            "few requests for many episodes: environments are slow. Few episodes: the staleness bound holds them.",
        ),
        PanelSpec(
            "Episode duration",
            "s",
            p50_p95("actor_episode_duration_seconds", ENV, by="env", legend=" {{env}}"),
            "p95 within a few times p50.",
            "a long tail holds groups open: lower sampling.max_tokens or max_turns of that environment.",
        ),
        PanelSpec(
            "Generated tokens of an episode",
            "none",
            (Query(q.buckets("actor_episode_tokens", ENV)),),
            "a band that moves slowly while the policy learns.",
            "piled up at the limit: episodes are cut; a collapse to few tokens: look at entropy and reward.",
            "heatmap",
        ),
        PanelSpec(
            "Versions inside an episode",
            "none",
            (Query(q.buckets("actor_trajectory_span_versions")),),
            "0 or 1: weights change while an episode is played.",
            "many versions: episodes are long against learner steps; the ratio of their first tokens suffers.",
            "heatmap",
            runbook="StalenessHigh",
        ),
        PanelSpec(
            "Latency of generation and environments",
            "s",
            (
                Query(q.quantile(0.95, "actor_generate_duration_seconds", by="backend"), "p95 {{backend}}"),
                Query(q.quantile(0.95, "actor_env_step_duration_seconds", ENV, by="env"), "p95 step {{env}}"),
            ),
            "steady at a given concurrency.",
            "a slow environment step without blocking: true stops everything else in that actor.",
        ),
    ),
)

SENDING = RowSpec(
    "Sending to the replay stage",
    (
        PanelSpec(
            "Waiting to be sent",
            "short",
            (Query(metric("actor_send_queue_trajectories"), "{{instance}}"),),
            "near 0.",
            "grows: the stage is slower than the actors, see the replay stage's service time.",
            runbook="ActorBackpressure",
        ),
        PanelSpec(
            "Sends that failed",
            "cps",
            (by_label("reason", "actor_send_failures_total"),),
            "0; some while the stage restarts: they are sent again.",
            "rejected: two versions of Afterplay, or orders that ran out. timeout: the stage is busy or gone.",
            stacked=True,
            runbook="ReplayCorrupt",
        ),
        replace(ACTORS_BLOCKED, title="Blocked"),
    ),
)

ROUTING = RowSpec(
    "Engines as the actors see them",
    (
        PanelSpec(
            "Engines",
            "short",
            (Query(f"sum by (instance, state) ({metric('actor_engines')})", "{{instance}} {{state}}"),),
            "all fit in every actor.",
            "unfit: not reachable, or behind with its weights; it is given no new sessions.",
            runbook="PolicyLagHigh",
        ),
        PanelSpec(
            "Requests that failed",
            "cps",
            (by_label("kind", "actor_engine_errors_total"),),
            "0; unavailable while an engine restarts.",
            "refused: the request is not acceptable (context length). protocol: another version of the engine.",
            stacked=True,
            runbook="ActorErrors",
        ),
        PanelSpec(
            "Prompt tokens by prefix cache",
            "percentunit",
            (
                Query(f"avg({metric('actor_prefix_cache_hit_ratio')})", "hits, latest"),
                Query(
                    f"sum by (result) ({rate('actor_prefix_tokens_total', window=WINDOW)}) / on () group_left () "
                    f"(sum({rate('actor_prefix_tokens_total', window=WINDOW)}) > 0)",
                    "{{result}}",
                ),
            ),
            "mostly hits with many turns or large groups.",
            "misses with many turns: sessions move between engines, or turns are shorter than a KV block.",
        ),
        PanelSpec(
            "Placements",
            "cps",
            (by_label("kind", "actor_sticky_placements_total"),),
            "first once a session, then sticky.",
            "moved: see the reasons.",
            stacked=True,
        ),
        PanelSpec(
            "Sessions that lost their engine",
            "cps",
            (by_label("reason", "actor_sticky_moves_total"),),
            "0.",
            "lagging: an engine misses updates. died: it restarts. evicted: more sessions than the table holds.",
            stacked=True,
            runbook="PolicyLagHigh",
        ),
        PanelSpec(
            "Sessions",
            "short",
            (Query(metric("actor_sticky_sessions"), "{{instance}}"),),
            "near the episodes in flight.",
            "grows without end: sessions are not closed; report it.",
        ),
    ),
)

ACTORS = BoardSpec(
    "Afterplay / Actors",
    "afterplay-actors",
    (GLANCE, EPISODES, SENDING, ROUTING, processes("actor"), TOOLS, DOOR),
)
