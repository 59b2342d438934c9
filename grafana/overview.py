"""The first dashboard: is the run on track, and how far off-policy is it?"""

from __future__ import annotations

from grafana import promql as q
from grafana import thresholds as limits
from grafana.names import VLLM_UPDATE
from grafana.panels import PanelSpec, Query, RowSpec
from grafana.promql import metric, rate
from grafana.thresholds import WINDOW

TITLE = "Afterplay / Overview"
UID = "afterplay-overview"
TOKEN = 'level="token"'
ENV = q.ENVIRONMENT
TRAINED = rate("learner_tokens_total", 'kind="trained"', window=WINDOW)


def _batch_ratio(stat: str, reduce: str) -> str:
    selector = metric("learner_batch_importance_ratio", TOKEN, f'stat="{stat}"')
    return f"{reduce}({selector})"


def _stat(
    title: str,
    unit: str,
    expr: str,
    limit: limits.Limit | limits.Band,
    runbook: str,
    normal: str,
    action: str,
    decimals: int | None = None,
) -> PanelSpec:
    return PanelSpec(
        title,
        unit,
        (Query(expr),),
        normal,
        action,
        "stat",
        limit,
        width=3,
        height=4,
        runbook=runbook,
        decimals=decimals,
    )


GLANCE = RowSpec(
    "At a glance",
    (
        _stat(
            "ESS",
            "percentunit",
            q.ess("token"),
            limits.ESS,
            "LowESS",
            "above 0.5; 1.0 is exactly on-policy.",
            "the policy has moved far from the one that sampled: lower the learning rate or staleness.max.",
            1,
        ),
        _stat(
            "Mean ratio π/μ",
            "none",
            q.ratio_mean(),
            limits.RATIO_MEAN,
            "RatioBias",
            "within 0.1 of 1.",
            "look at engine mismatch first (dtype, chat template), then at staleness.",
            3,
        ),
        _stat(
            "Staleness p95",
            "none",
            q.quantile(0.95, "learner_staleness_versions"),
            limits.STALENESS_P95_VERSIONS,
            "StalenessHigh",
            "at most staleness.max versions (histogram buckets round up).",
            "actors are too slow for the learner or a restart brought back old groups.",
            1,
        ),
        _stat(
            "Learner idle",
            "percentunit",
            f"max({q.idle_share()})",
            limits.LEARNER_IDLE_SHARE,
            "LearnerStarved",
            "below 50 %; higher while engines start.",
            "generation is the bottleneck: add engines or actors, or raise actor.concurrency.",
            0,
        ),
        _stat(
            "Engine mismatch p99",
            "none",
            q.engine_mismatch(),
            limits.ENGINE_MISMATCH_P99_NATS,
            "EngineMismatch",
            "under 0.5 nat with a bfloat16 engine, under 1e-4 with float32 (lag 0; the last 5 minutes that had any).",
            "engine and learner compute different models: compare dtype, weights, template and rope settings.",
            3,
        ),
        _stat(
            "Actor errors",
            "percentunit",
            q.actor_error_share(),
            limits.ACTOR_ERROR_SHARE,
            "ActorErrors",
            "0 %; a few while an engine restarts.",
            "read the failure reasons in the actor's log; a plug-in or an engine is failing.",
            1,
        ),
        _stat(
            "Oldest heartbeat",
            "s",
            f"max({q.heartbeat_age()})",
            limits.HEARTBEAT_AGE_SECONDS,
            "LoopStuck",
            "a few seconds, at most one learner step.",
            "a main loop is stuck: /healthz of that process says what it waits for.",
            0,
        ),
        _stat(
            "Targets down",
            "short",
            f"count({metric('up')}) - sum({metric('up')})",
            limits.TARGETS_DOWN,
            "TargetDown",
            "0.",
            "see which process is gone and why in its log; the supervisor restarts it.",
            0,
        ),
    ),
)

