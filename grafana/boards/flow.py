"""Rows about the way of a trajectory from the actors to the learner."""

from __future__ import annotations

from grafana import promql as q
from grafana import thresholds as limits
from grafana.promql import metric, rate
from grafana.queries import by_label, p50_p95
from grafana.specs import PanelSpec, Query, RowSpec
from grafana.thresholds import GROUPS_WINDOW, WINDOW
from pipeline.metrics.replay import EQUAL_GROUPS

ENV = q.ENVIRONMENT

ACTORS_BLOCKED = PanelSpec(
    "Actors blocked by replay",
    "percentunit",
    (Query(q.actor_blocked_share(), "{{instance}}"),),
    "0 %.",
    "replay is slower than the actors: disk, or transport.credit_bytes too small.",
    limit=limits.ACTOR_BLOCKED_SHARE,
    runbook="ActorBackpressure",
)

THROUGHPUT = RowSpec(
    "Throughput",
    (
        PanelSpec(
            "Trajectories",
            "cps",
            (by_label("outcome", "actor_trajectories_total", ENV),),
            "steady; errors near 0.",
            "no trajectories: engine row, then the actor's /healthz.",
            stacked=True,
            runbook="ActorErrors",
        ),
        PanelSpec(
            "Tokens",
            "cps",
            (
                Query(f"sum by (kind) ({rate('actor_tokens_total')})", "actors, {{kind}}"),
                Query(f"sum by (kind) ({rate('learner_tokens_total', window=WINDOW)})", "learner, {{kind}}"),
            ),
            "generated and trained tokens per second of the same size; little discarded or padding.",
            "much padding: raise learner.tokens_per_microbatch; much discarded: episodes hit their limits.",
        ),
        PanelSpec(
            "Learner steps",
            "cpm",
            (Query(f"60 * sum({rate('learner_steps_total', window=WINDOW)})", "steps"),),
            "steady.",
            "0 while trajectories arrive: LearnerStalled.",
            runbook="LearnerStalled",
        ),
        PanelSpec(
            "Learner time by stage",
            "percentunit",
            (by_label("stage", "learner_step_duration_seconds_sum", window=WINDOW),),
            "the stages sum to about 1 second per second; forward and backward dominate a busy learner.",
            "wait dominates: generation is the bottleneck. publish dominates: engines load weights slowly.",
            stacked=True,
        ),
        PanelSpec(
            "Learner wait share",
            "percentunit",
            (Query(q.idle_share(window=WINDOW), "{{instance}}"),),
            "below 50 %.",
            "add engines or actors, or raise staleness.max so that playing and training overlap.",
            limit=limits.LEARNER_IDLE_SHARE,
            runbook="LearnerStarved",
        ),
        PanelSpec(
            "Generation latency",
            "s",
            (
                *p50_p95("actor_generate_duration_seconds", window=q.RATE, legend=" request"),
                Query(q.quantile(0.95, "actor_env_step_duration_seconds", ENV, window=q.RATE), "p95 environment step"),
            ),
            "steady at a given concurrency.",
            "rising with requests waiting in the engine: it is saturated.",
        ),
    ),
)

REPLAY = RowSpec(
    "Replay stage",
    (
        PanelSpec(
            "Orders and groups in flight",
            "short",
            (
                Query(f"sum({metric('replay_orders_inflight')})", "orders in flight"),
                Query(f"sum({metric('replay_admission_capacity_trajectories')})", "admission left"),
            ),
            "in flight near actors x concurrency; admission left near 0 when the learner is the bottleneck.",
            "both 0: no actor is connected, or no policy version was announced yet.",
        ),
        PanelSpec(
            "Trajectories held",
            "short",
            (Query(f"sum({metric('replay_trajectories')})", "held"),),
            "a few batches.",
            "grows without bound: the learner has stopped checkpointing.",
            runbook="ReplayNearlyFull",
        ),
        PanelSpec(
            "Terminal states",
            "cps",
            (by_label("state", "replay_terminal_trajectories_total"),),
            "almost all trained.",
            "each other state names its reason; unscored points at a reward function, refused at late orders.",
            stacked=True,
            runbook="ReplayDropsStale",
        ),
        PanelSpec(
            "Groups by outcome",
            "cps",
            (by_label("outcome", "replay_groups_total"),),
            "trained groups only.",
            "cancelled: rollouts failed groups.attempts_max times; rolled_back: the learner resumed from a checkpoint.",
            stacked=True,
        ),
        PanelSpec(
            "Dropped trajectories",
            "cps",
            (by_label("reason", "replay_dropped_trajectories_total"),),
            "0, apart from duplicates after a reconnection.",
            "corrupt or schema: two versions of Afterplay talk to each other. stale: lower the load or staleness.",
            runbook="ReplayCorrupt",
        ),
        PanelSpec(
            "Connected peers",
            "short",
            (Query(f"sum by (peer) ({metric('replay_connected_peers')})", "{{peer}}"),),
            "every actor and one learner.",
            "a missing peer: its process, then address and CURVE keys.",
            runbook="TargetDown",
        ),
        ACTORS_BLOCKED,
        PanelSpec(
            "Groups that teach nothing",
            "percentunit",
            (
                Query(q.equal_groups(), "all rewards equal"),
                *(Query(q.equal_groups(f'action="{action}"'), action) for action in EQUAL_GROUPS),
            ),
            f"well below 80 % of the groups that finish (within {GROUPS_WINDOW}); kept ones cost time.",
            "tasks too hard or too easy: mix others in, raise n_rollout, or set groups.equal_rewards: refill.",
            limit=limits.EQUAL_GROUPS,
            runbook="GroupsTeachNothing",
        ),
    ),
)