OFF_POLICY = RowSpec(
    "How off-policy",
    (
        PanelSpec(
            "Importance ratio of the last batch",
            "none",
            (
                Query(_batch_ratio("mean", "max"), "mean"),
                Query(_batch_ratio("min", "min"), "min"),
                Query(_batch_ratio("max", "max"), "max"),
            ),
            "the mean stays near 1; min and max are single tokens and may be far out.",
            "a drifting mean is bias (see engine mismatch); a growing max alone is clipped by the loss.",
            log_scale=True,
            runbook="RatioBias",
        ),
        PanelSpec(
            "Importance ratio histogram",
            "none",
            (Query(q.buckets("learner_importance_ratio", TOKEN)),),
            "one bright band around 1.",
            "a band that widens means staleness or a learning rate that is too high; two bands mean mixed sources.",
            "heatmap",
            runbook="RatioHeavyTail",
        ),
        PanelSpec(
            "Effective sample size",
            "percentunit",
            (
                Query(f"max by (level) ({metric('learner_batch_ess_ratio')})", "last batch, {{level}}"),
                Query(q.ess("token"), f"{WINDOW} window, token"),
            ),
            "above 0.5. Sequence level is always lower than token level.",
            "below 0.3 most of the batch no longer teaches anything: lower staleness.max or the learning rate.",
            limit=limits.ESS,
            runbook="LowESS",
        ),
        PanelSpec(
            "Ratios outside (0.5, 2]",
            "percentunit",
            (Query(q.ratio_tail(), "share of tokens"),),
            "below 5 % of tokens.",
            "see ESS; the clip removes the gradient of most of these tokens.",
            limit=limits.RATIO_TAIL,
            runbook="RatioHeavyTail",
        ),
        PanelSpec(
            "Clipped and rejected tokens",
            "percentunit",
            (
                Query(
                    f"sum by (side) ({rate('learner_clipped_tokens_total', window=WINDOW)}) / on () group_left () "
                    f"sum({TRAINED})",
                    "clipped {{side}}",
                ),
                Query(
                    f"sum by (reason) ({rate('learner_rejected_tokens_total', window=WINDOW)}) / on () "
                    f"group_left () sum({TRAINED})",
                    "rejected {{reason}}",
                ),
            ),
            "a few percent clipped, nothing rejected.",
            "much clipping wastes rollouts: fewer minibatches or epochs, a lower learning rate.",
        ),
        PanelSpec(
            "KL(μ‖π) of the last batch",
            "none",
            (Query(f"max by (estimator) ({metric('learner_behaviour_kl_nats')})", "{{estimator}}"),),
            "below 0.05 nat; k1 may be slightly negative, k3 never is.",
            "a steady climb comes before ESS falls: act on it early.",
        ),
    ),
)

STALENESS = RowSpec(
    "Staleness",
    (
        PanelSpec(
            "Staleness of trained trajectories",
            "none",
            (Query(q.buckets("learner_staleness_versions")),),
            "everything at or below staleness.max versions.",
            "late groups after a restart are trained or dropped by staleness.late; a lasting tail is a bug.",
            "heatmap",
            runbook="StalenessHigh",
        ),
        PanelSpec(
            "Staleness p50 and p95",
            "none",
            (
                Query(q.quantile(0.5, "learner_staleness_versions"), "p50 trained"),
                Query(q.quantile(0.95, "learner_staleness_versions"), "p95 trained"),
            ),
            "p95 at most staleness.max (versions).",
            "actors are behind: look at weight updates and generation latency.",
            limit=limits.STALENESS_P95_VERSIONS,
            runbook="StalenessHigh",
        ),
        PanelSpec(
            "Policy versions",
            "none",
            (
                Query(f"max({metric('learner_policy_version')})", "learner"),
                Query(metric("actor_policy_version"), "actor {{instance}}"),
            ),
            "stairs that rise together; actors follow within a step.",
            "an actor that stays behind plays on an engine that missed an update.",
            runbook="PolicyLagHigh",
        ),
    ),
)

LEARNING = RowSpec(
    "Learning",
    (
        PanelSpec(
            "Reward",
            "none",
            (
                Query(f"max by (env) ({metric('learner_reward_mean', ENV)})", "trained, {{env}}"),
                Query(
                    f"sum by (env) ({rate('actor_episode_reward_sum', ENV, window=WINDOW)}) / "
                    f"sum by (env) ({rate('actor_episode_reward_count', ENV, window=WINDOW)})",
                    "sampled, {{env}}",
                ),
            ),
            "rises; trained and sampled run together.",
            "a gap between the two is selection bias; a fall after a rise is a policy that collapsed (see entropy).",
        ),
        PanelSpec(
            "Entropy of sampled tokens",
            "none",
            (Query(f"max({metric('learner_entropy_nats')})", "entropy"),),
            "falls slowly from its start (nat per token).",
            "near 0 early on is collapse: lower the learning rate or add loss.entropy_bonus.",
        ),
        PanelSpec(
            "Loss and gradient norm",
            "none",
            (
                Query(f"max by (term) ({metric('learner_loss')})", "loss {{term}}"),
                Query(f"max({metric('learner_grad_norm')})", "gradient norm"),
            ),
            "the policy loss hovers around 0 (it is no measure of progress); the norm is steady.",
            "spikes of the norm: learner.grad_clip limits them; look at rejected tokens and ratios.",
            runbook="NonFinite",
        ),
    ),
)

THROUGHPUT = RowSpec(
    "Throughput",
    (
        PanelSpec(
            "Trajectories",
            "cps",
            (Query(f"sum by (outcome) ({rate('actor_trajectories_total', ENV)})", "{{outcome}}"),),
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
            (Query(f"sum by (stage) ({rate('learner_step_duration_seconds_sum', window=WINDOW)})", "{{stage}}"),),
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
                Query(q.quantile(0.5, "actor_generate_duration_seconds", window=q.RATE), "p50 request"),
                Query(q.quantile(0.95, "actor_generate_duration_seconds", window=q.RATE), "p95 request"),
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
            (Query(f"sum by (state) ({rate('replay_terminal_trajectories_total')})", "{{state}}"),),
            "almost all trained.",
            "each other state names its reason; unscored points at a reward function, refused at late orders.",
            stacked=True,
            runbook="ReplayDropsStale",
        ),
        PanelSpec(
            "Groups by outcome",
            "cps",
            (Query(f"sum by (outcome) ({rate('replay_groups_total')})", "{{outcome}}"),),
            "trained groups only.",
            "cancelled: rollouts failed groups.attempts_max times; rolled_back: the learner resumed from a checkpoint.",
            stacked=True,
        ),
        PanelSpec(
            "Dropped trajectories",
            "cps",
            (Query(f"sum by (reason) ({rate('replay_dropped_trajectories_total')})", "{{reason}}"),),
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
        PanelSpec(
            "Actors blocked by replay",
            "percentunit",
            (Query(q.actor_blocked_share(), "{{instance}}"),),
            "0 %.",
            "replay is slower than the actors: disk, or transport.credit_bytes too small.",
            limit=limits.ACTOR_BLOCKED_SHARE,
            runbook="ActorBackpressure",
        ),
    ),
)

ENGINE = RowSpec(
    "Engines (vLLM's own metrics)",
    (
        PanelSpec(
            "Requests",
            "short",
            (
                Query(f"sum by (instance) ({metric('vllm:num_requests_running')})", "running {{instance}}"),
                Query(f"sum by (instance) ({metric('vllm:num_requests_waiting')})", "waiting {{instance}}"),
            ),
            "running near engine.max_sequences, few waiting.",
            "many waiting: more engines or less concurrency. None running: actors wait for something else.",
        ),
        PanelSpec(
            "Generated tokens",
            "cps",
            (Query(f"sum by (instance) ({rate('vllm:generation_tokens_total')})", "{{instance}}"),),
            "steady, with short dips at weight updates.",
            "dips that last: see weight update time.",
        ),
        PanelSpec(
            "Prefix cache hits",
            "percentunit",
            (
                Query(
                    f"sum by (instance) ({rate('vllm:prefix_cache_hits_total')}) / "
                    f"(sum by (instance) ({rate('vllm:prefix_cache_queries_total')}) > 0)",
                    "{{instance}}",
                ),
            ),
            "high for multi-turn environments; whole KV blocks only.",
            "low with many turns: sessions move between engines, or engine.block_size is larger than a turn.",
        ),
        PanelSpec(
            "KV cache use",
            "percentunit",
            (Query(f"max by (instance) ({metric('vllm:kv_cache_usage_perc')})", "{{instance}}"),),
            "below 90 %.",
            "full: requests are preempted; raise engine.kv_cache_gib or lower engine.max_sequences.",
        ),
        PanelSpec(
            "Preemptions",
            "cps",
            (Query(f"sum by (instance) ({rate('vllm:num_preemptions_total')})", "{{instance}}"),),
            "0.",
            "the KV cache is too small for the requests in flight.",
        ),
        PanelSpec(
            "Weight publication",
            "s",
            (
                Query(q.quantile(0.5, "learner_weight_publish_duration_seconds"), "p50"),
                Query(q.quantile(0.95, "learner_weight_publish_duration_seconds"), "p95"),
            ),
            "about a second per billion parameters on disk, from writing to the last engine that resumed.",
            "generation pauses for a part of it at every version: faster storage, or NCCL/IPC transfer on GPU.",
            runbook="WeightUpdateFailing",
        ),
        PanelSpec(
            "Weight transfer operations",
            "s",
            (
                Query(
                    f"sum by (operation) ({rate(VLLM_UPDATE + '_sum', window=WINDOW)}) / "
                    f"sum by (operation) ({rate(VLLM_UPDATE + '_count', window=WINDOW)})",
                    "{{operation}}",
                ),
            ),
            "empty with engine.weight_transfer: files; with nccl or ipc, update takes most of the time.",
            "init or start that takes long: trainer and engines wait for each other, look at both logs.",
            runbook="WeightUpdateFailing",
        ),
    ),
)

ROWS = (GLANCE, OFF_POLICY, STALENESS, LEARNING, THROUGHPUT, REPLAY, ENGINE)
